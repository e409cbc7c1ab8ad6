"""Evaluates the model: each sample on exactly one rank, and means over the samples of all ranks."""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..errors import ConfigError, Interrupted, one_line
from .config import Config, LoaderConfig
from .data import EvaluationLoader, MicroBatch, Plan, TrainLoader, check_whole, loss_weight_of, move
from .global_batch import global_batch
from .optimizer import changed_marks, leaves_of, number_of
from .ranks import Rank, all_reduce, from_main, gather_objects, pack, unpack
from .strategies import BATCH_NORMS, Strategy, buffers_restored
from .task import RESERVED, SAME_TERMS, Task

QUIET = (*BATCH_NORMS, nn.Dropout, nn.Dropout2d)
"""Parts that make a loss depend on more than its samples, and do not decide what it is."""
logger = logging.getLogger(__name__)


def total_of(loss: Any) -> Tensor:
    """Return the loss to train. compute_loss may return a dict of terms: then it is their sum."""
    total: Tensor = torch.stack([*loss.values()]).sum() if isinstance(loss, dict) else loss
    return total


@torch.no_grad()
def figures_of(
    task: Task, loss: Any, outputs: Any, batch: Any, weight: Any = 1.0
) -> dict[str, Tensor]:
    """Return the loss, its terms and the means of training_metrics() by name, 0-dim and detached.

    One that is no number counts as 0 if the batch's weight is 0: a mean of nothing may be 0/0.
    """
    figures = {"loss": total_of(loss)}
    if isinstance(loss, dict):
        figures |= loss
    if task.training_metrics:
        more = task.training_metrics(outputs, batch)
        if taken := figures.keys() & more.keys():
            problem = f"{', '.join(sorted(taken))} is a term of the loss, too. Rename it"
            raise ConfigError(f"training_metrics() in model.py: {problem}.")
        figures |= more
    device = figures["loss"].device
    values = {name: figures[name].detach().to(device) for name in sorted(figures)}
    return {
        name: value.where(value.isfinite() | (weight != 0), 0.0) for name, value in values.items()
    }


def check_names(figures: dict[str, Tensor]) -> None:
    """Raise ConfigError if rank 0 has figures of other names: ranks add them up by their places."""
    names = [*figures]
    if from_main(lambda: names) != names:
        raise ConfigError(f"compute_loss in model.py: {SAME_TERMS}")


def means_of(figures: dict[str, Tensor], totals: Tensor) -> dict[str, float]:
    """Return the means over all ranks by name. `totals` holds a sum for each, and the weights' sum."""
    *sums, weight = all_reduce(totals).tolist()
    means = [total / weight if weight else math.nan for total in sums]
    return dict(zip(figures, means, strict=True))


@contextmanager
def in_eval_mode(module: nn.Module, kinds: Any = nn.Module) -> Iterator[None]:
    """Put parts of these kinds in eval mode. Afterwards, what build_model() left in it stays there."""
    modes = [(part, part.training) for part in module.modules()]  # from the outermost inwards
    for part, _ in modes:
        if isinstance(part, kinds):
            part.eval()
    try:
        yield
    finally:
        for part, is_training in modes:
            if part.training != is_training:
                part.train(is_training)


@contextmanager
def telling_of_changes(strategy: Strategy, task: Task) -> Iterator[None]:
    """Warn of what the body changes in the model or model.py, and no checkpoint holds.

    That is plain numbers, lists of model.py that grow, and frozen weights. A tensor that forward
    puts into an attribute is made anew each time.
    """

    def marks() -> dict[str, list[Any]]:
        found: dict[str, Any] = {}
        for name, value in task.model_globals.items():
            found[name] = [value, len(value) if isinstance(value, list) else 0]
        for name, part in strategy.module.named_modules():
            own = vars(part).items()
            found |= {f"{name}.{key}".lstrip("."): v for key, v in own if not key.startswith("_")}
        marks = {name: [number_of(leaf) for leaf in leaves_of(v)] for name, v in found.items()}
        for name, weight in strategy.module.named_parameters():
            is_whole = type(weight) is nn.Parameter and weight.is_floating_point()
            if is_whole and not weight.requires_grad:  # an encoder that forward moves
                marks[name] = [str(weight.detach().sum(dtype=torch.float32).item())]
        return marks

    former = marks()
    yield
    changed = {*changed_marks(former, marks())} - strategy.told
    if changed:
        strategy.told |= changed
        logger.warning(
            "warning: compute_loss or a metric changes %s of the model or model.py. So do trials "
            "of them, and no checkpoint holds it: register a buffer, or change it in after_step.",
            ", ".join(sorted(changed)[:5]),
        )


class Evaluator:
    def __init__(self, dataset: Any, name: str, config: Config, rank: Rank, task: Task) -> None:
        max_batches, size = config.evaluation.max_batches, config.training.global_batch_size
        limit = max_batches and max_batches * size
        self._config, self._task, self._rank = config, task, rank
        self._loader = self.create_loader(dataset, task, config.loader, rank, name, size, limit)
        self.num_samples = self._loader.num_samples
        sizes = config.evaluation.micro_batch_size, config.training.micro_batch_size
        share = -(-size // rank.world_size)
        self.micro_batch_size = next((int(size) for size in sizes if size != "auto"), share)
        if sizes[0] != "auto":
            check_whole(task, "evaluation", self.micro_batch_size, share)

    @staticmethod
    def create_loader(
        dataset: Any,
        task: Task,
        config: LoaderConfig,
        rank: Rank,
        name: str,
        batch_size: int = 0,
        limit: int | None = None,
    ) -> EvaluationLoader:
        """Return the loader of a split, or of inputs to predict."""
        return EvaluationLoader(Plan(dataset, task, name), config, rank, batch_size, limit)

    def write_report(self, directory: Path, checkpoint: str, step: int) -> str:
        """Write what the metrics give besides numbers, and return it as text. Size=full does."""
        return ""

    @cached_property
    def _metrics(self) -> Any:
        from torchmetrics import Metric, MetricCollection  # here, since it takes seconds

        metrics = self._task.build_metrics(self._config.model).to(self._rank.device)
        for part in metrics.modules():
            if isinstance(part, MetricCollection) and part._enable_compute_groups is True:
                part._enable_compute_groups = False  # a rank's first batch would form the groups
        self._parts = [part for part in metrics.modules() if isinstance(part, Metric)]
        for metric in self._parts:
            metric.distributed_available_fn = lambda: False  # _compute_metrics() gathers the states
            if self._rank.world_size > 1 and not (metric.metric_state or [*metric.children()]):
                problem = (
                    f"{type(metric).__name__} keeps its numbers where ranks cannot add them up"
                )
                raise ConfigError(
                    f"build_metrics in model.py: {problem}. Call add_state() for each."
                )
        return metrics

    @torch.no_grad()
    def run(
        self,
        strategy: Strategy,
        stop_code: Callable[[], Any] = int,
        log: Any = None,
        micro_batches: Iterable[MicroBatch] | None = None,
    ) -> dict[str, float]:
        """Return the mean loss and the metrics by name, the same on every rank, which all call this.

        Training depends on nothing that happens here. Raise Interrupted if stop_code() is not 0
        before a micro-batch. Given some, evaluate these alone.
        """
        module = strategy.evaluation_model
        with in_eval_mode(module), buffers_restored(module):
            strategy.synchronize_buffers()
            micro_batches = micro_batches or self._loader.read(self.micro_batch_size)
            figures = means_of(*self._sums(strategy, micro_batches, stop_code))
            if log is not None and self._task.on_evaluation_end is not None:
                try:
                    with strategy.gathered(), strategy.autocast():
                        self._task.on_evaluation_end(module, log)
                except Exception:  # it only looks on
                    message = "warning: on_evaluation_end() of model.py failed; the run goes on"
                    logger.warning(message, exc_info=True)
            computed = self._compute_metrics()
            if taken := computed.keys() & (self._terms | RESERVED):
                problem = f"{', '.join(sorted(taken))} is the name of another number"
                raise ConfigError(f"build_metrics in model.py: {problem}. Rename it.")
            figures |= computed
        metric = self._config.evaluation.metric
        if log is not None and not math.isfinite(figures[metric]):
            message = "warning: evaluation.metric=%s is %g, so no best.pt is kept"
            logger.warning(message, metric, figures[metric])
        return figures

    def check_means(self, strategy: Strategy, training: TrainLoader | None = None) -> None:
        """Warn of a loss or figure of a micro-batch that is no mean of its parts'.

        Look at `training`, or else at the evaluated split. A fresh model's samples have nearly
        equal losses, which hides much: ask again after a while.
        """
        loader: Any = training or self._loader
        # One that compares samples is no mean: check_global_batch() looks at it.
        if self._task.compares_samples or loader.num_samples == sys.maxsize:
            return
        size, module = min(32, (training or self).micro_batch_size), strategy.evaluation_model
        has_gradients = training is not None and not strategy.has_collective_forward
        # a loss in bf16 is rounded by up to 0.2 %, here and there
        exact = 2e-5 if self._rank.device.type == "cpu" else 1e-3
        tolerance = 0.005 if strategy.dtype else exact
        whole, parts = list[dict[str, float]](), list[dict[str, float]]()

        def is_off(name: str) -> bool:
            one, two = ([figures[name] for figures in kind] for kind in (whole, parts))
            gap = max(min(one) - max(two), min(two) - max(one))
            return gap > tolerance * abs(one[0]) + max(one) - min(one) + max(two) - min(two)

        with (
            in_eval_mode(module, QUIET if training else nn.Module),
            buffers_restored(module),
            torch.set_grad_enabled(has_gradients),
        ):
            strategy.synchronize_buffers()
            for shift in range(4):  # again, since what is drawn may make the difference
                for kind in (whole, parts):
                    few = loader.read_trial(size, shift, is_cut=kind is parts)
                    problem = ""
                    try:
                        sums = self._sums(strategy, few, is_trial=True)
                    except ConfigError:
                        raise
                    except Exception as error:  # a model of batches of one size, say
                        problem = one_line(repr(error))
                    # All ranks give up together, or their next collectives would not match.
                    if all_reduce(torch.tensor(float(bool(problem))), dist.ReduceOp.MAX):
                        logger.info("whether the loss is a mean is unknown: no trial (%s)", problem)
                        return
                    check_names(sums[0])
                    kind.append(means_of(*sums))
                off = [name for name in whole[0] if is_off(name)]
                if not off:
                    return
        for name in off:
            logger.warning(
                "warning: the %s is no mean over samples: %.7g for a batch, %.7g for its parts. For "
                "tokens or class weights define loss_weight(), and for a loss that compares samples "
                "loss_over; figures are means over the same, and padding must be masked: README.",
                name,
                whole[0][name],
                parts[0][name],
            )

    def rehearse(self, strategy: Strategy) -> None:
        """Evaluate a micro-batch. Raise ConfigError for a wrong metric or mode."""
        with telling_of_changes(strategy, self._task):
            micro_batch = self._loader.read_trial(self.micro_batch_size)
            whole = self.run(strategy, micro_batches=micro_batch)
            self.check_means(strategy)
        metric, mode = self._config.evaluation.metric, self._config.evaluation.mode
        if metric not in whole:
            problem = f"not among the numbers of an evaluation ({', '.join(whole)})"
            raise ConfigError(f"evaluation.metric={metric}: {problem}. Name one of them.")
        of_metric = dict(self._metrics.items()).get(metric)
        is_higher_better = metric not in self._terms and getattr(
            of_metric, "higher_is_better", None
        )
        better = {None: mode, True: "max", False: "min"}[is_higher_better]
        if mode != better:
            problem = f"would keep the worst checkpoint of evaluation.metric={metric}"
            raise ConfigError(f"evaluation.mode={mode}: {problem}. Set {better}.")
        if is_higher_better is None:  # nothing but its name says what is better
            logger.info("evaluation.mode=%s: best.pt has the %simum of %s", mode, mode, metric)
        del self._metrics  # the run's own are built anew

    def _sums(
        self,
        strategy: Strategy,
        micro_batches: Iterable[MicroBatch],
        stop_code: Callable[[], Any] = int,
        *,
        is_trial: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return figures of this rank's last micro-batch, and the sums of all and of their weights.

        Update the metrics, unless it is a trial.
        """
        task, module = self._task, strategy.evaluation_model
        has_metrics = not is_trial and len(self._metrics) > 0
        totals: Any = 0.0
        for batch, request in micro_batches:
            if stop_code():
                raise Interrupted
            restored = buffers_restored(module) if is_trial else nullcontext()
            with global_batch(request.batch_size), restored:
                weight = loss_weight_of((batch, request), task, strategy.module, self._rank)
                with strategy.autocast():
                    loss, outputs = task.compute_loss(module, batch)
                    figures = figures_of(task, loss, outputs, batch, weight)
                self._terms = {"loss", *(loss if isinstance(loss, dict) else ())}
            if has_metrics and task.evaluate_batch is not None:
                with strategy.gathered(), strategy.autocast():  # on all ranks
                    outputs = task.evaluate_batch(module, batch)
            if has_metrics and request.num_samples:
                task.update_metrics(self._metrics, outputs, batch)
            values = [value.to(weight) * weight for value in figures.values()]
            totals = totals + torch.stack([*values, weight])
        return figures, totals

    def _compute_metrics(self) -> dict[str, float]:
        """Compute the metrics over all ranks and reset them. Return those that are numbers."""
        # If torchmetrics gathered them, lists of different lengths would make ranks hang.
        states = gather_objects(pack([metric.metric_state for metric in self._parts]))
        if states is not None and len(states) > 1:
            for metric, *parts in zip(self._parts, *map(unpack, states), strict=True):
                for name, reduce in metric._reductions.items():
                    values: Any = [move(part[name], metric.device) for part in parts]
                    if isinstance(values[0], list):
                        values = [*chain(*values)]  # as one rank with all samples holds it
                    else:
                        values = torch.stack(values)
                        values = reduce(values) if callable(reduce) else values
                    setattr(metric, name, values)
        self.values = found = from_main(
            lambda: apply_to_collection(self._metrics.compute(), Tensor, Tensor.tolist)
        )
        self._metrics.reset()
        return {name: float(v) for name, v in found.items() if not isinstance(v, list)}

"""Evaluates the model: each sample on exactly one rank, and means over the samples of all ranks."""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ..errors import ConfigError
from .config import Config
from .data import EvaluationLoader, MicroBatch, loss_weight_of, move
from .random_states import generators_restored
from .ranks import Interrupted, Rank, all_reduce, from_main, gather_objects, pack, unpack
from .strategies import BATCH_NORMS, Strategy, buffers_restored
from .task import Task

logger = logging.getLogger(__name__)


def total_of(loss: Any) -> Tensor:
    """Return the loss to train. compute_loss may return a dict of terms: then it is their sum."""
    total: Tensor = torch.stack([*loss.values()]).sum() if isinstance(loss, dict) else loss
    return total


@torch.no_grad()
def figures_of(task: Task, loss: Any, outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Return the loss, its terms and the means of training_metrics() by name, 0-dim and detached."""
    means = task.training_metrics(outputs, batch) if task.training_metrics else {}
    total, terms = total_of(loss), loss if isinstance(loss, dict) else {}
    figures = {"loss": total, **terms, **means}
    return {name: value.detach().to(total.device) for name, value in figures.items()}


class Evaluator:
    def __init__(self, dataset: Any, name: str, config: Config, rank: Rank, task: Task) -> None:
        max_batches, size = config.evaluation.max_batches, config.training.global_batch_size
        limit = max_batches and max_batches * size
        self._loader = EvaluationLoader(dataset, task, config.loader, rank, name, limit)
        self._config, self._task, self._rank = config, task, rank
        self.num_samples = self._loader.num_samples
        sizes = config.evaluation.micro_batch_size, config.training.micro_batch_size
        share = -(-size // rank.world_size)
        self._size = next((int(size) for size in sizes if size != "auto"), share)

    @cached_property
    def _metrics(self) -> Any:
        from torchmetrics import Metric, MetricCollection  # here, since it takes seconds

        metrics = self._task.build_metrics(self._config.model).to(self._rank.device)
        modules: list[Any] = [*metrics.modules()]
        for module in (module for module in modules if isinstance(module, MetricCollection)):
            if module._enable_compute_groups is True:  # a rank's first batch would form the groups
                module._enable_compute_groups = False
        self._parts = [module for module in modules if isinstance(module, Metric)]
        for metric in self._parts:
            metric.distributed_available_fn = lambda: False  # _compute_metrics() gathers the states
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
        return metrics

    @torch.no_grad()
    def run(
        self, strategy: Strategy, stop_code: Callable[[], Any] = int, log: Any = None
    ) -> dict[str, float]:
        """Return the mean loss and the metrics by name, the same on every rank, which all call this.

        Raise Interrupted if stop_code() is not 0 before a micro-batch.
        """
        with self._evaluating(strategy):
            figures = self._add_up(strategy, self._loader.read(self._size), stop_code)
            if log is not None and self._task.on_evaluation_end is not None:
                try:
                    with strategy.autocast():
                        self._task.on_evaluation_end(strategy.module, log)
                except Exception:  # it only looks on
                    message = "warning: on_evaluation_end() of model.py failed; the run goes on"
                    logger.warning(message, exc_info=True)
            figures |= self._compute_metrics()
        return figures

    @torch.no_grad()
    def rehearse(self, strategy: Strategy) -> None:
        """Evaluate one micro-batch. Raise ConfigError if evaluation.metric or its mode is wrong."""
        with self._evaluating(strategy):
            parts = self._loader.read_first(self._size, num_parts=2)
            halves = self._add_up(strategy, parts, has_metrics=False)["loss"]
        with self._evaluating(strategy):
            whole = self._add_up(strategy, self._loader.read_first(self._size, num_parts=1))
            figures = whole | self._compute_metrics()
        self._check_mean(strategy, whole["loss"], halves)
        self._check_metric(figures)
        del self._metrics  # the run's own are built anew

    @contextmanager
    def _evaluating(self, strategy: Strategy) -> Iterator[None]:
        """Inside, the model is in evaluation mode. Training depends on nothing that happens here."""
        modes = [(module, module.training) for module in strategy.module.modules()]
        strategy.module.eval()
        # BatchNorm reads its statistics here alone, so it keeps those of rank 0.
        with generators_restored(self._rank.device), buffers_restored(strategy.module, but=BATCH_NORMS):
            strategy.synchronize_buffers()
            yield
        for module, is_training in modes:  # from the outermost inwards
            if module.training != is_training:  # what build_model() left in eval mode stays there
                module.train(is_training)

    def _add_up(
        self,
        strategy: Strategy,
        micro_batches: Iterable[MicroBatch],
        stop_code: Callable[[], Any] = int,
        *,
        has_metrics: bool = True,
    ) -> dict[str, float]:
        """Update the metrics. Return the loss and the other means, over all ranks."""
        task, metrics, sums = self._task, self._metrics, dict[str, Tensor]()
        for micro_batch in micro_batches:
            batch, request = micro_batch
            if stop_code():
                raise Interrupted
            with strategy.autocast():
                loss, outputs = task.compute_loss(strategy.module, batch)
                figures = figures_of(task, loss, outputs, batch)
                if has_metrics and task.evaluate_batch is not None:
                    outputs = task.evaluate_batch(strategy.module, batch)
            if has_metrics and len(metrics) and request.num_samples:
                task.update_metrics(metrics, outputs, batch)
            weight = loss_weight_of(micro_batch, task, strategy.module, self._rank)
            for name, value in {"": torch.ones(()), **figures}.items():  # "": the weights
                # If nothing counts, the mean may be 0/0.
                part = torch.where(weight == 0, 0.0, value.to(weight) * weight)
                sums[name] = sums.get(name, 0.0) + part
        totals = dict(zip(sums, all_reduce(torch.stack([*sums.values()])).tolist(), strict=True))
        weight = totals.pop("")
        return {name: total / weight if weight else math.nan for name, total in totals.items()}

    def _check_mean(self, strategy: Strategy, whole: float, halves: float) -> None:
        """Warn if the loss of a batch is not the mean of its halves' losses."""
        is_cpu = self._rank.device.type == "cpu"
        tolerance = 0.03 if strategy.precision != "fp32" else 2e-5 if is_cpu else 1e-3
        if abs(whole - halves) > tolerance * abs(whole):
            message = "warning: the loss is no mean over samples: %.7g for a batch, %.7g for its halves."
            remedy = "For tokens or class weights define loss_weight(): README."
            logger.warning(f"{message} {remedy}", whole, halves)

    def _check_metric(self, figures: dict[str, float]) -> None:
        metric, mode = self._config.evaluation.metric, self._config.evaluation.mode
        if metric not in figures:
            problem = f"not among the numbers of an evaluation ({', '.join(figures)})"
            raise ConfigError(f"evaluation.metric={metric}: {problem}. Name one of them.")
        is_higher_better = getattr(dict(self._metrics.items()).get(metric), "higher_is_better", None)
        better = {None: mode, True: "max", False: "min"}[metric != "loss" and is_higher_better]
        if mode != better:
            problem = f"would keep the worst checkpoint of evaluation.metric={metric}"
            raise ConfigError(f"evaluation.mode={mode}: {problem}. Set evaluation.mode={better}.")

    def _compute_metrics(self) -> dict[str, float]:
        """Compute the metrics over all ranks and reset them. Return those that are numbers."""
        # If torchmetrics gathered them, lists of different lengths would make ranks hang.
        states = gather_objects(pack([metric.metric_state for metric in self._parts]))
        if states is not None and len(states) > 1:
            of_ranks = zip(*map(unpack, states), strict=True)
            for metric, parts in zip(self._parts, of_ranks, strict=True):
                for name, reduce in metric._reductions.items():
                    values: Any = [move(part[name], metric.device) for part in parts]
                    if isinstance(values[0], list):  # as one rank with all samples holds it
                        value: Any = [*chain(*values)]
                    else:
                        value = reduce(torch.stack(values)) if callable(reduce) else torch.stack(values)
                    setattr(metric, name, value)
        values = from_main(lambda: apply_to_collection(self._metrics.compute(), Tensor, Tensor.tolist))
        self._metrics.reset()
        numbers = {name: value for name, value in values.items() if not isinstance(value, list)}
        return {name: float(value) for name, value in numbers.items()}

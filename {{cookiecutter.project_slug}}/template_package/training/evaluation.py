"""Evaluates the model. Each sample is counted on exactly one rank. Means are taken over all ranks' samples."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import Dataset

from ..config import Config, LoaderConfig
from ..core.task import Task, inner
from ..data.loader import (
    BatchReader,
    MicroBatch,
    Request,
    derive_seed,
    generators_restored,
    loss_weight_of,
    move,
    numbers_of,
    seed_cpu,
    seed_generators,
)
from ..errors import ConfigError
from ..files import write_json
from ..launching.distributed import RankContext, all_reduce, from_main, gather_objects, pack, unpack
from ..strategies.base import Strategy
from ..strategies.common import buffers_restored
from .hooks import call_on_evaluation_end, figures_of
from .stopping import Interrupted, beat

CONFUSION_MATRIX = "confusion_matrix"  # the metric of build_metrics() that is written to reports/
logger = logging.getLogger(__name__)


class Evaluator:
    def __init__(self, dataset: Dataset[Any], name: str, config: Config, context: RankContext, task: Task) -> None:
        max_batches, size = config.evaluation.max_batches, config.training.global_batch_size
        limit = max_batches and max_batches * size
        self._loader, self._task = EvaluationLoader(dataset, task, config.loader, context, name, limit), task
        self._config, self._model_config, self._context, self._split = config.evaluation, config.model, context, name
        names = [getattr(one, "label_names", None) for one in (dataset, *inner(dataset))]
        self._label_names: list[str] = next(filter(None, names), [])
        self._values: dict[str, Any] = {}
        self.num_samples = self._loader.num_samples
        sizes = config.evaluation.micro_batch_size, config.training.micro_batch_size, -(-size // context.world_size)
        self.micro_batch_size = next(int(size) for size in sizes if size != "auto")  # the last one is a rank's share

    @cached_property
    def _metrics(self) -> Any:
        from torchmetrics import Metric, MetricCollection  # here, since it takes seconds where scipy is installed

        metrics = self._task.build_metrics(self._model_config).to(self._context.device)
        modules: list[Any] = [*metrics.modules()]
        for module in (module for module in modules if isinstance(module, MetricCollection)):
            if module._enable_compute_groups is True:  # the groups that it forms depend on a rank's first batch
                module._enable_compute_groups = False
        self._parts = [module for module in modules if isinstance(module, Metric)]
        for metric in self._parts:
            metric.distributed_available_fn = lambda: False  # _compute_over_ranks() gathers the states
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")  # other ranks may have
        return metrics

    @torch.no_grad()
    def run(
        self, strategy: Strategy, may_go_on: Callable[[], bool] = lambda: True, log: Any = None, num_parts: int = 0
    ) -> dict[str, float]:
        """Return the mean loss and the metrics by name, the same on every rank. All ranks must call this method.

        Raise Interrupted if may_go_on() returns False before a micro-batch. `log` is passed to on_evaluation_end().
        If num_parts is 1 or 2, run a quick test on the first micro-batch only. With 2, split it into two halves and
        skip the metrics. The loss can then be compared with the loss from num_parts=1.
        """
        modes = [(module, module.training) for module in strategy.evaluation_model.modules()]
        strategy.evaluation_model.eval()
        # Training depends on no evaluation. BatchNorm, which reads its statistics here alone, keeps rank 0's.
        others = [module for module in strategy.module.modules() if not isinstance(module, _NormBase)]
        with generators_restored(*self._context.devices):
            with buffers_restored(others):
                strategy.synchronize_buffers()
                sums = self._add_up(strategy, may_go_on, num_parts)
            if log is not None:
                call_on_evaluation_end(self._task, strategy, log)
            self._values = self._compute_over_ranks() if num_parts != 2 else {}
        for module, is_training in modes:  # from the outermost inwards: what the user keeps in eval mode stays there
            if module.training != is_training:
                module.train(is_training)
        total_weight, *totals = all_reduce(torch.stack([*sums.values()])).tolist()
        means = [total / total_weight if total_weight else math.nan for total in totals]
        numbers = {name: float(value) for name, value in self._values.items() if not isinstance(value, list)}
        figures = dict(zip([*sums][1:], means, strict=True)) | numbers
        if log is not None and not math.isfinite(value := figures[self._config.metric]):
            logger.warning("warning: evaluation.metric=%s is %g, so no best.pt is kept", self._config.metric, value)
        return figures

    def _add_up(self, strategy: Strategy, may_go_on: Callable[[], bool], num_parts: int) -> dict[str, Tensor]:
        """Update the metrics. Return this rank's sums of figure x weight by name, and under "" the sum of weights."""
        task, metrics = self._task, self._metrics
        has_metrics = bool(len(metrics)) and num_parts != 2
        sums: dict[str, Tensor] = {}
        for micro_batch in self._loader.read(self.micro_batch_size, num_parts):
            batch, request = micro_batch
            beat()
            if not may_go_on():
                raise Interrupted
            with strategy.autocast():
                loss, outputs = task.compute_loss(strategy.evaluation_model, batch)
            figures = {"": torch.ones_like(loss), **figures_of(task, loss, outputs, batch)}  # "": adds up the weights
            if has_metrics and task.evaluate_batch is not None:
                with strategy.gathered(), strategy.autocast():  # on all ranks
                    outputs = task.evaluate_batch(strategy.evaluation_model, batch)
            if has_metrics and request.num_samples:
                task.update_metrics(metrics, outputs, batch)
            weight = loss_weight_of(micro_batch, task, strategy.module, self._context)
            for name, value in figures.items():
                # If nothing counts, the mean may be 0/0. There is no gradient here, so 0 can take its place.
                sums[name] = sums.get(name, 0.0) + torch.where(weight == 0, 0.0, value.to(weight) * weight)
        return sums

    def rehearse(self, strategy: Strategy) -> None:
        """Evaluate one micro-batch as a test. Raise ConfigError if evaluation.metric or evaluation.mode is wrong."""
        metric, mode = self._config.metric, self._config.mode
        halves, whole = self.run(strategy, num_parts=2)["loss"], self.run(strategy, num_parts=1)
        # The precision of 16 bits, fp32 and TF32. A fresh model's samples have nearly equal losses, which hides much.
        tolerance = 0.03 if strategy.precision != "fp32" else 2e-5 if self._context.device.type == "cpu" else 1e-3
        if abs(whole["loss"] - halves) > tolerance * abs(whole["loss"]):
            message = "warning: the loss is no mean over samples: %.7g for a batch, %.7g for its halves. %s"
            remedy = "For tokens or class weights define loss_weight(); all terms must be means over the same: README."
            logger.warning(message, whole["loss"], halves, remedy)
        if others := ", ".join(sorted(self._values.keys() - {*whole, CONFUSION_MATRIX})):
            logger.warning("warning: no single number, so not recorded (try ClasswiseWrapper): %s", others)
        if metric not in whole:
            problem = f"not among the numbers that an evaluation gives ({', '.join(whole)})"
            raise ConfigError(f"evaluation.metric={metric}: {problem}. Name one, or let build_metrics() return it.")
        is_higher_better = getattr(dict(self._metrics.items()).get(metric), "higher_is_better", None)
        better = {None: mode, True: "max", False: "min"}[metric != "loss" and is_higher_better]
        if mode != better:
            problem = f"would keep the worst checkpoint of evaluation.metric={metric}"
            raise ConfigError(f"evaluation.mode={mode}: {problem}. Set evaluation.mode={better}.")
        del self._metrics  # the run's own are built anew

    def write_report(self, directory: Path, checkpoint: str, step: int) -> Path | None:
        """Write the confusion matrix to a file on rank 0, and return the path. Return None if nothing was written."""
        if CONFUSION_MATRIX not in self._values or not self._context.is_main:
            return None
        path = directory / "reports" / f"{self._split}_{checkpoint}.json"
        path.parent.mkdir(exist_ok=True)
        content = {"title": f"{self._split}, checkpoint {checkpoint} (step {step})", "label_names": self._label_names}
        write_json(path, content | {CONFUSION_MATRIX: self._values[CONFUSION_MATRIX]})  # [true class][predicted class]
        return path

    def _compute_over_ranks(self) -> dict[str, Any]:
        """Compute the metrics over all ranks and reset them. Return {name: number or nested list} on every rank."""
        # If torchmetrics gathered them, lists of different lengths (as of ROUGEScore) would make ranks hang.
        states = gather_objects(pack([metric.metric_state for metric in self._parts]))
        if states is not None and len(states) > 1:  # on rank 0
            for metric, parts in zip(self._parts, zip(*map(unpack, states), strict=True), strict=True):
                for name, reduce in metric._reductions.items():
                    of_ranks: Any = [move(part[name], metric.device) for part in parts]
                    if isinstance(of_ranks[0], list):  # as one rank with all samples holds it
                        value: Any = [*chain(*of_ranks)]
                    else:
                        value = reduce(torch.stack(of_ranks)) if callable(reduce) else torch.stack(of_ranks)
                    setattr(metric, name, value)
        values: dict[str, Any] = from_main(lambda: apply_to_collection(self._metrics.compute(), Tensor, Tensor.tolist))
        self._metrics.reset()
        return values


class EvaluationLoader:
    """Gives each evaluated sample to exactly one rank. All ranks read the same number of micro-batches."""

    def __init__(
        self, dataset: Dataset[Any], task: Task, config: LoaderConfig, context: RankContext, name: str,
        limit: int | None = None,
    ) -> None:  # fmt: skip
        self._reader = BatchReader(dataset, task, config, context, 0, name)
        num_all = self._reader.num_samples
        self.num_samples = min(num_all, limit or num_all)
        # With a limit, take samples at even distances: the first ones may be of one class.
        order = torch.arange(self.num_samples) * num_all // self.num_samples
        self._share = order.tensor_split(context.world_size)[context.rank]
        if (lengths := numbers_of(dataset, "sample_lengths")) is not None:  # like lengths together, long first
            self._share = order[(-lengths[order]).argsort(stable=True)][context.rank :: context.world_size]
        self._largest_share = -(-self.num_samples // context.world_size)

    def read(self, micro_batch_size: int, num_parts: int = 0) -> Iterator[MicroBatch]:
        """Read this rank's micro-batches. If num_parts > 0, read only the first one, split into num_parts parts."""
        requests, pieces = [], self._share.tensor_split(-(-self._largest_share // micro_batch_size))
        for piece in pieces[0].tensor_split(num_parts) if num_parts else pieces:
            indices = piece.tolist() or [0]
            requests.append(Request(0, indices, indices, len(piece)))
        seed = seed_cpu if self._reader.device.type == "mps" else seed_generators  # MPS's is not restored
        for number, micro_batch in enumerate(self._reader.read(requests)):
            if number == 0 or not num_parts:  # two halves draw what their whole does
                seed(derive_seed(0, 0, micro_batch.request.indices[0]))  # so nothing depends on what came before
            yield micro_batch

"""Evaluates the model. Each sample is counted on exactly one rank. Means are taken over all ranks' samples."""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import Dataset

from ..config import Config
from ..core.data import MicroBatch, loss_weight_of, move
from ..core.random_states import generators_restored
from ..core.ranks import all_reduce, from_main, gather_objects, pack, unpack
from ..core.strategies import buffers_restored
from ..core.task import Task, inner
from ..data import create_evaluation_loader
from ..errors import ConfigError
from ..files import write_json
from ..launching.distributed import RankContext
from ..strategies.base import Strategy
from .hooks import call_on_evaluation_end, figures_of
from .stopping import Interrupted, beat

CONFUSION_MATRIX = "confusion_matrix"  # the metric of build_metrics() that is written to reports/
logger = logging.getLogger(__name__)


class Evaluator:
    def __init__(
        self, dataset: Dataset[Any], name: str, config: Config, context: RankContext, task: Task
    ) -> None:
        max_batches, size = config.evaluation.max_batches, config.training.global_batch_size
        limit = max_batches and max_batches * size
        self._loader = create_evaluation_loader(dataset, task, config.loader, context, name, limit)
        self._task = task
        self._config, self._model_config, self._context, self._split = (
            config.evaluation,
            config.model,
            context,
            name,
        )
        names = [getattr(one, "label_names", None) for one in (dataset, *inner(dataset))]
        self._label_names: list[str] = next(filter(None, names), [])
        self._values: dict[str, Any] = {}
        self.num_samples = self._loader.num_samples
        sizes = (
            config.evaluation.micro_batch_size,
            config.training.micro_batch_size,
            -(-size // context.world_size),
        )
        # the last one is a rank's share
        self.micro_batch_size = next(int(size) for size in sizes if size != "auto")

    @cached_property
    def _metrics(self) -> Any:
        # here, since it takes seconds where scipy is installed
        from torchmetrics import (
            Metric,
            MetricCollection,
        )

        metrics = self._task.build_metrics(self._model_config).to(self._context.device)
        modules: list[Any] = [*metrics.modules()]
        for module in (module for module in modules if isinstance(module, MetricCollection)):
            # the groups that it forms depend on a rank's first batch
            if module._enable_compute_groups is True:
                module._enable_compute_groups = False
        self._parts = [module for module in modules if isinstance(module, Metric)]
        for metric in self._parts:
            metric.distributed_available_fn = lambda: False  # _compute_metrics() gathers the states
        # other ranks may have
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
        return metrics

    @torch.no_grad()
    def run(
        self, strategy: Strategy, may_go_on: Callable[[], bool] = lambda: True, log: Any = None
    ) -> dict[str, float]:
        """Return the mean loss and the metrics by name, the same on every rank. All ranks must call this method.

        Raise Interrupted if may_go_on() returns False before a micro-batch. `log` is passed to on_evaluation_end().
        """
        with self._evaluating(strategy):
            figures = self._add_up(strategy, self._loader.read(self.micro_batch_size), may_go_on)
            if log is not None:
                call_on_evaluation_end(self._task, strategy, log)
            figures |= self._compute_metrics()
        if log is not None and not math.isfinite(value := figures[self._config.metric]):
            logger.warning(
                "warning: evaluation.metric=%s is %g, so no best.pt is kept",
                self._config.metric,
                value,
            )
        return figures

    @torch.no_grad()
    def rehearse(self, strategy: Strategy) -> None:
        """Evaluate one micro-batch as a test. Raise ConfigError if evaluation.metric or evaluation.mode is wrong."""
        self._check_metric(self.check_means(strategy))
        del self._metrics  # the run's own are built anew

    @torch.no_grad()
    def check_means(self, strategy: Strategy) -> dict[str, float]:
        """Warn of a loss or figure of a micro-batch that is no mean of its halves'. Return the numbers.

        A fresh model's samples have nearly equal losses, which hides much: ask again after a while.
        """
        size = self.micro_batch_size
        with self._evaluating(strategy):
            halves = self._add_up(strategy, self._loader.read(size, num_parts=2), has_metrics=False)
        with self._evaluating(strategy):
            whole = self._add_up(strategy, self._loader.read(size, num_parts=1))
            whole |= self._compute_metrics()
        # The precision of 16 bits, TF32 and fp32.
        is_cpu = self._context.device.type == "cpu"
        tolerance = 0.03 if strategy.dtype is not None else 2e-5 if is_cpu else 1e-3
        for name, value in halves.items():
            if name not in self._metrics and abs(whole[name] - value) > tolerance * abs(
                whole[name]
            ):
                message = "warning: the %s is no mean over samples: %.7g for a batch, %.7g for its halves. %s"
                remedy = "For tokens or class weights define loss_weight(); figures are means over the same: README."
                logger.warning(message, name, whole[name], value, remedy)
        return whole

    @contextmanager
    def _evaluating(self, strategy: Strategy) -> Iterator[None]:
        """Inside this context, the model is in evaluation mode. What its forward passes change is undone."""
        modes = [(module, module.training) for module in strategy.evaluation_model.modules()]
        strategy.evaluation_model.eval()
        with generators_restored(*self._context.devices):
            yield
        # from the outermost inwards: what the user keeps in eval mode stays there
        for (
            module,
            is_training,
        ) in modes:
            if module.training != is_training:
                module.train(is_training)

    def _add_up(
        self, strategy: Strategy, micro_batches: Iterable[MicroBatch], may_go_on: Callable[[], bool] = lambda: True,
        *, has_metrics: bool = True,
    ) -> dict[str, float]:  # fmt: skip
        """Update the metrics. Return the loss and the figures of training_metrics(), averaged over all ranks."""
        task, metrics = self._task, self._metrics
        has_metrics = has_metrics and bool(len(metrics))
        sums: dict[str, Tensor] = {}
        with buffers_restored(strategy.module):
            strategy.synchronize_buffers()
            for micro_batch in micro_batches:
                batch, request = micro_batch
                beat()
                if not may_go_on():
                    raise Interrupted
                with strategy.autocast():
                    loss, outputs = task.compute_loss(strategy.evaluation_model, batch)
                # "": adds up the weights
                figures = {
                    "": torch.ones(()),
                    **figures_of(task, loss, outputs, batch),
                }
                if has_metrics and task.evaluate_batch is not None:
                    with strategy.gathered(), strategy.autocast():  # on all ranks
                        outputs = task.evaluate_batch(strategy.evaluation_model, batch)
                if has_metrics and request.num_samples:
                    task.update_metrics(metrics, outputs, batch)
                weight = loss_weight_of(micro_batch, task, strategy.module, self._context)
                for name, value in figures.items():
                    # If nothing counts, the mean may be 0/0. There is no gradient here, so 0 can take its place.
                    sums[name] = sums.get(name, 0.0) + torch.where(
                        weight == 0, 0.0, value.to(weight) * weight
                    )
        totals = dict(zip(sums, all_reduce(torch.stack([*sums.values()])).tolist(), strict=True))
        total_weight = totals.pop("")
        return {
            name: total / total_weight if total_weight else math.nan
            for name, total in totals.items()
        }

    def _check_metric(self, figures: dict[str, float]) -> None:
        metric, mode = self._config.metric, self._config.mode
        if others := ", ".join(sorted(self._values.keys() - {*figures, CONFUSION_MATRIX})):
            logger.warning(
                "warning: no single number, so not recorded (try ClasswiseWrapper): %s", others
            )
        if metric not in figures:
            problem = f"not among the numbers that an evaluation gives ({', '.join(figures)})"
            raise ConfigError(
                f"evaluation.metric={metric}: {problem}. Name one, or let build_metrics() return it."
            )
        is_higher_better = getattr(
            dict(self._metrics.items()).get(metric), "higher_is_better", None
        )
        better = {None: mode, True: "max", False: "min"}[metric != "loss" and is_higher_better]
        if mode != better:
            problem = f"would keep the worst checkpoint of evaluation.metric={metric}"
            raise ConfigError(f"evaluation.mode={mode}: {problem}. Set evaluation.mode={better}.")

    def write_report(self, directory: Path, checkpoint: str, step: int) -> Path | None:
        """Write the confusion matrix to a file on rank 0, and return the path. Return None if nothing was written."""
        if CONFUSION_MATRIX not in self._values or not self._context.is_main:
            return None
        path = directory / "reports" / f"{self._split}_{checkpoint}.json"
        path.parent.mkdir(exist_ok=True)
        content = {
            "title": f"{self._split}, checkpoint {checkpoint} (step {step})",
            "label_names": self._label_names,
        }
        # [true class][predicted class]
        write_json(path, content | {CONFUSION_MATRIX: self._values[CONFUSION_MATRIX]})
        return path

    def _compute_metrics(self) -> dict[str, float]:
        """Compute the metrics over all ranks and reset them. Return those that are numbers, the same on every rank."""
        # If torchmetrics gathered them, lists of different lengths (as of ROUGEScore) would make ranks hang.
        states = gather_objects(pack([metric.metric_state for metric in self._parts]))
        if states is not None and len(states) > 1:  # on rank 0
            for metric, parts in zip(
                self._parts, zip(*map(unpack, states), strict=True), strict=True
            ):
                for name, reduce in metric._reductions.items():
                    of_ranks: Any = [move(part[name], metric.device) for part in parts]
                    if isinstance(of_ranks[0], list):  # as one rank with all samples holds it
                        value: Any = [*chain(*of_ranks)]
                    else:
                        value = (
                            reduce(torch.stack(of_ranks))
                            if callable(reduce)
                            else torch.stack(of_ranks)
                        )
                    setattr(metric, name, value)
        self._values = from_main(
            lambda: apply_to_collection(self._metrics.compute(), Tensor, Tensor.tolist)
        )
        self._metrics.reset()
        return {
            name: float(value)
            for name, value in self._values.items()
            if not isinstance(value, list)
        }

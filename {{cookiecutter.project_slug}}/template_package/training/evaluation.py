"""Loss and metrics of a data set: every sample once over all ranks, sums and counts reduced, never means of means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .. import dataset as user_data
from .. import model as user_model
from ..config import Config
from ..launching.distributed import RankContext, all_reduce, from_main, gather_objects
from ..strategies.base import Strategy
from ..validation import ConfigError, FailureError
from .evaluation_loader import EvaluationLoader
from .fetching import MicroBatch
from .finite import name_bad
from .logs import get_logger
from .memory import is_out_of_memory
from .metrics import compute_over_ranks, higher_is_better, keep_apart, names_of_scalars
from .report import METRIC, build_report, report_stem, write_report
from .stopping import Interrupted
from .watchdog import beat
from .weighing import weight_of
from .workers import samples_named


class Evaluator:
    """Evaluates a strategy's model on one data set, as often as it is asked to."""

    def __init__(self, dataset: Dataset[Any], name: str, config: Config, context: RankContext) -> None:
        self._loader = EvaluationLoader(
            dataset,
            config.loader,
            context,
            micro_batch_size=config.evaluation.micro_batch_size,
            name=name,
            collate=getattr(user_data, "collate", None),
        )
        self._metrics = keep_apart(user_model.build_metrics(config.model).to(context.device))
        self._context, self._split, self.num_samples = context, name, self._loader.num_samples
        self._label_names: list[str] | None = getattr(dataset, "label_names", None)
        self._matrix: list[list[int]] | None = None
        """The last run's confusion matrix, if there is a metric of that name."""

    def check_metric(self, metric: str, mode: str) -> None:
        """ConfigError if `evaluation.metric` is not among what evaluation will give, or is better the other way."""
        names = ["loss", *names_of_scalars(self._metrics)]
        if metric not in names:
            raise ConfigError(
                f"evaluation.metric={metric}: not among this model's metrics ({', '.join(names)}). "
                "Name one of these, or add it to build_metrics() in model.py."
            )
        is_higher_better = higher_is_better(self._metrics, metric)  # of the loss config_rules.py knows it
        if is_higher_better is not None and is_higher_better != (mode == "max"):
            right = "max" if is_higher_better else "min"
            raise ConfigError(
                f"evaluation.mode={mode}: would keep the worst checkpoint: the more evaluation.metric={metric} is, the "
                f"{'better' if is_higher_better else 'worse'}. Set evaluation.mode={right}."
            )

    @torch.no_grad()
    def run(self, strategy: Strategy, may_go_on: Callable[[], bool] = lambda: True) -> dict[str, float]:
        """{"loss": mean over all samples, <metric>: value}, the same on every rank; all ranks call it.

        may_go_on: asked before each batch; Interrupted if it says no, on all ranks alike.
        """
        strategy.synchronize_buffers()
        strategy.module.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self._context.device)  # loss x weight, weight
        is_asked = True
        for micro_batch in self._loader:
            beat()
            if is_asked and not may_go_on():
                raise Interrupted
            is_asked = micro_batch.request.is_last  # as often on every rank, however small its parts
            for part in self._parts(strategy, micro_batch):
                totals += part
        strategy.module.train()
        loss_sum, weight = all_reduce(totals).tolist()
        values = compute_over_ranks(self._metrics)
        self._matrix = values.get(METRIC)
        return {
            "loss": loss_sum / weight if weight else math.nan,
            **{k: float(v) for k, v in values.items() if not isinstance(v, list)},
        }

    def check_finite(self, values: dict[str, float], metric: str, step: int, save: Callable[[], None]) -> None:
        """FailureError, after a last `save`, if loss and metric of what run() gave are no numbers; all ranks call it.
        If it is one of them, a warning: the model can still be told from one that has come to nothing.
        """
        bad_names = [name for name in dict.fromkeys(("loss", metric)) if not math.isfinite(values[name])]
        if not bad_names:
            return
        words = f"the {self._split} {bad_names[0]} after step {step} is not finite"
        if bad_names == [metric] != ["loss"]:
            get_logger().warning("warning: %s: this evaluation cannot be the best.", words)
            return
        if metric not in bad_names:
            get_logger().warning("warning: %s; evaluation.metric=%s is, so the run goes on.", words, metric)
            return
        get_logger().warning("%s: looking for samples with a NaN or infinity", words)
        save()  # while the evaluation is pending: the next start begins with it
        found = gather_objects(self._loader.find_non_finite())
        bad: list[int] = from_main(lambda: sorted({index for of_rank in found or [] for index in of_rank}))
        named = name_bad(bad) or "none was found to hold a NaN or infinity: look at the model and compute_loss"
        raise FailureError(
            f"{words}. Of the {self.num_samples} samples {named}. Mend that, and the same command continues."
        )

    def write_report(self, directory: Path, checkpoint: str, step: int) -> None:
        """Write what the last run's confusion matrix tells of this checkpoint, if there is one; rank 0 writes."""
        if self._matrix is not None and self._context.is_main:
            title = f"{self._split}, checkpoint {checkpoint} (step {step})"
            report = build_report(title, self._matrix, self._label_names or [])
            write_report(report_stem(directory, self._split, checkpoint), report)

    def _parts(self, strategy: Strategy, micro_batch: MicroBatch) -> Iterator[Tensor]:
        """(2,) float64, loss x weight and weight, of a micro-batch; of its parts, once memory has run out here."""
        size = len(micro_batch.request.indices)
        results = self._forward(strategy, micro_batch) if size <= self._loader.limit else None
        if results is None:
            for part in self._loader.parts(micro_batch.request):
                yield from self._parts(strategy, part)
        elif micro_batch.request.num_samples:
            loss, outputs = results
            weight = weight_of(micro_batch, self._context)
            if len(self._metrics):
                with samples_named(micro_batch.request.indices):
                    user_model.update_metrics(self._metrics, outputs, micro_batch.batch)
            # A mean over nothing may be 0/0; here no gradient comes of it.
            yield torch.stack([torch.where(weight == 0, 0.0, loss.double() * weight), weight])

    def _forward(self, strategy: Strategy, micro_batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """Loss and outputs; None if memory has run out and half the samples may fit."""
        size = len(micro_batch.request.indices)
        try:
            with strategy.autocast(), samples_named(micro_batch.request.indices):
                return user_model.compute_loss(strategy.evaluation_model, micro_batch.batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if size == 1 or strategy.has_collective_forward:
                error.add_note(f"in evaluation, with {size} of evaluation.micro_batch_size samples")
                raise
        self._loader.limit = -(-size // 2)
        words = "rank %d: out of memory in evaluation with %d samples, trying %d"
        get_logger().warning(words, self._context.rank, size, self._loader.limit)
        return None

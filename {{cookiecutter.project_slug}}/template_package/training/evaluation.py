"""Loss and metrics of a data set: every sample once over all ranks, sums and counts reduced, never means of means."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import Dataset

from .. import dataset as user_data
from .. import model as user_model
from ..config import Config
from ..launching.distributed import RankContext, all_reduce
from ..strategies.base import Strategy
from ..validation import ConfigError
from .loader import EvaluationLoader
from .weighing import weight_of

AUTO_MICRO_BATCH_SIZE = 256


class Evaluator:
    """Evaluates a strategy's model on one data set, as often as it is asked to."""

    def __init__(self, dataset: Dataset[Any], name: str, config: Config, context: RankContext) -> None:
        size = config.evaluation.micro_batch_size
        self._loader = EvaluationLoader(
            dataset,
            config.loader,
            context,
            micro_batch_size=AUTO_MICRO_BATCH_SIZE if size == "auto" else int(size),
            name=name,
            collate=getattr(user_data, "collate", None),
        )
        self._metrics = user_model.build_metrics(config.model).to(context.device)
        self._loss_weight = getattr(user_model, "loss_weight", None)
        self._context, self.num_samples = context, self._loader.num_samples

    def check_metric(self, metric: str) -> None:
        """ConfigError if `evaluation.metric` is not among what evaluation will give."""
        names = ["loss", *self._metrics]
        if metric not in names:
            raise ConfigError(
                f"evaluation.metric={metric}: not among this model's metrics ({', '.join(map(str, names))}). "
                "Name one of these, or add it to build_metrics() in model.py."
            )

    @torch.no_grad()
    def run(self, strategy: Strategy) -> dict[str, float]:
        """{"loss": mean over all samples, <metric>: value}, the same on every rank; all ranks call it."""
        strategy.module.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self._context.device)  # loss x weight, weight
        for micro_batch in self._loader:
            with strategy.autocast():
                loss, outputs = user_model.compute_loss(strategy.evaluation_model, micro_batch.batch)
            if micro_batch.request.num_samples:
                weight = weight_of(micro_batch, self._loss_weight, self._context)
                totals += torch.stack([loss.double() * weight, weight])
                if len(self._metrics):
                    user_model.update_metrics(self._metrics, outputs, micro_batch.batch)
        strategy.module.train()
        loss_sum, weight = all_reduce(totals).tolist()
        return {"loss": loss_sum / weight, **self._compute_metrics()}

    def _compute_metrics(self) -> dict[str, float]:
        if not len(self._metrics):
            return {}
        with warnings.catch_warnings():  # a rank with no sample has not updated; its state counts as nothing, rightly
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
            values = {name: float(value) for name, value in self._metrics.compute().items()}
        self._metrics.reset()
        return values

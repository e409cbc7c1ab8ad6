"""Adds to core's evaluation what size=full has: samples of like lengths together, and a confusion matrix."""

import logging
from pathlib import Path
from typing import Any

from ..config import Config
from ..core import evaluation as core
from ..core.data import EvaluationLoader
from ..core.ranks import Rank
from ..core.strategies import Strategy
from ..core.task import Task, inner
from ..data import create_evaluation_loader
from ..files import write_json

CONFUSION_MATRIX = "confusion_matrix"  # the metric of build_metrics() that is written to reports/
logger = logging.getLogger(__name__)


class Evaluator(core.Evaluator):
    def __init__(self, dataset: Any, name: str, config: Config, rank: Rank, task: Task) -> None:
        super().__init__(dataset, name, config, rank, task)
        names = [getattr(one, "label_names", None) for one in (dataset, *inner(dataset))]
        self._split = name
        self._label_names: list[str] = next(filter(None, names), [])

    def create_loader(
        self, dataset: Any, name: str, batch_size: int, limit: int | None
    ) -> EvaluationLoader:
        loader, task, rank = self._config.loader, self._task, self._rank
        return create_evaluation_loader(dataset, task, loader, rank, name, batch_size, limit)

    def rehearse(self, strategy: Strategy) -> None:
        """Evaluate a micro-batch, and warn of metrics that are not recorded. Raise ConfigError for a wrong metric."""
        super().rehearse(strategy)
        lists = {name for name, value in self.values.items() if isinstance(value, list)}
        if others := ", ".join(sorted(lists - {CONFUSION_MATRIX})):
            message = "warning: no single number, so not recorded (try ClasswiseWrapper): %s"
            logger.warning(message, others)

    def write_report(self, directory: Path, checkpoint: str, step: int) -> Path | None:
        """Write the confusion matrix to a file on rank 0, and return the path. Return None if nothing was written."""
        if CONFUSION_MATRIX not in self.values or not self._rank.is_main:
            return None
        path = directory / "reports" / f"{self._split}_{checkpoint}.json"
        path.parent.mkdir(exist_ok=True)
        content = {
            "title": f"{self._split}, checkpoint {checkpoint} (step {step})",
            "label_names": self._label_names,
        }
        # [true class][predicted class]
        write_json(path, content | {CONFUSION_MATRIX: self.values[CONFUSION_MATRIX]})
        return path

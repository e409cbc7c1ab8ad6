"""Adds to core's evaluation what size=full has: samples of like lengths together, and a confusion matrix."""

import logging
from pathlib import Path
from typing import Any

import numpy

from ..config import Config
from ..core import evaluation as core
from ..core.ranks import Rank
from ..core.strategies import Strategy
from ..core.task import Task, inner
from ..data import create_evaluation_loader
from ..files import write_json

SCORES = ("precision", "recall", "f1")
CONFUSION_MATRIX = "confusion_matrix"  # the metric of build_metrics() that is written to reports/
logger = logging.getLogger(__name__)


class Evaluator(core.Evaluator):
    def __init__(self, dataset: Any, name: str, config: Config, rank: Rank, task: Task) -> None:
        super().__init__(dataset, name, config, rank, task)
        names = [getattr(one, "label_names", None) for one in (dataset, *inner(dataset))]
        self._split = name
        self._label_names: list[str] = next(filter(None, names), [])

    create_loader = staticmethod(create_evaluation_loader)

    def rehearse(self, strategy: Strategy) -> None:
        """Evaluate a micro-batch, and warn of metrics that are not recorded. Raise ConfigError for a wrong metric."""
        super().rehearse(strategy)
        lists = {name for name, value in self.values.items() if isinstance(value, list)}
        if others := ", ".join(sorted(lists - {CONFUSION_MATRIX})):
            message = "warning: no single number, so not recorded (try ClasswiseWrapper): %s"
            logger.warning(message, others)

    def write_report(self, directory: Path, checkpoint: str, step: int) -> str:
        """Write the confusion matrix to a file on rank 0, and return it as a table, with its scores."""
        if CONFUSION_MATRIX not in self.values or not self._rank.is_main:
            return ""
        path = directory / "reports" / f"{self._split}_{checkpoint}.json"
        path.parent.mkdir(exist_ok=True)
        content = {
            "title": f"{self._split}, checkpoint {checkpoint} (step {step})",
            "label_names": self._label_names,
            CONFUSION_MATRIX: self.values[CONFUSION_MATRIX],  # [true class][predicted class]
        }
        write_json(path, content)
        return class_table(content) + "\n"


def class_scores(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return precision, recall, f1 and support of each class, then macro and weighted averages. 0 / 0 counts as 0."""
    counts, labels = numpy.array(report["confusion_matrix"], dtype=float), report["label_names"]
    correct, support, predicted, total = (
        counts.diagonal(),
        counts.sum(1),
        counts.sum(0),
        counts.sum(),
    )
    pairs = ((correct, predicted), (correct, support), (2 * correct, support + predicted))
    scores = numpy.stack([part / whole.clip(min=1) for part, whole in pairs], 1)  # (classes, 3)
    scores = numpy.vstack([scores, scores.mean(0), support @ scores / max(1, total)])
    names = [
        *labels[: len(counts)],
        *range(len(labels), len(counts)),
        "macro average",
        "weighted average",
    ]
    return [
        {"label": str(name), **dict(zip(SCORES, row, strict=True)), "support": int(num_samples)}
        for name, row, num_samples in zip(
            names, scores.tolist(), [*support, total, total], strict=True
        )
    ]


def class_table(report: dict[str, Any]) -> str:
    """Format a confusion matrix for the console, with the scores of each class."""
    lines, rows = (
        [report["title"], f"{'':24}precision  recall      f1  support"],
        class_scores(report),
    )
    for row in rows:
        lines.append(
            f"{row['label'][:24]:24}"
            + "".join(f"{row[s]:8.4f}" for s in SCORES)
            + f"{row['support']:9}"
        )
    lines += ["", "rows: true class; columns: predicted class"]
    for row, counts in zip(rows, report["confusion_matrix"], strict=False):
        lines.append(f"{row['label'][:24]:24}" + " ".join(f"{count:5}" for count in counts))
    return "\n".join(lines)

"""Scores of each class as JSON, text and picture, if build_metrics() has a metric named `confusion_matrix`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..files import write_json

SCORES = ("precision", "recall", "f1")


def class_scores(matrix: list[list[int]], label_names: Sequence[str]) -> list[dict[str, Any]]:
    """{"label", "precision", "recall", "f1", "support"} of each class, and of their means below; 0 / 0 counts as 0.

    matrix[i][j]: samples of class i that were predicted as class j.
    """
    counts = torch.tensor(matrix, dtype=torch.float64)
    correct, support, predicted = counts.diag(), counts.sum(1), counts.sum(0)
    pairs = ((correct, predicted), (correct, support), (2 * correct, support + predicted))
    scores = torch.stack([part / whole.clamp(min=1) for part, whole in pairs], 1)  # (classes, 3)
    means = {"macro average": scores.mean(0), "weighted average": support @ scores / support.sum().clamp(min=1)}
    names = [*map(str, label_names[: len(matrix)]), *map(str, range(len(label_names), len(matrix)))]
    rows = zip([*names, *means], [*scores, *means.values()], [*support, support.sum(), support.sum()], strict=True)
    return [
        {"label": name, **dict(zip(SCORES, row.tolist(), strict=True)), "support": int(num_samples)}
        for name, row, num_samples in rows
    ]


def write_report(stem: Path, title: str, matrix: list[list[int]], label_names: Sequence[str]) -> None:
    """Write <stem>.json and .txt, and the matrix as <stem>.png if matplotlib is installed."""
    rows = class_scores(matrix, label_names)
    stem.parent.mkdir(exist_ok=True)
    write_json(Path(f"{stem}.json"), {"title": title, "classes": rows, "confusion_matrix": matrix})
    lines = [title, f"{'':24}precision  recall      f1  support"]
    for row in rows:
        lines.append(f"{row['label'][:24]:24}" + "".join(f"{row[s]:8.4f}" for s in SCORES) + f"{row['support']:9}")
    lines += ["", "rows: true class; columns: predicted class"]
    for row, counts in zip(rows, matrix, strict=False):
        lines.append(f"{row['label'][:24]:24}" + " ".join(f"{count:5}" for count in counts))
    Path(f"{stem}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        from torchmetrics.utilities.plot import plot_confusion_matrix

        labels = [row["label"] for row in rows[: len(matrix)]]
        figure, _ = plot_confusion_matrix(torch.tensor(matrix), labels=labels, add_text=len(matrix) <= 30)
        figure.savefig(Path(f"{stem}.png"), dpi=130, bbox_inches="tight")
    except Exception:  # no matplotlib, or its fonts and settings: no run ends for a picture
        Path(f"{stem}.png").unlink(missing_ok=True)

"""What a confusion matrix tells of a classifier: precision, recall, F1 and support of each class, as text and picture.

Every model gets it whose build_metrics() has a MulticlassConfusionMatrix under the name `confusion_matrix`; a data set
with `label_names` gives the classes their names.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checkpoint import write_whole

METRIC = "confusion_matrix"
SCORES = ("precision", "recall", "f1")
MAX_COLUMNS = 120
"""A text wider than this numbers the matrix's columns instead of naming them."""
MAX_NUMBERED = 50
"""With more classes a picture has colors alone."""


def build_report(title: str, matrix: list[list[int]], label_names: Sequence[str]) -> dict[str, Any]:
    """{"title", "accuracy", "num_samples", "classes", "averages", "confusion_matrix"}.

    matrix[i][j]: samples of class i that were taken for class j. A class or an average is {"label", "precision",
    "recall", "f1", "support"}; a quotient by 0 counts as 0, as in scikit-learn.
    """
    classes = []
    for place, name in enumerate(label_names):
        correct, support, predicted = matrix[place][place], sum(matrix[place]), sum(row[place] for row in matrix)
        scores = (correct / max(predicted, 1), correct / max(support, 1), 2 * correct / max(support + predicted, 1))
        entry: dict[str, Any] = {"label": name, **dict(zip(SCORES, scores, strict=True)), "support": support}
        classes.append(entry)
    num_samples = sum(map(sum, matrix))
    weights = {"macro average": [1 / len(classes)] * len(classes)}
    weights["weighted average"] = [entry["support"] / max(num_samples, 1) for entry in classes]
    averages = []
    for label, parts in weights.items():
        means = {score: sum(w * entry[score] for w, entry in zip(parts, classes, strict=True)) for score in SCORES}
        averages.append({"label": label, **means, "support": num_samples})
    accuracy = sum(matrix[place][place] for place in range(len(matrix))) / max(num_samples, 1)
    counts = {"accuracy": accuracy, "num_samples": num_samples}
    return {"title": title, **counts, "classes": classes, "averages": averages, "confusion_matrix": matrix}


def report_stem(directory: Path, split: str, checkpoint: str) -> Path:
    """runs/<name>/reports/<split>_<checkpoint>, to which .json, .txt and .png are added."""
    return directory / "reports" / f"{split}_{checkpoint}"


def write_report(stem: Path, report: dict[str, Any]) -> None:
    """Write <stem>.json, which show_report() reads."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    write_whole(Path(f"{stem}.json"), lambda beside: beside.write_text(text, encoding="utf-8"))


def show_report(stem: Path) -> str:
    """What <stem>.json holds, as text, which <stem>.txt gets too; the matrix becomes <stem>.png with matplotlib."""
    report = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    text = as_text(report)
    Path(f"{stem}.txt").write_text(text + "\n", encoding="utf-8")
    try:
        draw(report, Path(f"{stem}.png"))
    except ImportError:
        return f"{text}\n\nFor a picture: pip install -c constraints.txt -e '.[plot]'"
    return f"{text}\n\nAs a picture: {stem}.png"


def as_text(report: dict[str, Any]) -> str:
    """The scores of each class, and below them the matrix, in columns that stay straight with wide characters."""
    labels = [entry["label"] for entry in report["classes"]]
    rows = [["", *SCORES, "support"]]
    for place, entry in enumerate([*report["classes"], *report["averages"]]):
        number = f"{place} " if place < len(labels) else ""
        rows.append([f"{number}{entry['label']}", *(f"{entry[score]:.4f}" for score in SCORES), str(entry["support"])])
    heading = f"{report['title']}: accuracy {report['accuracy']:.4f} of {report['num_samples']} samples"
    counts = [[f"{place} {label}", *map(str, report["confusion_matrix"][place])] for place, label in enumerate(labels)]
    matrix = align([["", *labels], *counts])
    if display_width(matrix[0]) > MAX_COLUMNS:
        matrix = align([["", *map(str, range(len(labels)))], *counts])
    return "\n".join([heading, "", *align(rows), "", "rows: true class; columns: predicted class", *matrix])


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, below the first one as heading; columns of numbers to the right, others to the left."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(display_width, column)) for column in columns]
    are_numbers = [all(re.fullmatch(r"-?[\d.]+", cell) for cell in column[1:]) for column in columns]
    lines = []
    for row in rows:
        cells = []
        for cell, width, is_number in zip(row, widths, are_numbers, strict=True):
            gap = " " * (width - display_width(cell))
            cells.append(gap + cell if is_number else cell + gap)
        lines.append("  ".join(cells).rstrip())
    return lines


def display_width(text: str) -> int:
    """Columns that a terminal gives the text: two for a wide character, none for one that combines."""
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in ("W", "F")) for char in text
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the confusion matrix as PNG, colored by the part of each true class. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    labels, matrix = [entry["label"] for entry in report["classes"]], report["confusion_matrix"]
    font = _find_font("".join(labels))
    names = labels if font else [str(place) for place in range(len(labels))]
    hint = "" if font else " (numbers as in the text)"
    size = min(3.0 + 0.45 * len(labels), 25.0)
    figure = Figure(figsize=(size + 1.0, size), layout="constrained")
    axes = figure.subplots()
    parts = [[count / max(sum(row), 1) for count in row] for row in matrix]
    image = axes.imshow(parts, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="part of the true class", shrink=0.8)
    for i, row in enumerate(matrix if len(labels) <= MAX_NUMBERED else []):
        for j, count in enumerate(row):
            color = "white" if parts[i][j] > 0.5 else "black"
            axes.text(j, i, str(count), ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", font=font)
    axes.set_yticks(range(len(names)), names, font=font)
    axes.set(xlabel=f"predicted{hint}", ylabel=f"true{hint}")
    axes.set_title(f"{report['title']}\naccuracy {report['accuracy']:.4f} of {report['num_samples']}", fontsize=10)
    figure.savefig(path, dpi=130)


def _find_font(text: str) -> Path | None:
    """The file of an installed font that has every character of the text, matplotlib's own first."""
    from matplotlib import font_manager

    own = font_manager.findfont("DejaVu Sans")
    installed = sorted(font.fname for font in font_manager.fontManager.ttflist)
    for file in dict.fromkeys([own, *(name for name in installed if "LastResort" not in name)]):  # that one has boxes
        try:
            characters = font_manager.get_font(file).get_charmap()
        except (OSError, RuntimeError):
            continue  # not a font that it can read
        if all(ord(char) in characters for char in text):
            return Path(file)
    return None

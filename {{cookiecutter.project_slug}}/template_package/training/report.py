"""What a confusion matrix tells of a classifier: precision, recall, F1 and support of each class, as text and picture.

Every model gets it whose build_metrics() has a MulticlassConfusionMatrix under the name `confusion_matrix`; a data set
with `label_names` gives the classes their names.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from ..validation import one_line
from .checkpoint import write_whole

METRIC = "confusion_matrix"
SCORES = ("precision", "recall", "f1")
MAX_COLUMNS = 120
"""A text wider than this numbers the matrix's columns instead of naming them."""
MAX_NUMBERED = 50
"""With more classes a picture has colors alone."""
MAX_NAME = 40
"""Characters of a name in the picture."""


def build_report(title: str, matrix: list[list[int]], label_names: Sequence[str]) -> dict[str, Any]:
    """{"title", "accuracy", "num_samples", "classes", "averages", "confusion_matrix"}.

    matrix[i][j]: samples of class i that were taken for class j. A class or an average is {"label", "precision",
    "recall", "f1", "support"}; a quotient by 0 counts as 0, as in scikit-learn. A class without a name has its number.
    """
    classes = []
    names = [*label_names, *range(len(label_names), len(matrix))]
    for place, name in enumerate(map(str, names[: len(matrix)])):
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
    except Exception as error:  # whatever fonts, settings and a full disk do to matplotlib: no run ends for its picture
        Path(f"{stem}.png").unlink(missing_ok=True)  # a part of it, or an older one
        return f"{text}\n\nThere is no picture of it: {type(error).__name__}: {one_line(error)}"
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
    are_numbers = [all(re.fullmatch(r"-?[\d.]*[%x]?( \(!\))?", cell) for cell in column[1:]) for column in columns]
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
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.lines import Line2D

    labels, matrix = [shorten(entry["label"]) for entry in report["classes"]], report["confusion_matrix"]
    file, characters = _find_font(labels)
    can_name = all(_has(characters, label) for label in labels)
    names = labels if can_name else [str(place) for place in range(len(labels))]
    legend = [] if can_name else _legend(labels, characters, f"{path.stem}.txt")
    title = f"{report['title']}\naccuracy {report['accuracy']:.4f} of {report['num_samples']}"

    size = min(3.0 + 0.45 * len(labels), 25.0)
    num_columns = max(1, int(size * 12) // max(map(len, legend), default=1))  # about 12 characters an inch
    height = size + 0.2 * math.ceil(len(legend) / num_columns)
    font = FontProperties(fname=file)
    # A name is shown as it is: it is no formula that begins with $, nor TeX, even if matplotlibrc asks for that.
    with rc_context({"text.parse_math": False, "text.usetex": False}):
        figure = Figure(figsize=(size + 1.0, height), layout="constrained")
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
        axes.set(xlabel="predicted", ylabel="true")
        axes.set_title(_drawable(title, characters), font=font, fontsize=10)
        if legend:
            blanks, no_marks = [Line2D([], []) for _ in legend], {"handlelength": 0, "handletextpad": 0}
            figure.legend(blanks, legend, loc="outside lower center", ncols=num_columns, prop=font, **no_marks)
        figure.savefig(path, dpi=130, format="png")


def shorten(label: str) -> str:
    """A name that leaves room for the matrix."""
    return label if len(label) <= MAX_NAME else f"{label[: MAX_NAME - 3]}..."


def _legend(labels: Sequence[str], characters: Container[int], text_file: str) -> list[str]:
    """What the numbers on the axes stand for: `number = name` where the name can be drawn; and where the others are."""
    is_short = len(labels) <= MAX_NUMBERED
    known = [f"{i} = {label}" for i, label in enumerate(labels) if is_short and _has(characters, label)]
    others = _drawable(f"{'other ' if known else ''}names: see {text_file}", characters)
    return [*known, others] if len(known) < len(labels) else known


def _drawable(text: str, characters: Container[int]) -> str:
    return "".join(char if char == "\n" or ord(char) in characters else "?" for char in text)


def _has(characters: Container[int], text: str) -> bool:
    return all(ord(char) in characters for char in text)


def _find_font(names: Sequence[str]) -> tuple[str, Container[int]]:
    """The file of an installed font that has all characters of most of the names, and the characters that it has.

    Of equal ones it is the first, and matplotlib's own comes before all.
    """
    from matplotlib import font_manager

    own = font_manager.findfont("DejaVu Sans")
    best: tuple[int, str, Container[int]] = (-1, own, ())
    installed = sorted(font.fname for font in font_manager.fontManager.ttflist)
    for file in dict.fromkeys([own, *(name for name in installed if "LastResort" not in name)]):  # that one has boxes
        try:
            font = font_manager.get_font(file)
        except (OSError, RuntimeError):
            continue  # not a font that it can read
        if not font.scalable:  # bitmaps, as of colored emoji: not one that it can draw with
            continue
        characters = font.get_charmap()
        num_names = sum(_has(characters, name) for name in names)
        if num_names > best[0]:
            best = num_names, file, characters
        if num_names == len(names):
            break
    return best[1:]

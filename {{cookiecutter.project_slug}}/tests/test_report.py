"""A report says of each class what scikit-learn would, in straight columns, and draws what a person can read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from template_package.training.report import (
    _find_font,
    align,
    as_text,
    build_report,
    display_width,
    report_stem,
    show_report,
    write_report,
)

MATRIX = [[5, 1, 0, 2], [2, 7, 1, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
NAMES = ["天气", "food", "très long", "ラーメン"]


def test_scores_are_those_of_the_definitions() -> None:
    report = build_report("t", MATRIX, NAMES)
    scores = [(c["precision"], c["recall"], c["f1"], c["support"]) for c in report["classes"]]
    assert scores == [(5 / 7, 5 / 8, 10 / 15, 8), (7 / 8, 7 / 10, 14 / 18, 10), (0, 0, 0, 3), (0, 0, 0, 0)]
    macro, weighted = report["averages"]
    assert macro["recall"] == pytest.approx((5 / 8 + 7 / 10) / 4)
    assert weighted["recall"] == pytest.approx(report["accuracy"]) == pytest.approx(12 / 21)
    assert report["num_samples"] == weighted["support"] == 21


def test_scores_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    pairs = [(i, j) for i, row in enumerate(MATRIX) for j, count in enumerate(row) for _ in range(count)]
    true, predicted = zip(*pairs, strict=True)
    options = {"labels": range(4), "target_names": NAMES, "output_dict": True, "zero_division": 0}
    theirs = metrics.classification_report(true, predicted, **options)
    ours = build_report("t", MATRIX, NAMES)
    names = {"macro average": "macro avg", "weighted average": "weighted avg"}
    for entry in [*ours["classes"], *ours["averages"]]:
        expected = theirs[names.get(entry["label"], entry["label"])]
        found = {"f1-score": entry["f1"], **{key: entry[key] for key in ("precision", "recall", "support")}}
        assert found == pytest.approx(expected)


def test_columns_are_straight_whatever_the_characters() -> None:
    lines = as_text(build_report("t", MATRIX, NAMES)).split("\n")
    table, matrix = lines[2:9], lines[11:]
    assert len({display_width(line) for line in table}) == len({display_width(line) for line in matrix}) == 1
    assert [line.split()[0] for line in matrix[1:]] == list("0123")
    assert display_width("e\u0301天ラx") == 6
    assert align([["n", "text"], ["10", "a"], ["9", "bb"]]) == [" n  text", "10  a", " 9  bb"]


def test_many_classes_are_numbered_in_the_head_of_the_matrix() -> None:
    names = [f"class number {place}" for place in range(30)]
    text = as_text(build_report("t", [[int(i == j) for j in range(30)] for i in range(30)], names))
    assert "29 class number 29" in text
    assert max(map(display_width, text.split("\n"))) < 150


def test_files_hold_the_report_and_a_readable_picture(tmp_path: Path) -> None:
    stem = report_stem(tmp_path, "validation", "my.v2")
    write_report(stem, build_report("a title", MATRIX, NAMES))
    shown = show_report(stem)
    text = Path(f"{stem}.txt").read_text(encoding="utf-8").rstrip()
    assert shown.startswith(text) and text.startswith("a title: accuracy 0.5714 of 21 samples")
    assert json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))["confusion_matrix"] == MATRIX
    pytest.importorskip("matplotlib")
    content = Path(f"{stem}.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 400 and height > 400


def test_picture_names_classes_in_a_font_that_has_their_characters_or_numbers_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import font_manager

    def characters(file: str | Path) -> set[int]:
        return set(font_manager.get_font(str(file)).get_charmap())

    own = _find_font("plain é")
    assert own is not None and own.name == "DejaVuSans.ttf"
    other = font_manager.findfont("STIXGeneral", fallback_to_default=False)  # comes with matplotlib too
    rare = chr(min(characters(other) - characters(own)))
    found = _find_font(rare)
    assert found is not None and found != own and ord(rare) in characters(found)
    assert _find_font("\U000f1234") is None  # in the private use area: boxes are no names
    for place, names in enumerate((["a", rare], ["a", "\U000f1234"], [str(n) for n in range(60)])):
        size = len(names)
        report = build_report("t", [[i * j for i in range(size)] for j in range(size)], names)
        write_report(tmp_path / str(place), report)
        show_report(tmp_path / str(place))
        assert (tmp_path / f"{place}.png").stat().st_size > 5000

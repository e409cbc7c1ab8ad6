"""A report says of each class what scikit-learn would, in straight columns, and draws what a person can read."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest

from template_package.training import report as reporting
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


def test_classes_without_a_name_have_their_number_and_names_too_many_are_left_out() -> None:
    for names, expected in (([], list("0123")), (["a", "b"], ["a", "b", "2", "3"]), (list("abcdef"), list("abcd"))):
        report = build_report("t", MATRIX, names)
        assert [entry["label"] for entry in report["classes"]] == expected
        assert len(as_text(report).split("\n")) == 16


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

    def characters(file: str) -> set[int]:
        return set(font_manager.get_font(file).get_charmap())

    own, _ = _find_font(["plain é"])
    assert own.endswith("DejaVuSans.ttf")
    other = font_manager.findfont("STIXGeneral", fallback_to_default=False)  # comes with matplotlib too
    rare = chr(min(characters(other) - characters(own)))
    found, its_characters = _find_font([rare])
    assert found != own and ord(rare) in characters(found) and ord(rare) in its_characters
    assert _find_font(["\U000f1234"])[0] == _find_font(["\U000f1234", "a"])[0] == own  # of private use: in none
    for place, names in enumerate((["a", rare], ["a", "\U000f1234"], [str(n) for n in range(60)])):
        size = len(names)
        report = build_report("t", [[i * j for i in range(size)] for j in range(size)], names)
        write_report(tmp_path / str(place), report)
        show_report(tmp_path / str(place))
        assert (tmp_path / f"{place}.png").stat().st_size > 5000


def texts_drawn(monkeypatch: pytest.MonkeyPatch, stem: Path, names: list[str], title: str = "t") -> list[str]:
    """All words in the picture of a report on classes of these names."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    found: list[str] = []
    save = Figure.savefig

    def look_and_save(figure: Any, *words: Any, **options: Any) -> None:
        save(figure, *words, **options)
        found.extend(text.get_text() for text in figure.findobj(Text) if text.get_text())

    monkeypatch.setattr(Figure, "savefig", look_and_save)
    write_report(stem, build_report(title, [[i * j for i in range(len(names))] for j in range(len(names))], names))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a character that the font lacks
        assert show_report(stem).endswith(f"As a picture: {stem}.png")
    return found


def test_names_that_cannot_be_drawn_are_numbers_with_a_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    unknown = "\U000f1234"
    texts = texts_drawn(monkeypatch, tmp_path / "my.v2", ["sun", unknown, "très long", "a\nb"], f"of {unknown}")
    assert "of ?\naccuracy 0.3889 of 36" in texts
    assert [text for text in texts if "=" in text or "see" in text] == [
        "0 = sun", "2 = très long", "other names: see my.v2.txt",
    ]  # fmt: skip
    assert {"0", "1", "2", "3"} <= set(texts) and "sun" not in texts
    assert "names: see a.txt" in texts_drawn(monkeypatch, tmp_path / "a", [unknown] * 3)
    assert "names: see b.txt" in texts_drawn(monkeypatch, tmp_path / "b", [unknown, *("name" * 50)])  # too many to list
    assert "names: see ?.txt" in texts_drawn(monkeypatch, tmp_path / unknown, [unknown, unknown])
    texts = texts_drawn(monkeypatch, tmp_path / "c", ["sun", "x" * 300])
    assert "sun" in texts and "x" * 37 + "..." in texts


@pytest.mark.parametrize("name", ["$$", "$x", "$\\frac{$", "a$b$", "^_{}%&#~", "\\$"])
def test_names_are_no_formulas(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"text.usetex": name == "^_{}%&#~"}):  # as a matplotlibrc may have it
        texts = texts_drawn(monkeypatch, tmp_path / "a", [name, "b"], title=name)
        assert name in texts and f"{name}\naccuracy 1.0000 of 1" in texts
        assert f"0 = {name}" in texts_drawn(monkeypatch, tmp_path / "$$", [name, "\U000f1234"])


def test_a_picture_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        (tmp_path / "a.png").touch()
        raise RuntimeError("Could not set\nthe fontsize")

    monkeypatch.setattr(reporting, "draw", fail)
    write_report(tmp_path / "a", build_report("t", MATRIX, NAMES))
    shown = show_report(tmp_path / "a")
    assert shown.endswith("\n\nThere is no picture of it: RuntimeError: Could not set\\nthe fontsize")
    assert not (tmp_path / "a.png").exists()

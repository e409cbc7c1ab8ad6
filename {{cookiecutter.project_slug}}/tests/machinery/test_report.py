"""Tests that a report's scores for each class equal scikit-learn's, also in the console's table."""

from __future__ import annotations

import pytest

from template_package.training.evaluation import class_scores, class_table

MATRIX = [[5, 1, 0, 2], [2, 7, 1, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
NAMES = ["天气", "food", "très long", "ラーメン"]
REPORT = {"title": "a title", "label_names": NAMES, "confusion_matrix": MATRIX}


def test_scores_are_those_of_the_definitions() -> None:
    *classes, macro, weighted = class_scores(REPORT)
    scores = [(c["precision"], c["recall"], c["f1"], c["support"]) for c in classes]
    assert scores == [
        (5 / 7, 5 / 8, 10 / 15, 8),
        (7 / 8, 7 / 10, 14 / 18, 10),
        (0, 0, 0, 3),
        (0, 0, 0, 0),
    ]
    assert macro["recall"] == pytest.approx((5 / 8 + 7 / 10) / 4)
    assert weighted["recall"] == pytest.approx(12 / 21), "the accuracy"
    assert macro["support"] == weighted["support"] == 21


def test_scores_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    pairs = [
        (i, j) for i, row in enumerate(MATRIX) for j, count in enumerate(row) for _ in range(count)
    ]
    true, predicted = zip(*pairs, strict=True)
    options = {"labels": range(4), "target_names": NAMES, "output_dict": True, "zero_division": 0}
    theirs = metrics.classification_report(true, predicted, **options)
    names = {"macro average": "macro avg", "weighted average": "weighted avg"}
    for entry in class_scores(REPORT):
        expected = theirs[names.get(entry["label"], entry["label"])]
        found = {
            "f1-score": entry["f1"],
            **{key: entry[key] for key in ("precision", "recall", "support")},
        }
        assert found == pytest.approx(expected)


def test_classes_without_a_name_have_their_number_and_names_too_many_are_left_out() -> None:
    for names, expected in (
        ([], list("0123")),
        (["a", "b"], ["a", "b", "2", "3"]),
        (list("abcdef"), list("abcd")),
    ):
        rows = class_scores(REPORT | {"label_names": names})
        assert [row["label"] for row in rows] == [*expected, "macro average", "weighted average"]


def test_table_holds_scores_and_matrix() -> None:
    lines = class_table(REPORT).splitlines()
    assert lines[0] == "a title" and lines[3].split() == [
        "food",
        "0.8750",
        "0.7000",
        "0.7778",
        "10",
    ]
    assert lines[-3].split() == ["food", "2", "7", "1", "0"]

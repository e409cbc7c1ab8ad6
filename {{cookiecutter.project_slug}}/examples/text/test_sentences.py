"""Tests that run the example as a user does. Two ranks train, three ranks predict, and changed data are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import PACKAGE, ROOT, Session

Run = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy this project, with only 120 of the sentences. Return the folder of the copy."""
    folder = tmp_path_factory.mktemp("text 例")
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run.py", "config.yaml"):
        shutil.copy(ROOT / name, folder)
    rows = json.loads((ROOT / "sentences.json").read_text(encoding="utf-8"))
    (folder / "sentences.json").write_text(json.dumps(rows[:120]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, session: Session) -> Run:
    def run(*words: str, code: int = 0) -> str:
        settings = ["name=run", "training.epochs=3", "logging.tracker=none"]
        returned, printed = session.run(folder, "run", [*words, *settings])
        assert returned == code, printed
        return printed

    run("device_ids=cpu,cpu")
    return run


def test_report_of_the_best_evaluation_is_exact_on_any_number_of_ranks(
    run: Run, folder: Path
) -> None:
    path = folder / "runs" / "run" / "reports" / "validation_best.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    matrix = report["confusion_matrix"]
    assert (
        report["label_names"] == ["weather", "food", "travel", "money"]
        and sum(map(sum, matrix)) == 24
    )
    run("evaluate", "device_ids=cpu,cpu,cpu", "evaluation.micro_batch_size=5")
    assert json.loads(path.read_text(encoding="utf-8")) == report
    evaluation = json.loads(
        (folder / "runs" / "run" / "evaluation.json").read_text(encoding="utf-8")
    )
    assert evaluation["accuracy"] == pytest.approx(sum(matrix[i][i] for i in range(4)) / 24)


def test_rows_of_a_file_are_answered_in_their_order(run: Run, folder: Path) -> None:
    rows = json.loads((folder / "sentences.json").read_text(encoding="utf-8"))[:11]
    (folder / "new.jsonl").write_text(
        "\n".join(json.dumps([text]) for text, _ in rows), encoding="utf-8"
    )
    answers = []
    for devices in ("cpu", "cpu,cpu,cpu"):
        run("predict", "new.jsonl", f"device_ids={devices}", "evaluation.micro_batch_size=2")
        lines = (
            (folder / "runs" / "run" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
        )
        answers.append([json.loads(line) for line in lines])
    alone, together = answers
    assert [row["input"] for row in together] == [text for text, _ in rows]
    assert [row["label"] for row in together] == [row["label"] for row in alone]
    assert [row["probability"] for row in together] == pytest.approx(
        [row["probability"] for row in alone], rel=1e-4
    )
    assert "1 rows: runs/run/predictions.jsonl" in run("predict", "雨が降った", "device_ids=cpu")


def test_a_checkpoint_is_not_used_with_another_vocabulary(run: Run, folder: Path) -> None:
    path = folder / "sentences.json"
    content = path.read_text(encoding="utf-8")
    path.write_text(content.replace("rain", "sleet"), encoding="utf-8")
    for command in (["evaluate"], ["predict", "a storm"], ["training.epochs=4"]):
        assert "data.fingerprint" in run(*command, "device_ids=cpu", code=2)
    path.write_text(content, encoding="utf-8")
    assert "is complete" in run("device_ids=cpu")


def test_wrong_rows_end_a_run_with_one_line_before_it_begins(run: Run, folder: Path) -> None:
    (folder / "bad.csv").write_text("a,weather\nb,snow\n", encoding="utf-8")
    printed = run("data.train_file=bad.csv", "name=other", "device_ids=cpu,cpu", code=2)
    assert printed.count("bad.csv, line 2: label snow is none of data.label_names") == 1
    assert "Traceback" not in printed

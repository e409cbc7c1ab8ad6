"""Tests of `run.py benchmark`: each row runs what its name says or gives a reason, and interruption loses no result."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from template_package.commands import benchmark
from template_package.commands.benchmark import Row, as_markdown, find_reason, plan_rows, summarize
from template_package.core.settings import read_command_line
from template_package.errors import ConfigError

from conftest import PACKAGE, ROOT, Project

NOT_TRAINING = """
from .ddp import DistributedDataParallelStrategy


class NotTraining(DistributedDataParallelStrategy):
    def optimizer_step(self, max_gradient_norm):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        return super().optimizer_step(max_gradient_norm)


STRATEGY = NotTraining
"""
KEYS = "seconds_per_step samples_per_second startup_seconds waiting_share first_loss final_loss".split()
needs_proc = pytest.mark.skipif(
    not Path("/proc").is_dir(), reason="no /proc: processes cannot be found"
)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute on two idle cores
def test_each_row_is_what_it_says_and_what_cannot_run_has_its_reason(project: Project) -> None:
    strategies = project.folder / PACKAGE / "strategies"
    for name in ("data_parallel", "accelerate", "deepspeed", "horovod"):
        (strategies / f"{name}.py").unlink(missing_ok=True)
    (strategies / "fsdp.py").write_text(NOT_TRAINING, encoding="utf-8")
    words = [
        "benchmark",
        "benchmark.steps=60",
        "benchmark.rounds=1",
        "name=b",
        "optimizer.learning_rate=0.03",
    ]
    output, errors = project.start(*words).communicate(timeout=580)

    assert not errors, errors
    report = project.json("b", "benchmark/benchmark.json")
    rows = {row["name"]: row for row in report["rows"]}
    runs = {name: row["runs"][0] for name, row in rows.items()}
    assert {
        name: (run["world_size"], run["num_devices"], run["precision"])
        for name, run in runs.items()
    } == {
        "one device": (1, 1, "fp32"),
        "ddp": (2, 2, "fp32"),
        "ddp, 16-bit": (2, 2, "bf16"),
        "ddp, compile": (2, 2, "fp32"),
        "fsdp": (2, 2, "fp32"),
    }
    # The same data in the same order gives the same losses; 16-bit numbers have three digits.
    losses = {name: row["final_loss"] for name, row in rows.items()}
    reference = losses["one device"]
    assert rows["one device"]["first_loss"] > 1.1 * reference
    for name in ("ddp", "ddp, compile"):
        assert losses[name] == pytest.approx(reference, rel=1e-4), name
    assert 1e-6 < abs(losses["ddp, 16-bit"] / reference - 1) < 0.05
    assert [name for name, row in rows.items() if row["is_loss_wrong"]] == ["fsdp"]
    for row in rows.values():
        assert 0 < row["seconds_per_step"] < row["startup_seconds"] and row["peak_memory_mib"] > 0
        assert row["samples_per_second"] == pytest.approx(16 / row["seconds_per_step"], rel=0.1)

    reasons = {entry["name"]: entry["reason"] for entry in report["not_run"]}
    assert list(reasons) == ["data_parallel"]
    assert reasons["data_parallel"].startswith(
        "strategy=data_parallel: must be one of 'ddp', 'fsdp'."
    )
    folder = project.directory("b") / "benchmark"
    assert "must be one of 'ddp', 'fsdp'." in (folder / "data_parallel.log").read_text(
        encoding="utf-8"
    )
    said, _, text = output.partition("\n# Benchmark of b\n")
    assert "round 1 of 1: fsdp\n" in said
    assert all(f" {name} |" in text for name in rows) and all(
        reason in text for reason in reasons.values()
    )
    assert text.count("(!) |") == 1 and text.splitlines()[-1].startswith("The fastest row is ")
    assert "run.py name=b optimizer.learning_rate=0.03 device_ids=" in text.splitlines()[-1], (
        "the words that it keeps"
    )
    assert not (folder / "run").exists()


def living(folder: Path) -> list[str]:
    """Return the command lines of the processes whose working directory is `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (path / "cwd").readlink() == folder:
                found.append((path / "cmdline").read_text(encoding="utf-8"))
    return found


def has_processes(folder: Path, is_right: Callable[[int], bool]) -> bool:
    """Wait up to a minute until `is_right` accepts the number of processes in `folder`, and return the last answer.

    The wait is needed because a fork server exits only after its imports are done.
    """
    deadline = time.monotonic() + 60
    while not is_right(len(living(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_right(len(living(folder)))


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "rows"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2)]
)
def test_signal_leaves_the_table_of_what_was_measured_and_no_process(
    project: Project, number: signal.Signals, code: int, rows: int
) -> None:
    with project.start("benchmark", "benchmark.steps=3", "name=b") as process:
        assert process.stdout is not None
        # the line of a row is written when it begins
        for row in ["one device", "ddp", "ddp, 16-bit"][: rows + 1]:
            assert process.stdout.readline() == f"round 1 of 3: {row}\n"
        # The next row's processes: the one that will start the ranks; a fork server and ranks too.
        are_there = has_processes(project.folder, [2, 4][rows - 1].__le__)
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=20)
    assert are_there and process.returncode == code, errors
    assert " one device |" in output and "fsdp: interrupted before its turn" in output
    report = project.json("b", "benchmark/benchmark.json")
    assert [row["name"] for row in report["rows"]] == ["one device", "ddp"][:rows]
    assert not (project.directory("b") / "benchmark" / "run").exists()
    assert has_processes(project.folder, (0).__eq__)


@needs_proc
def test_killed_benchmark_leaves_no_process(project: Project) -> None:
    words = ["benchmark.steps=100000", "device_ids=cpu", "model.seconds_per_step=0.01"]
    with project.start("benchmark", *words) as process:
        are_there = has_processes(project.folder, (2).__le__)
        time.sleep(1.0)
        process.kill()
    assert are_there and has_processes(project.folder, (0).__eq__)


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="--json: a setting is key=value"):
        read_command_line(["benchmark", "--json"], ROOT / "config.yaml")


def test_each_round_has_another_order_and_a_failed_row_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names: list[str] = []

    def run(row: Row, *_: object) -> None:
        names.append(row.name)
        row.reason = "it fails" * (row.name == "c")

    monkeypatch.setattr(benchmark, "_run_once", run)
    benchmark._run_rounds([Row(name, []) for name in "abcd"], [], 3, tmp_path)
    assert "".join(names) == "abcd" + "bda" + "dab"


def test_rows_share_devices_and_the_command_does_what_its_row_does() -> None:
    rows = plan_rows(["0", "2", "5"])
    assert [row.name for row in rows[:4]] == ["one device", "ddp", "ddp, 16-bit", "ddp, compile"]
    assert {"data_parallel", "fsdp"} <= {row.name for row in rows[4:]}
    run = {"peak_memory_mib": 900.0, **dict.fromkeys(KEYS, 1.0)}
    for row in rows:
        row.runs = [run]
    typed = ["--config=big.yaml", "data.name=a b", "device_ids=auto", "training.compile=true"]
    for row, summary in zip(rows, summarize(rows, typed), strict=True):
        *words, ids, strategy, precision, compiles = shlex.split(summary["command"])
        assert words == ["python", "run.py", *typed[:2]], "a key stands once"
        assert row.arguments == [ids, strategy, precision, compiles]
        assert ids == f"device_ids={'0' if row.name == 'one device' else '0,2,5'}"
        assert strategy == f"strategy={'ddp' if row in rows[:4] else row.name}"
        assert compiles == f"training.compile={str(row.name == 'ddp, compile').lower()}"
        assert precision == f"training.precision={'auto' if row.name == 'ddp, 16-bit' else 'fp32'}"


def test_single_gpu_has_the_rows_that_fit() -> None:
    rows = plan_rows(["4"])
    assert [row.name for row in rows] == ["one device", "one device, 16-bit", "one device, compile"]
    assert all(row.arguments[:2] == ["device_ids=4", "strategy=ddp"] for row in rows)


def row_of(name: str, seconds: list[float], final_loss: float = 1.0) -> Row:
    """Return a row with one run for each number of seconds per step in `seconds`."""
    run: dict[str, Any] = {"first_loss": 2.0, "final_loss": final_loss, "startup_seconds": 3.0}
    run |= {
        "peak_memory_mib": 900.0,
        "devices": ["cpu"],
        "platform": "x",
        "libraries": {"torch": "2"},
    }
    run |= {"global_batch_size": 8, "waiting_share": 0.1}
    times = [{"seconds_per_step": second, "samples_per_second": 64 / second} for second in seconds]
    return Row(name, ["device_ids=cpu"], runs=[{**run, **time} for time in times])


@pytest.mark.parametrize(
    ("loss", "is_wrong"),
    [(1.0, False), (0.7, False), (1.3, False), (1.9, True), (float("nan"), True)],
)
def test_medians_and_the_row_that_learns_less_than_half_as_much(
    loss: float, is_wrong: bool
) -> None:
    rows = [
        row_of("one device", [0.4, 0.9, 0.41]),
        Row("it fails", []),
        row_of("ddp", [0.25, 0.2, 0.3], loss),
    ]
    one, two = summarize(rows, [])
    assert (one["seconds_per_step"], two["seconds_per_step"]) == (0.41, 0.25)
    assert two["speed_up"] == pytest.approx(1.64) and two["spread"] == pytest.approx(0.4)
    assert two["is_loss_wrong"] == is_wrong
    text = as_markdown({"name": "b", "rows": [one, two], "not_run": [], "rounds": 3, "steps": 9})
    fastest = "one device (1.00" if is_wrong else "ddp (1.64"
    assert text.splitlines()[-1].startswith(
        f"The fastest row is {fastest} times the speed of one device): python run.py"
    )


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("step 1\nerror: fsdp=x: not so. Do y.\nmore\n", "fsdp=x: not so. Do y."),
        (
            "rank 1 (h, cpu) failed:\nTraceback (most recent call last):\n  x\nValueError: y\nmore\n",
            "ValueError: y",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory.\n",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        ("Segmentation fault\n", "Segmentation fault"),
        ("rank 1 failed:\nkilled by SIGKILL\n", "killed by SIGKILL"),
        ("", "exit code 9"),
    ],
)
def test_reason_is_the_line_that_says_why(output: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(output, encoding="utf-8")
    assert find_reason(tmp_path / "log", 9) == reason

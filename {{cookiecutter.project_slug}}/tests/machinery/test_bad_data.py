"""Tests of data that are unreadable or wrong: the error names samples that cannot be read, and all ranks end."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from conftest import Project, children


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("data.failing_index=50", "cannot read the file of sample 50"),
        ("data.odd_index=50", "RuntimeError: "),
        ("data.num_missing=3", "there is no sample 10"),
    ],
)
def test_samples_of_the_micro_batch_are_named_and_all_ranks_end(
    project: Project, word: str, reason: str, workers: int
) -> None:
    output = project.run("device_ids=cpu,cpu", word, f"loader.num_workers={workers}", code=1)
    index = "10[0-2]" if "missing" in word else "50"
    assert reason in output and output.count(") failed:\n") == 1
    assert re.search(rf"while reading the samples \[[^\]]*\b{index}\b[^\]]*\] of Numbers", output)


@pytest.mark.parametrize(
    ("fault", "workers"),
    [
        *(
            (f"raise {end}", workers)
            for end in ("StopIteration", "SystemExit(0)")
            for workers in (0, 1)
        ),
        ("os._exit(3)", 1),
    ],
)
def test_end_that_a_sample_asks_for_is_an_error_and_not_the_end_of_the_data(
    project: Project, fault: str, workers: int
) -> None:
    line = "        inputs = self.inputs[index]["
    project.edit("dataset.py", line, f"        if index == 5:\n            {fault}\n{line}")
    output = project.run("training.epochs=1", f"loader.num_workers={workers}", code=1)
    assert output.count(") failed:\n") == 1
    if "raise" in fault:
        assert "the data set, or its collate function, raised " in output
    else:
        assert is_told_of_worker(output, "exited unexpectedly")


def test_worker_that_the_system_ends_is_told(project: Project) -> None:
    output = project.run(
        "device_ids=cpu,cpu", "data.kills_worker=true", "loader.num_workers=1", code=1
    )
    assert is_told_of_worker(output, "is killed by signal") and output.count(") failed:\n") == 1


def is_told_of_worker(output: str, how: str) -> bool:
    """Return True if a worker's end is told: how, or, while its batch is fetched, by the connection alone."""
    return ("DataLoader worker" in output and how in output) or "ConnectionResetError" in output


def test_worker_that_the_system_ends_while_its_rank_computes_is_told(project: Project) -> None:
    process = project.start("loader.num_workers=1", "model.seconds_per_step=1.0")
    deadline = time.monotonic() + 60
    metrics = project.directory("run") / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text("utf-8")) and time.monotonic() < deadline:
        time.sleep(0.02)  # a step has been made
    time.sleep(0.3)
    workers = [
        pid
        for pid in children(process.pid)
        if b"run.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 2, "one reads training samples, and one those of evaluations"
    os.kill(min(workers), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert (
        process.returncode == 1
        and "is killed by signal" in errors
        and errors.count(") failed:\n") == 1
    )


def test_data_set_that_differs_in_length_between_ranks_is_refused(project: Project) -> None:
    project.edit(
        "dataset.py",
        "config.num_samples, 1",
        "config.num_samples - 13 * torch.distributed.get_rank(), 1",
    )
    output = project.run("device_ids=cpu,cpu", code=2)
    assert "the training data set is empty, or differs between ranks: 90 to 103 samples" in output
    assert "Traceback" not in output


def test_fewer_samples_than_ranks_train_and_no_samples_are_refused(project: Project) -> None:
    project.run(
        "device_ids=cpu,cpu,cpu", "data.num_samples=2", "data.num_validation=1", "training.epochs=2"
    )
    assert [line["num_samples"] for line in project.lines("run", "validation")] == [1, 1]
    assert len(project.lines("run")) == 2
    output = project.run("name=empty", "device_ids=cpu,cpu", "data.num_samples=0", code=2)
    assert "data set is empty" in output and "Traceback" not in output


def test_rank_twenty_times_slower_trains_the_same(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "training.epochs=1")
    project.run("name=uneven", "device_ids=cpu,cpu", "training.epochs=1", "model.fault=slow")
    assert project.lines("uneven") == project.lines("run")


def test_model_that_differs_between_ranks_is_refused(project: Project) -> None:
    output = project.run("device_ids=cpu,cpu", "model.fault=skip", code=2)
    assert "0.weight" in output and "got no gradient" in output and "Traceback" not in output

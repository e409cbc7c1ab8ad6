"""Tests of resuming: a resumed run must match an uninterrupted one bit for bit and reject changed settings."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from conftest import PACKAGE, Project

RANDOM = ("model.dropout=0.3", "data.noise=0.1")


def assert_equal(first: Any, second: Any, path: str = "") -> int:
    """Assert that two states match bit for bit, except for `config`. Return the number of tensors compared."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
        return 1
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        return sum(
            assert_equal(first[key], second[key], f"{path}.{key}")
            for key in first
            if key != "config"
        )
    if isinstance(first, list | tuple):
        assert len(first) == len(second), path
        return sum(
            assert_equal(a, b, f"{path}[{i}]")
            for i, (a, b) in enumerate(zip(first, second, strict=True))
        )
    assert first == second, path
    return 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_resumed_run_equals_uninterrupted_run(project: Project, num_ranks: int) -> None:
    words = [
        *RANDOM,
        f"device_ids={','.join(['cpu'] * num_ranks)}",
        "checkpoint.every_steps=5",
        "loader.num_workers=2",
    ]
    project.run(*words)
    project.rewind("run", 10, "resumed")  # in the middle of the second epoch
    output = project.run(*words, "name=resumed")
    assert "resuming after step 10" in output
    assert project.lines("resumed") == project.lines("run")
    assert project.lines("resumed", "validation") == project.lines("run", "validation")
    first, second = project.checkpoint("run", 21), project.checkpoint("resumed", 21)
    assert assert_equal(first, second) >= 6 + 3 * 6  # weights, AdamW's state


def test_run_goes_on_with_other_ranks_and_sees_each_remaining_sample_once(project: Project) -> None:
    words = (
        "model.dtype=float64",
        "data.dtype=float64",
        "checkpoint.every_epochs=null",
        "schedule.name=constant",
    )
    project.run(*words)
    # each time within an epoch of 7 steps
    for num_ranks, last_step in (
        (2, 4),
        (1, 9),
        (3, 13),
        (2, 21),
    ):
        devices = f"device_ids={','.join(['cpu'] * num_ranks)}"
        project.run(*words, "name=moving", devices, f"training.max_steps={last_step}")
    losses = [line["loss"] for line in project.lines("run")]
    # float64 in another order of summation; one sample twice or never would show in the third digit.
    assert [line["loss"] for line in project.lines("moving")] == pytest.approx(losses, rel=1e-10)
    assert [line["step"] for line in project.lines("moving")] == list(range(1, 22))


FAILING = """
def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    if torch.distributed.get_rank() == 1 and metrics.is_rehearsed:
        raise ArithmeticError("a bug in update_metrics")
    metrics.update(outputs, batch.targets)
    metrics.is_rehearsed = True


def build_metrics(config: ModelConfig) -> "MetricCollection":
    from torchmetrics import MeanAbsoluteError, MetricCollection

    metrics = MetricCollection({"absolute_error": MeanAbsoluteError()})
    metrics.is_rehearsed = False
    return metrics
"""


def test_evaluation_that_fails_costs_no_step_and_is_repeated(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "name=undisturbed")
    path = project.folder / PACKAGE / "model.py"
    shutil.copy(path, project.folder / "whole.py")
    project.append("model.py", FAILING)
    output = project.run("device_ids=cpu,cpu", code=1)
    assert "rank 1 (" in output and "a bug in update_metrics" in output
    assert [line["step"] for line in project.lines("run")] == [*range(1, 8)] and not project.lines(
        "run", "validation"
    )
    saved = (project.directory("run") / "checkpoints" / "step_00000007.pt").read_bytes()
    output = project.run("device_ids=cpu,cpu", code=1)
    assert "resuming after step 7" in output and len(project.lines("run")) == 7, (
        "only the evaluation is repeated"
    )
    assert (project.directory("run") / "checkpoints" / "step_00000007.pt").read_bytes() == saved

    shutil.copy(project.folder / "whole.py", path)
    project.run("device_ids=cpu,cpu")
    for split in ("train", "validation"):
        assert project.lines("run", split) == project.lines("undisturbed", split)
    assert_equal(project.checkpoint("run", 21), project.checkpoint("undisturbed", 21))


def test_rules_for_the_same_name_again(project: Project) -> None:
    project.run()
    complete = project.run()
    assert "run run is complete: 21 steps" in complete and "raise training.epochs" in complete
    changed = project.run("optimizer.learning_rate=1", "seed=7", code=2)
    assert (
        "optimizer.learning_rate: 0.01 -> 1.0" in changed
        and "seed: 42 -> 7" in changed
        and "name=" in changed
    )
    assert "checkpoint.resume=never" in project.run("checkpoint.resume=never", code=2)
    before = project.lines("run")
    longer = project.run("training.epochs=4", "logging.every_steps=2", "launch.timeout_minutes=9")
    assert "changed since: training.epochs: 3 -> 4" in longer and "since: launch" not in longer
    assert project.json("run", "summary.json")["steps"] == 28
    assert project.lines("run")[:21] == before


def test_flipped_bit_in_a_checkpoint_is_found_and_the_one_before_is_taken(project: Project) -> None:
    project.run()
    path, before = (
        project.directory("run") / "checkpoints" / "step_00000021.pt",
        project.lines("run"),
    )
    content = bytearray(path.read_bytes())
    content[
        content.index(project.checkpoint("run", 21)["model"]["0.weight"].numpy().tobytes())
    ] ^= 1
    path.write_bytes(content)
    damaged = project.run()
    assert "step_00000021.pt cannot be used" in damaged and "resuming after step 14" in damaged
    assert project.lines("run") == before
    assert "is complete" in project.run(), "the last step has a whole checkpoint again"


def test_failure_of_one_rank_is_told_once_and_ends_all(project: Project) -> None:
    output = project.run("device_ids=cpu,cpu", "model.fault=raise", code=1)
    assert output.count("Traceback (most recent call last)") == 1
    assert "rank 1 (" in output and "ArithmeticError: the fault that the test asked for" in output
    assert "resuming" not in output and not (project.directory("run") / "summary.json").exists()

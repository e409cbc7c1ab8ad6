"""The same name again: a resumed run equals an uninterrupted one, to the bit, and what must not be continued is
refused.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from template_package.training.checkpoint import CheckpointFolder

from conftest import Project

RANDOM = ("model.dropout=0.3", "data.noise=0.1")


def assert_equal(first: Any, second: Any, path: str = "") -> int:
    """Compare to the bit; returns how many tensors were compared."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
        return 1
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        return sum(
            assert_equal(first[key], second[key], f"{path}.{key}") for key in first if key not in ("config", "checksum")
        )
    if isinstance(first, list | tuple):
        assert len(first) == len(second), path
        return sum(assert_equal(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(first, second, strict=True)))
    assert first == second, path
    return 0


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_resumed_run_equals_uninterrupted_run(project: Project, num_ranks: int) -> None:
    words = [*RANDOM, f"device_ids={','.join(['cpu'] * num_ranks)}", "checkpoint.every_steps=5", "loader.num_workers=2"]
    project.run(*words)
    project.rewind("run", 10, "resumed")  # in the middle of the second epoch
    output = project.run(*words, "name=resumed")
    assert "resuming after step 10" in output
    assert project.lines("resumed") == project.lines("run")
    assert project.lines("resumed", "validation") == project.lines("run", "validation")
    first, second = project.checkpoint("run", 21), project.checkpoint("resumed", 21)
    assert assert_equal(first, second) >= 6 + 3 * 6 + 2 * num_ranks  # weights, AdamW's state, random states
    states = [state["torch"] for state in first["random_states"]]
    assert len({state.numpy().tobytes() for state in states}) == num_ranks, "each rank draws its own"


def test_run_goes_on_with_other_ranks_and_sees_each_remaining_sample_once(project: Project) -> None:
    words = ("model.dtype=float64", "data.dtype=float64", "checkpoint.every_epochs=null", "schedule.name=constant")
    project.run(*words)
    for num_ranks, last_step in ((2, 4), (1, 9), (3, 13), (2, 21)):  # each time within an epoch of 7 steps
        devices = f"device_ids={','.join(['cpu'] * num_ranks)}"
        project.run(*words, "name=moving", devices, f"training.max_steps={last_step}")
    losses = [line["loss"] for line in project.lines("run")]
    # float64 in another order of summation; one sample twice or never would show in the third digit.
    assert [line["loss"] for line in project.lines("moving")] == pytest.approx(losses, rel=1e-10)
    assert [line["step"] for line in project.lines("moving")] == list(range(1, 22))


def test_second_process_may_not_train_the_same_run(project: Project) -> None:
    words = ("model.seconds_per_step=0.2", "training.epochs=99")
    first = project.start("device_ids=cpu,cpu", *words)
    deadline = time.monotonic() + 60
    while not (project.directory("run") / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert f"on {platform.node()} trains this run already" in project.run(*words, code=2)
    assert "another name=" in project.run("device_ids=cpu,cpu", *words, code=2)
    first.kill()
    first.wait()
    time.sleep(1)  # its ranks see that it is gone
    project.run(*words, "training.max_steps=9")  # nobody holds the run any more


def test_run_killed_before_its_summary_is_finished(project: Project) -> None:
    project.run()
    (project.directory("run") / "summary.json").unlink()
    (project.directory("run") / "model.safetensors").unlink()
    before = project.lines("run")
    project.run()
    assert project.json("run", "summary.json")["status"] == "complete" and project.lines("run") == before
    assert (project.directory("run") / "model.safetensors").exists()


def test_rules_for_the_same_name_again(project: Project) -> None:
    project.run()
    assert "run run is complete: 21 steps" in project.run()
    changed = project.run("optimizer.learning_rate=1", "seed=7", code=2)
    assert "optimizer.learning_rate: 0.01 -> 1.0" in changed and "seed: 42 -> 7" in changed and "name=" in changed
    assert "checkpoint.resume=never" in project.run("checkpoint.resume=never", code=2)
    before = project.lines("run")
    checkpoints = project.directory("run") / "checkpoints"
    (checkpoints / "step_00000021.pt").write_bytes(b"half a file")
    damaged = project.run()
    assert "step_00000021.pt cannot be read" in damaged and "resuming after step 14" in damaged
    assert project.lines("run")[:21] == before
    longer = project.run("training.epochs=4", "logging.every_steps=2")
    assert "training.epochs was 3, is 4" in longer and project.json("run", "summary.json")["steps"] == 28
    source = checkpoints / "step_00000014.pt"
    branch = ("name=branch", f"checkpoint.resume={source}", "optimizer.learning_rate=0.001", "optimizer.betas=0.5,0.9")
    project.run(*branch)
    lines = project.lines("branch")
    assert [line["step"] for line in lines] == list(range(15, 22))
    assert max(line["learning_rate"] for line in lines) <= 0.001, "the branch's own, not that of the run it left"
    end = project.checkpoint("branch", 21)
    assert all(list(group["betas"]) == [0.5, 0.9] for group in end["optimizer"]["param_groups"])
    assert end["best"]["step"] > 14, "its own best"
    other = project.run(*branch[:2], "name=other", "optimizer.name=sgd", code=2)
    assert "optimizer.name: adamw -> sgd" in other and f"checkpoint.initial_weights={source}" in other


def test_precision_auto_is_what_the_devices_compute_in(project: Project) -> None:
    project.run("training.precision=auto", "training.max_steps=2")
    assert "is complete" in project.run("training.precision=fp32", "training.max_steps=2")
    assert "training.precision: fp32 -> bf16" in project.run("training.precision=bf16", code=2)


def test_failure_of_one_rank_is_told_once_and_ends_all(project: Project) -> None:
    started_at = time.monotonic()
    output = project.run("device_ids=cpu,cpu", "model.fault=raise", code=1)
    assert output.count("Traceback (most recent call last)") == 1
    assert "rank 1 (" in output and "ArithmeticError: the fault that the test asked for" in output
    assert "killed by SIGKILL" in project.run("name=killed", "device_ids=cpu,cpu", "model.fault=kill", code=1)
    assert time.monotonic() - started_at < 60


def test_run_that_goes_on_is_not_complete_before_its_new_end(project: Project) -> None:
    project.run()
    process = project.start("training.epochs=9999", "checkpoint.every_epochs=9999")
    deadline = time.monotonic() + 60
    while len(project.lines("run")) < 30 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert not (project.directory("run") / "summary.json").exists(), "it told of the end at step 21"
    (project.directory("run") / "summary.json").touch()  # as an older version, or a disk, may leave it
    project.run("training.epochs=4")
    assert project.json("run", "summary.json")["steps"] == 28


def test_steps_of_another_batch_size_are_counted_anew(project: Project) -> None:
    project.run("checkpoint.every_steps=1")  # 103 samples in 7 steps an epoch
    source = project.directory("run") / "checkpoints" / "step_00000010.pt"
    output = project.run("name=branch", f"checkpoint.resume={source}", "training.global_batch_size=32")
    assert "resuming after step 5 of 12" in output and "its 10 steps are counted as 5" in output  # 4 steps an epoch
    summary = project.json("branch", "summary.json")
    assert (summary["epochs"], summary["steps"]) == (3, 12)
    assert [line["step"] for line in project.lines("branch")] == list(range(6, 13))


def test_summary_tells_of_the_weights_beside_it(project: Project) -> None:
    """Those of best.pt, be it of a step that a killed run had made and that now comes out otherwise, or not at all."""
    project.run()
    best = project.json("run", "summary.json")["best"]
    assert best["step"] > 7
    project.rewind("run", 7, "resumed")
    assert f"at step {best['step']} (runs/resumed)" in project.run("name=resumed", "evaluation.every_epochs=null")
    assert project.json("resumed", "summary.json")["best"] == best


def test_best_checkpoint_is_the_runs_too_where_it_is_the_only_one(project: Project) -> None:
    words = ("checkpoint.every_epochs=9", "evaluation.every_steps=5")
    project.run(*words)
    best = project.json("run", "summary.json")["best"]["step"]
    project.rewind("run", 0, "resumed")
    assert "checkpoint.resume=never" in project.run(*words, "name=resumed", "checkpoint.resume=never", code=2)
    assert "learning_rate: 0.01 -> 1.0" in project.run(*words, "name=resumed", "optimizer.learning_rate=1", code=2)
    (project.directory("resumed") / "summary.json").unlink()  # a killed run has none
    assert best == 21 or f"resuming after step {best}" in project.run(*words, "name=resumed")
    project.run(*words, "name=resumed")
    assert_equal(project.checkpoint("run", 21), project.checkpoint("resumed", 21))


def test_run_that_was_killed_after_its_last_best_checkpoint_gets_the_last_one_too(project: Project) -> None:
    project.run("evaluation.every_epochs=3")
    project.rewind("run", 0, "resumed")
    (project.directory("resumed") / "summary.json").unlink()
    project.run("evaluation.every_epochs=3", "name=resumed")
    assert_equal(project.checkpoint("run", 21)["model"], project.checkpoint("resumed", 21)["model"])


def test_run_is_not_continued_on_fewer_samples(project: Project) -> None:
    project.run("training.epochs=2")
    project.edit("dataset.py", "kind(config, config.num_samples, 1", "kind(config, config.num_samples - 13, 1")
    output = project.run(code=2)
    assert "name=run: was begun with 103 training samples, and there are 90 now" in output and "name=…" in output
    # A checkpoint of an older version does not tell its data's length. Its steps are not counted anew.
    state = project.checkpoint("run", 14)
    del state["checksum"], state["early_stopping"]["num_samples"]
    CheckpointFolder(project.directory("run") / "checkpoints", None).save(state)
    assert "resuming after step 14 of" in project.run()  # 6 steps an epoch now, were it 12


def test_initial_weights_are_what_training_begins_with(project: Project) -> None:
    project.run()
    weights = f"checkpoint.initial_weights={project.directory('run') / 'model.safetensors'}"
    still = ("optimizer.learning_rate=0", "optimizer.weight_decay=0", "training.max_steps=1")
    project.run("name=second", weights, *still)
    (line,) = project.lines("second", "validation")
    assert line["loss"] == project.json("run", "summary.json")["best"]["loss"]


def test_checkpoint_of_a_model_that_was_changed_since_is_refused(project: Project) -> None:
    project.run("training.max_steps=2")
    project.edit("model.py", "nn.Linear(16, 16)", "nn.Linear(16, 16, bias=False)")
    output = project.run("training.max_steps=4", code=2)
    assert "name=run: does not fit the model: unexpected: 3.bias" in output and "Traceback" not in output


def test_damaged_best_checkpoint_costs_its_weights_alone(project: Project) -> None:
    project.run()
    best = project.directory("run") / "checkpoints" / "best.pt"
    content = bytearray(best.read_bytes())
    content[len(content) // 2] ^= 1
    best.write_bytes(content)
    (project.directory("run") / "summary.json").unlink()
    output = project.run()
    assert "best.pt is damaged" in output and "model.safetensors is made from another" in output
    weights = load_file(project.directory("run") / "model.safetensors")
    assert_equal(dict(weights), dict(project.checkpoint("run", 21)["model"]))


def test_what_killed_processes_left_half_written_is_no_obstacle(project: Project) -> None:
    project.run("training.max_steps=3")
    left = [project.directory("run") / "checkpoints" / ".step_00000002.pt.tmp", project.directory("run") / ".tmpx8Yz1a"]
    for path in (*left, project.directory("run") / "micro_batch_size_rank_0.txt"):
        path.write_bytes(b"\xff")
    project.run()
    assert not any(path.exists() for path in left)
    assert project.json("run", "summary.json")["steps"] == 21

"""Tests of rare cases of names and checkpoints: where a run begins, where it resumes, which command is refused."""

from __future__ import annotations

import time

from safetensors.torch import load_file

from template_package.core.checkpoint import CheckpointFolder
from template_package.core.config import CheckpointConfig

from conftest import Project
from test_resuming import assert_equal


def test_second_process_may_not_train_the_same_run(project: Project) -> None:
    words = ("model.seconds_per_step=0.2", "training.epochs=99")
    first = project.start("device_ids=cpu,cpu", *words)
    deadline = time.monotonic() + 60
    while not (project.directory("run") / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "name=run: another process trains this run" in project.run(*words, code=2)
    assert "another name=" in project.run("device_ids=cpu,cpu", *words, code=2)
    first.kill()
    first.communicate()
    time.sleep(1)  # its ranks see that it is gone
    project.run(*words, "training.max_steps=9")  # nobody holds the run any more


def test_two_runs_started_together_both_train(project: Project) -> None:
    processes = [project.start("device_ids=cpu,cpu", f"name=run{number}") for number in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert project.lines("run0") == project.lines("run1")


def test_complete_run_names_the_key_that_ended_it(project: Project) -> None:
    project.run()
    assert "To train on, raise training.epochs" in project.run()
    assert "before training.max_steps" not in project.run("name=steps", "training.max_steps=9")
    told = project.run("name=epochs", "training.max_steps=9", "training.epochs=1")
    assert "training.epochs=1 ends at step 7, before training.max_steps" in told
    assert "To train on, raise training.max_steps" in project.run(
        "name=steps", "training.max_steps=9"
    )
    assert "To train on, raise training.max_steps" in project.run(
        "name=steps", "training.max_steps=8"
    )
    words = (
        "name=early",
        "training.early_stopping_epochs=1",
        "optimizer.learning_rate=0",
        "optimizer.weight_decay=0",
    )
    project.run(*words)
    assert "To train on, raise training.early_stopping_epochs" in project.run(*words)


def test_run_killed_before_its_summary_is_finished(project: Project) -> None:
    project.run()
    (project.directory("run") / "summary.json").unlink()
    (project.directory("run") / "model.safetensors").unlink()
    before = project.lines("run")
    project.run()
    assert (
        project.json("run", "summary.json")["status"] == "complete"
        and project.lines("run") == before
    )
    assert (project.directory("run") / "model.safetensors").exists()


def test_run_that_goes_on_is_not_complete_before_its_new_end(project: Project) -> None:
    project.run()
    process = project.start("training.epochs=9999", "checkpoint.every_epochs=9999")
    deadline = time.monotonic() + 60
    while len(project.lines("run")) < 30 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert not (project.directory("run") / "summary.json").exists(), "it told of the end at step 21"
    # as an older version, or a disk, may leave it
    (project.directory("run") / "summary.json").touch()
    project.run("training.epochs=4")
    assert project.json("run", "summary.json")["steps"] == 28


def test_branch_of_another_run_has_its_own_settings_and_its_own_best(project: Project) -> None:
    project.run()
    source = project.directory("run") / "checkpoints" / "step_00000014.pt"
    branch = (
        "name=branch",
        f"checkpoint.resume={source}",
        "optimizer.learning_rate=0.001",
        "optimizer.betas=0.5,0.9",
    )
    project.run(*branch)
    lines = project.lines("branch")
    assert [line["step"] for line in lines] == list(range(15, 22))
    assert max(line["learning_rate"] for line in lines) <= 0.001, (
        "the branch's own, not that of the run it left"
    )
    end = project.checkpoint("branch", 21)
    assert all(list(group["betas"]) == [0.5, 0.9] for group in end["optimizer"]["param_groups"])
    assert end["best"]["step"] > 14, "its own best"
    other = project.run(*branch[:2], "name=other", "optimizer.name=sgd", code=2)
    assert (
        "optimizer.name: adamw -> sgd" in other and f"checkpoint.initial_weights={source}" in other
    )


def test_steps_of_another_batch_size_are_counted_anew(project: Project) -> None:
    project.run("checkpoint.every_steps=1")  # 103 samples in 7 steps an epoch
    source = project.directory("run") / "checkpoints" / "step_00000010.pt"
    output = project.run(
        "name=branch", f"checkpoint.resume={source}", "training.global_batch_size=32"
    )
    assert "resuming after step 5 of 12" in output  # 4 steps an epoch
    summary = project.json("branch", "summary.json")
    assert (summary["epochs"], summary["steps"]) == (3, 12)
    assert [line["step"] for line in project.lines("branch")] == list(range(6, 13))


def test_precision_auto_is_the_one_that_the_devices_compute_in(project: Project) -> None:
    project.run("training.precision=auto", "training.max_steps=2")
    assert "is complete" in project.run("training.precision=fp32", "training.max_steps=2")
    assert "training.precision: fp32 -> bf16" in project.run("training.precision=bf16", code=2)


def test_best_checkpoint_is_taken_where_it_is_the_only_one(project: Project) -> None:
    words = ("checkpoint.every_epochs=9", "evaluation.every_steps=5")
    project.run(*words)
    best = project.json("run", "summary.json")["best"]["step"]
    project.rewind("run", 0, "resumed")
    assert "checkpoint.resume=never" in project.run(
        *words, "name=resumed", "checkpoint.resume=never", code=2
    )
    missing = project.run(*words, "name=other", "checkpoint.resume=no.pt", code=2)
    assert (
        "error: checkpoint.resume=no.pt cannot be used ([Errno 2] No such file or directory"
        in missing
    )
    assert "learning_rate: 0.01 -> 1.0" in project.run(
        *words, "name=resumed", "optimizer.learning_rate=1", code=2
    )
    (project.directory("resumed") / "summary.json").unlink()  # a killed run has none
    assert best == 21 or f"resuming after step {best}" in project.run(*words, "name=resumed")
    project.run(*words, "name=resumed")
    assert_equal(project.checkpoint("run", 21), project.checkpoint("resumed", 21))


def test_run_that_was_killed_after_its_last_best_checkpoint_gets_the_last_one_too(
    project: Project,
) -> None:
    project.run("evaluation.every_epochs=3")
    project.rewind("run", 0, "resumed")
    (project.directory("resumed") / "summary.json").unlink()
    project.run("evaluation.every_epochs=3", "name=resumed")
    assert_equal(project.checkpoint("run", 21)["model"], project.checkpoint("resumed", 21)["model"])


def test_run_is_not_continued_on_fewer_samples(project: Project) -> None:
    project.run("training.epochs=2")
    project.edit(
        "dataset.py",
        "kind(config, config.num_samples, 1",
        "kind(config, config.num_samples - 13, 1",
    )
    output = project.run(code=2)
    assert (
        "name=run: was begun with 103 training samples, and there are 90 now" in output
        and "name=…" in output
    )
    # A checkpoint of an older version does not hold its data's length. Its steps keep their numbers.
    state = project.checkpoint("run", 14)
    del state["early_stopping"]["num_samples"]
    CheckpointFolder(project.directory("run") / "checkpoints", CheckpointConfig()).save(state)
    assert "resuming after step 14 of" in project.run()  # 6 steps an epoch now, were it 12


def test_initial_weights_are_the_ones_that_training_begins_with(project: Project) -> None:
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
    assert (
        'loading state_dict for Sequential: Unexpected key(s) in state_dict: "3.bias". Change the model back'
        in output
    )
    assert "Traceback" not in output


def test_damaged_best_checkpoint_costs_its_weights_alone(project: Project) -> None:
    project.run()
    best = project.directory("run") / "checkpoints" / "best.pt"
    best.write_bytes(best.read_bytes()[:-1000])
    (project.directory("run") / "summary.json").unlink()
    output = project.run()
    assert "best.pt cannot be used" in output and "Another one is tried" in output
    weights = load_file(project.directory("run") / "model.safetensors")
    assert_equal(dict(weights), dict(project.checkpoint("run", 21)["model"]))


def test_file_that_a_killed_process_left_half_written_is_removed(project: Project) -> None:
    project.run("training.max_steps=3")
    left = project.directory("run") / "checkpoints" / ".step_00000002.pt.tmp"
    left.write_bytes(b"\xff")
    project.run()
    assert not left.exists()
    assert project.json("run", "summary.json")["steps"] == 21


def test_first_run_whose_steps_are_not_resumed_fails_the_smoke_test(project: Project) -> None:
    project.append(
        "core/checkpoint.py",
        "def find_run(*_: Any, **__: Any) -> dict[str, Any]:\n    return {}",
    )
    output = project.run("smoke", code=1)
    assert "smoke test: FAILED" in output and "the second run did not resume after step 2" in output
    assert [path.name for path in (project.folder / ".smoke").iterdir()] == ["log.txt"]


def test_field_marked_as_free_may_change_and_others_not(project: Project) -> None:
    project.edit(
        "model.py",
        "dropout: float = 0.0",
        "dropout: float = field(default=0.0, metadata={'decisive': False})",
    )
    project.edit(
        "model.py", "from dataclasses import dataclass", "from dataclasses import dataclass, field"
    )
    project.run("training.epochs=1")
    project.run("training.epochs=2", "model.dropout=0.1")
    assert project.lines("run")[-1]["step"] == 14
    assert "model.dtype: float32 -> float64" in project.run(
        "training.epochs=3", "model.dtype=float64", code=2
    )


def test_run_goes_on_and_is_evaluated_after_a_field_was_gained_and_another_lost(
    project: Project,
) -> None:
    project.run("training.epochs=1", "model.seconds_per_step=0.001")
    project.edit("model.py", "    seconds_per_step: float = 0.0", "    width: int = 7")
    project.edit("model.py", "config.seconds_per_step if module.training", "0 if module.training")
    project.run("evaluate")
    project.run("training.epochs=2")
    assert project.lines("run")[-1]["step"] == 14
    assert "model.width: 7 -> 8" in project.run("training.epochs=3", "model.width=8", code=2)


def test_evaluate_takes_the_runs_own_config_and_typed_words_on_top(project: Project) -> None:
    project.run(
        "name=wide",
        "training.epochs=1",
        "model.dtype=float64",
        "data.dtype=float64",
        "data.num_validation=21",
    )
    printed = project.run("evaluate", "name=wide", "evaluation.checkpoint=last")
    assert "validation split (21 samples)" in printed and "was trained with another" not in printed
    assert "was trained with another data.num_validation (21 -> 22)" in project.run(
        "evaluate", "name=wide", "data.num_validation=22"
    )
    weights = project.directory("wide") / "model.safetensors"
    loss = float(printed.partition("loss ")[2].partition(",")[0])
    for words in ([], ["device_ids=cpu,cpu"]):
        alone = project.run("evaluate", "name=wide", f"evaluation.checkpoint={weights}", *words)
        assert f"{weights} (step 0), validation split (21 samples): loss {loss:.4f}" in alone
    refused = project.run("evaluate", "name=wide", "model.width=3", code=2)
    assert refused.count("\n") == 1 and "model.width=3: there is no such key" in refused

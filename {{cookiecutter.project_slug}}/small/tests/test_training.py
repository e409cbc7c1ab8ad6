"""Tests of whole runs: equal on any ranks, resumed to the bit, stopped with nothing lost."""

import signal
import sys
import time

import pytest
import torch

from template_package.core.data import epoch_order

from conftest import Project

DOUBLE = ("model.dtype=float64", "data.dtype=float64")
RANDOM = ("model.dropout=0.3", "data.noise=0.1")
PLAIN_LOOP = """
import sys
import torch
sys.path.insert(0, ".")
from template_package.dataset import DataConfig, build_datasets
from template_package.model import ModelConfig, build_model
from template_package.core.data import epoch_order

data = build_datasets(DataConfig(dtype="float64"))[0]
torch.manual_seed(42)
model = build_model(ModelConfig(dtype="float64"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for indices in epoch_order(len(data), 42, epoch).split(16):
        errors = (model(data.inputs[indices]) - data.targets[indices]).square().mean(1)
        errors.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(errors.mean().item())
"""


PLAIN = [
    *DOUBLE,
    "optimizer.name=sgd",
    "optimizer.betas=0,0",
    "optimizer.weight_decay=0",
    "schedule.name=constant",
]


def plain_losses(project: Project) -> list[float]:
    (project.folder / "plain.py").write_text(PLAIN_LOOP, encoding="utf-8")
    process = project.start(command=(sys.executable, "plain.py"))
    losses = [float(line) for line in process.communicate()[0].split()]
    assert len(losses) == 14 and [*epoch_order(3, 42, 0)] != [0, 1, 2]
    return losses


def test_any_ranks_and_micro_batches_train_as_a_plain_loop(project: Project) -> None:
    expected, evaluations = plain_losses(project), []
    for ranks, size in ((1, "auto"), (2, "3"), (3, "auto")):
        devices = f"device_ids={','.join(['cpu'] * ranks)}"
        sizes = (f"training.micro_batch_size={size}", "training.epochs=2")
        project.run(*PLAIN, devices, f"name={ranks}", *sizes)
        # float64, added in another order; a sample too many would show in the third digit.
        assert project.losses(f"{ranks}") == pytest.approx(expected, rel=1e-10)
        evaluations.append(project.lines(f"{ranks}", "validation"))
    for lines in evaluations[1:]:
        for line, first in zip(lines, evaluations[0], strict=True):
            assert line["loss"] == pytest.approx(first["loss"], rel=1e-10)
            assert line["num_samples"] == 37


def test_run_that_moves_to_fsdp_trains_as_a_plain_loop(project: Project) -> None:
    words = (*PLAIN, "device_ids=cpu,cpu")
    project.run(*words, "training.epochs=1")
    words = *words, "training.epochs=2", "strategy=fsdp"
    assert "resuming after step 7 of 14" in project.run(*words)
    assert project.losses("run") == pytest.approx(plain_losses(project), rel=1e-10)


def test_stopped_run_continues_as_if_it_had_not_been_stopped(project: Project) -> None:
    words = [*RANDOM, "device_ids=cpu,cpu", "checkpoint.every_steps=5"]
    words += ["model.seconds_per_step=0.05"]
    project.run(*words, "name=undisturbed")
    slow = project.start(*words, "loader.num_workers=1")  # workers draw the same
    metrics = project.directory("run") / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 2:
        assert slow.poll() is None
        time.sleep(0.01)
    slow.send_signal(signal.SIGTERM)
    output, _ = slow.communicate(timeout=60)
    assert slow.returncode == 143, output
    assert "resuming after step" in project.run(*words)
    for split in ("train", "validation"):
        assert project.lines("run", split) == project.lines("undisturbed", split)
    first, second = project.checkpoint("undisturbed", 21), project.checkpoint("run", 21)
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])


def test_failure_of_one_rank_is_told_once_and_ends_all(project: Project) -> None:
    output = project.run("device_ids=cpu,cpu", "model.fault=raise", code=1)
    assert output.count("Traceback") == 1 and "rank 1 (" in output
    assert "the fault that the test asked for" in output


def test_loss_that_is_computed_past_the_wrapper_is_refused(project: Project) -> None:
    code = """

def compute_loss(model, batch):
    outputs = getattr(model, "module", model)(batch.inputs)
    return (outputs - batch.targets).square().mean(), outputs
"""
    project.append("model.py", code)
    output = project.run("device_ids=cpu,cpu", code=2)
    assert "called model(...) 0 times" in output and "Traceback" not in output


def test_other_settings_under_the_same_name_are_refused(project: Project) -> None:
    project.run("training.epochs=1")
    output = project.run("training.epochs=1", "optimizer.learning_rate=0.1", code=2)
    assert "optimizer.learning_rate: 0.01 -> 0.1" in output and "choose another name" in output
    assert "is complete" in project.run("training.epochs=1")
    output = project.run("evaluate", "evaluation.split=test")
    assert "test split (11 samples)" in output

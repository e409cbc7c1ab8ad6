"""Training on several ranks: the same as one process on the whole batch, whatever the number of ranks and micro-
batches.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from template_package.training.loader import epoch_order

from conftest import Project
from workload import dataset as workload_data
from workload import model as workload_model

DOUBLE = ("model.dtype=float64", "data.dtype=float64")
# Sums of float64 in another order: 60 steps of an MLP stay far within 1e-10, and a wrong weight is off by 1e-3.
TOLERANCE = 1e-10


def reference_run(*, epochs: int, global_batch_size: int, max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of a plain loop over whole global batches in this process; shares only the data's
    order.
    """
    torch.manual_seed(42)
    data = workload_data.Numbers(workload_data.DataConfig(dtype="float64"), 103, 1, 0.0)
    model = workload_model.build_model(workload_model.ModelConfig(dtype="float64"))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    losses = []
    for epoch in range(epochs):
        order = epoch_order(len(data), 42, epoch)
        for start in range(0, len(data), global_batch_size):
            batch = order[start : start + global_batch_size]
            loss = nn.functional.mse_loss(model(data.inputs[batch]), data.targets[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_match_one_process(project: Project, num_ranks: int) -> None:
    # 103 samples in batches of 16 on 3 ranks in micro-batches of 3: nothing divides, and the last step has 7 samples.
    project.run(
        *DOUBLE,
        f"device_ids={','.join(['cpu'] * num_ranks)}",
        "training.micro_batch_size=3",
        "training.max_gradient_norm=0.8",
        "schedule.name=constant",
    )
    losses, weights = reference_run(epochs=3, global_batch_size=16, max_norm=0.8)
    lines = project.lines("run")
    assert len(lines) == len(losses) == 21
    norms = [line["gradient_norm"] for line in lines]
    assert any(norm > 0.8 for norm in norms) and any(norm < 0.8 for norm in norms), "clipping must matter, at times"
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=TOLERANCE)
    trained = project.checkpoint("run", 21)["model"]
    assert trained.keys() == weights.keys() and len(weights) == 6
    for name, weight in weights.items():
        torch.testing.assert_close(trained[name], weight, rtol=TOLERANCE, atol=TOLERANCE)


def test_rank_without_samples_meets_the_same_collectives(project: Project) -> None:
    project.run(
        *DOUBLE,
        "device_ids=cpu,cpu,cpu",
        "training.global_batch_size=2",
        "training.max_steps=60",
        "schedule.name=constant",
    )
    project.run(*DOUBLE, "name=one", "training.global_batch_size=2", "training.max_steps=60", "schedule.name=constant")
    losses = [line["loss"] for line in project.lines("run")]
    assert losses == pytest.approx([line["loss"] for line in project.lines("one")], rel=TOLERANCE)
    assert len(losses) == 60


def test_torchrun_gives_the_same_as_our_own_processes(project: Project) -> None:
    project.run("device_ids=cpu,cpu")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    project.run("name=torchrun", "device_ids=cpu,cpu", command=torchrun)
    assert project.lines("torchrun") == project.lines("run")


def test_loss_that_goes_around_the_model_is_refused(project: Project) -> None:
    output = project.run("device_ids=cpu,cpu", "model.fault=bypass", code=2)
    assert "called model(...) 0 times" in output and "model.module" in output and "Traceback" not in output


def test_parameter_without_gradient_is_named(project: Project) -> None:
    output = project.run("device_ids=cpu,cpu", "model.has_unused_parameter=true", code=2)
    assert "unused got no gradient" in output and "ddp.find_unused_parameters=true" in output
    project.run("device_ids=cpu,cpu", "model.has_unused_parameter=true", "ddp.find_unused_parameters=true")
    assert len(project.lines("run")) == 21


def test_summary_and_epochs_are_counted(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "logging.every_steps=5")
    summary = project.json("run", "summary.json")
    expected: dict[str, Any] = {
        "status": "complete", "steps": 21, "epochs": 3, "world_size": 2, "num_devices": 2, "device_ids": ["cpu", "cpu"],
        "strategy": "ddp", "precision": "fp32", "global_batch_size": 16, "micro_batch_size": 8,
    }  # fmt: skip
    assert summary | expected == summary
    assert summary["startup_seconds"] > summary["train_seconds"] > 0 and len(summary["peak_memory_mib"]) == 2
    assert [line["step"] for line in project.lines("run")] == [5, 7, 10, 14, 15, 20, 21]
    assert [line["epoch"] for line in project.lines("run")] == [1, 1, 2, 2, 3, 3, 3]
    validation = project.lines("run", "validation")
    assert [(line["step"], line["epoch"], line["num_samples"]) for line in validation] == [
        (7, 1, 37),
        (14, 2, 37),
        (21, 3, 37),
    ]
    best = min(validation, key=lambda line: line["loss"])
    assert summary["best"] == {"loss": best["loss"], "step": best["step"]}


def test_two_runs_started_together_both_train(project: Project) -> None:
    processes = [project.start("device_ids=cpu,cpu", f"name=run{number}") for number in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert project.lines("run0") == project.lines("run1")

"""Tests that training split over ranks and micro-batches matches training in one process on whole batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workload import dataset as workload_data
from workload import model as workload_model

from template_package.core.data import epoch_order

from conftest import Project

DOUBLE = ["model.dtype=float64", "data.dtype=float64"]
# 14 steps of AdamW amplify the rounding of reordered sums to this. A wrong weight, order or clipping exceeds 1e-3.
TOLERANCES = {"float64": 1e-10, "float32": 2e-4}
NUM_SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS, MAX_NORM = 103, 16, 2, 0.8


def reference_run(
    dtype: str, *, is_weighted: bool = False, global_batch_size: int = GLOBAL_BATCH_SIZE
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with a plain PyTorch loop that shares only the sample order with the package. Return losses and weights."""
    torch.manual_seed(42)
    lengths: dict[str, Any] = {"min_length": 0, "max_length": 9} if is_weighted else {}
    data = workload_data.Numbers(
        workload_data.DataConfig(dtype=dtype, **lengths), NUM_SAMPLES, 1, 0.0
    )
    model = workload_model.build_model(workload_model.ModelConfig(dtype=dtype))
    matrices = {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01}
    vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, vectors], lr=0.01)
    losses = []
    for epoch in range(EPOCHS):
        order = epoch_order(NUM_SAMPLES, 42, epoch)
        for start in range(0, NUM_SAMPLES, global_batch_size):
            batch = order[start : start + global_batch_size]
            errors = (model(data.inputs[batch]) - data.targets[batch]).square().mean(1)
            loss = (errors * data.lengths[batch]).sum() / data.lengths[batch].sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def assert_matches(
    project: Project, name: str, reference: tuple[list[float], dict[str, Tensor]], tolerance: float
) -> None:
    losses, weights = reference
    lines = project.lines(name)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=tolerance), name
    num_clipped = sum(line["gradient_norm"] > MAX_NORM for line in lines)
    assert len(lines) // 4 < num_clipped < len(lines), "clipping must matter, at times"
    trained = project.checkpoint(name, len(losses))["model"]
    assert trained.keys() == weights.keys() and len(weights) == 6
    for key, weight in weights.items():
        torch.testing.assert_close(trained[key], weight, rtol=tolerance, atol=tolerance)


def settings(num_ranks: int, *words: str) -> list[str]:
    fixed = [
        f"training.epochs={EPOCHS}",
        f"training.max_gradient_norm={MAX_NORM}",
        "schedule.name=constant",
    ]
    return [
        f"device_ids={','.join(['cpu'] * num_ranks)}",
        *fixed,
        "checkpoint.every_epochs=null",
        *words,
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_match_one_process(project: Project, num_ranks: int) -> None:
    # 103 samples in global batches of 16, the last of 7: on 3 ranks nothing divides.
    cases = {
        f"{dtype}-{num_pieces}": settings(
            num_ranks,
            f"model.dtype={dtype}",
            f"data.dtype={dtype}",
            f"training.micro_batch_size={math.ceil(math.ceil(GLOBAL_BATCH_SIZE / num_ranks) / num_pieces)}",
        )
        for dtype in TOLERANCES
        for num_pieces in (1, 2, 4)
    }
    project.run_many(cases)
    references = {dtype: reference_run(dtype) for dtype in TOLERANCES}
    for name in cases:
        dtype = name.partition("-")[0]
        assert_matches(project, name, references[dtype], TOLERANCES[dtype])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loss_weight_gives_the_mean_over_what_it_counts(project: Project, num_ranks: int) -> None:
    project.append(
        "model.py", "def loss_weight(batch: Batch) -> Tensor:\n    return batch.lengths.sum()"
    )
    words = ["model.is_weighted=true", "data.min_length=0", "data.max_length=9"]
    cases = {
        f"{dtype}-{size}": settings(
            num_ranks,
            *words,
            f"model.dtype={dtype}",
            f"data.dtype={dtype}",
            f"training.micro_batch_size={size}",  # of 1: some count nothing at all
            f"evaluation.micro_batch_size={size}",
        )
        for dtype in TOLERANCES
        for size in (1, 2, 16)
    }
    project.run_many(cases)
    references = {dtype: reference_run(dtype, is_weighted=True) for dtype in TOLERANCES}
    for name in cases:
        dtype = name.partition("-")[0]
        assert_matches(project, name, references[dtype], TOLERANCES[dtype])
        whole = project.lines(f"{dtype}-16", "validation")[-1]["loss"]
        assert project.lines(name, "validation")[-1]["loss"] == pytest.approx(
            whole, rel=TOLERANCES[dtype]
        )


def test_rank_without_samples_meets_the_same_collectives(project: Project) -> None:
    project.run(*settings(3, *DOUBLE, "training.global_batch_size=2"))
    assert_matches(
        project, "run", reference_run("float64", global_batch_size=2), TOLERANCES["float64"]
    )


def test_summary_and_epochs_are_counted(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "logging.every_steps=5")
    summary = project.json("run", "summary.json")
    expected: dict[str, Any] = {
        "status": "complete", "steps": 21, "epochs": 3, "world_size": 2, "num_devices": 2, "device_ids": ["cpu", "cpu"],
        "strategy": "ddp", "precision": "fp32", "global_batch_size": 16, "micro_batch_size": 8,
    }  # fmt: skip
    assert summary | expected == summary
    assert (
        summary["startup_seconds"] > summary["train_seconds"] > 0
        and len(summary["peak_memory_mib"]) == 2
    )
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
    environment = project.json("run", "environment.json")
    assert environment["world_size"] == 2 and "torch" in environment["libraries"]
    assert "device_ids=cpu,cpu" in environment["command"] and len(environment["devices"]) == 2

"""Tests of strategy=data_parallel: one process drives several GPUs, and options that copies cannot have are refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from configs import config_of
from torch import nn

from template_package.core.ranks import Rank
from template_package.errors import ConfigError
from template_package.strategies.data_parallel import DataParallelStrategy

from conftest import Project

CPU = torch.device("cpu")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def strategy_on(*devices: torch.device, **options: Any) -> DataParallelStrategy:
    context = Rank(devices=devices)
    return DataParallelStrategy(config_of(**options), context)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("key", ["compile", "activation_checkpointing", "sync_batchnorm"])
def test_what_it_cannot_do_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^training\.{key}=true: .*\. Set .*\.$"):
        strategy_on(CPU, CPU, CPU, **{key: True}).prepare(nn.Linear(2, 2), optimizer)


def test_one_device_is_the_plain_module() -> None:
    model = nn.Linear(2, 2)
    strategy = strategy_on(CPU, micro_batch_size=1)
    strategy.prepare(model, optimizer)
    assert strategy.model is strategy.evaluation_model is model


def test_several_cpus_or_processes_are_refused(project: Project) -> None:
    output = project.run("strategy=data_parallel", "device_ids=cpu,cpu", code=2)
    assert "strategy=data_parallel: drives one CPU" in output
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = project.run("strategy=data_parallel", "device_ids=cpu", command=torchrun, code=1)
    assert "one process drives all devices" in output
    assert not project.directory("run").exists()


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_match_one(project: Project) -> None:
    words = (
        "training.precision=fp32",
        "training.tf32=false",
        "training.epochs=2",
        "training.max_gradient_norm=0.5",
    )
    project.run("name=one", "device_ids=0", *words)
    project.run(
        "name=two",
        "strategy=data_parallel",
        "device_ids=1,0",
        *words,
        "training.micro_batch_size=5",
    )
    one, two = project.lines("one"), project.lines("two")
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=2e-4)
    assert project.lines("two", "validation")[-1]["loss"] == pytest.approx(
        project.lines("one", "validation")[-1]["loss"], rel=2e-4
    )
    summary = project.json("two", "summary.json")
    assert (summary["world_size"], summary["num_devices"], len(summary["peak_memory_mib"])) == (
        1,
        2,
        2,
    )


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_copies_compute_in_the_precision_asked_for(precision: str, dtype: torch.dtype) -> None:
    strategy = strategy_on(torch.device("cuda:0"), torch.device("cuda:1"), precision=precision)
    strategy.prepare(nn.Linear(4, 4), optimizer)
    with strategy.autocast():
        outputs = strategy.model(torch.randn(5, 4, device="cuda:0"))
    assert outputs.dtype == dtype and outputs.device == torch.device("cuda:0") and len(outputs) == 5

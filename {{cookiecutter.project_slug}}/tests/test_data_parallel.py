"""DataParallel: one process, several GPUs; what copies of a model cannot do is refused."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from template_package.config import DdpConfig, TrainingConfig
from template_package.launching.distributed import RankContext
from template_package.strategies.data_parallel import DataParallelStrategy
from template_package.validation import ConfigError

from conftest import Project

CPU = torch.device("cpu")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def strategy_on(*devices: torch.device, **options: Any) -> DataParallelStrategy:
    context = RankContext(device=devices[0], devices=devices)
    return DataParallelStrategy(replace(TrainingConfig(), **options), context, DdpConfig())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("options", [
    {"compile": True}, {"activation_checkpointing": True}, {"sync_batchnorm": True}, {"micro_batch_size": 2},
    {"global_batch_size": 2},
])  # fmt: skip
def test_what_it_cannot_do_is_refused(options: dict[str, Any]) -> None:
    strategy = strategy_on(CPU, CPU, CPU, **options)
    (key,) = options
    with pytest.raises(ConfigError, match=rf"^training\.{key}={str(options[key]).lower()}: .*\. Set .*\.$"):
        strategy.prepare(nn.Linear(2, 2), optimizer)


def test_micro_batches_too_small_for_the_devices_are_refused() -> None:
    for micro_batch_size, is_refused in ((4, True), (5, False), ("auto", False)):  # 3 + 2, or 5
        strategy = strategy_on(CPU, CPU, CPU, global_batch_size=5, micro_batch_size=micro_batch_size)
        with (
            pytest.raises(ConfigError, match="pieces of 2 samples too, for 3 devices") if is_refused else nullcontext()
        ):
            strategy.prepare(nn.Linear(2, 2), optimizer)


def test_evaluation_alone_asks_for_no_sizes_and_one_device_is_the_plain_module() -> None:
    model = nn.Linear(2, 2)
    strategy = strategy_on(CPU, micro_batch_size=1)
    strategy.prepare(model, optimizer)
    assert strategy.model is strategy.evaluation_model is model and strategy.num_devices == 1


def test_several_cpus_nodes_or_processes_are_refused(project: Project) -> None:
    several = project.run("strategy=data_parallel", "device_ids=cpu,cpu", code=2)
    assert "device_ids=[cpu, cpu]: data_parallel drives one CPU or several GPUs" in several
    assert "each named once" in project.run("strategy=data_parallel", "device_ids=0,0", "launch.backend=gloo", code=2)
    words = ("launch.nodes=2", "launch.master_addr=10.0.0.1", "launch.master_port=29500")
    assert "launch.nodes=2: data_parallel is a single process" in project.run("strategy=data_parallel", *words, code=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = project.run("strategy=data_parallel", "device_ids=cpu", command=torchrun, code=1)
    assert "one process drives all devices, and torchrun has started one for each" in output
    assert not project.directory("run").exists()


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_match_one(project: Project) -> None:
    words = ("training.precision=fp32", "training.tf32=false", "training.epochs=2", "training.max_gradient_norm=0.5")
    project.run("name=one", "device_ids=0", *words)
    project.run("name=two", "strategy=data_parallel", "device_ids=1,0", *words, "training.micro_batch_size=5")
    one, two = project.lines("one"), project.lines("two")
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=2e-4)
    assert project.lines("two", "validation")[-1]["loss"] == pytest.approx(
        project.lines("one", "validation")[-1]["loss"], rel=2e-4
    )
    summary = project.json("two", "summary.json")
    assert (summary["world_size"], summary["num_devices"], len(summary["peak_memory_mib"])) == (1, 2, 2)


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_copies_compute_in_the_precision_asked_for(precision: str, dtype: torch.dtype) -> None:
    strategy = strategy_on(torch.device("cuda:0"), torch.device("cuda:1"), precision=precision)
    strategy.prepare(nn.Linear(4, 4), optimizer)
    with strategy.autocast():
        outputs = strategy.model(torch.randn(5, 4, device="cuda:0"))
    assert outputs.dtype == dtype and outputs.device == torch.device("cuda:0") and len(outputs) == 5

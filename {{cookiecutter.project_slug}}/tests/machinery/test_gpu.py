"""Tests that need a GPU (`make test-gpu`). Two ranks with gloo may share one GPU; two ranks with NCCL need two GPUs."""

from __future__ import annotations

import signal
import sys
import time

import pytest
import torch
from test_fsdp import TRANSFORMER

from conftest import Project
from test_resuming import assert_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]
ONE, SHARED = ("device_ids=0",), ("device_ids=[0,0]", "launch.backend=gloo")
BETWEEN_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU: NCCL wants one for each rank")
TWO = pytest.param(("device_ids=[0,1]",), marks=BETWEEN_TWO, id="nccl")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
FP32 = ("training.precision=fp32", "training.tf32=false")


def run(project: Project, *words: str, code: int = 0, command: tuple[str, ...] = (sys.executable,)) -> str:
    """Run run.py in a new process, so that no process of an earlier test holds the GPU."""
    return project.run(*words, code=code, command=command)


def losses(project: Project, name: str) -> list[float]:
    return [line["loss"] for split in ("train", "validation") for line in project.lines(name, split)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "data_parallel"])
@pytest.mark.parametrize("devices", [ONE, SHARED, TWO])
def test_losses_are_those_of_the_cpu(project: Project, strategy: str, devices: tuple[str, ...]) -> None:
    if strategy == "data_parallel" and devices == SHARED:
        devices = ONE
    run(project, "name=cpu", "device_ids=cpu")
    run(project, "name=gpu", f"strategy={strategy}", *devices, *FP32)
    assert losses(project, "gpu") == pytest.approx(losses(project, "cpu"), rel=1e-3)
    run(project, "evaluate", "name=gpu", f"strategy={strategy}", *devices, *FP32)


def test_group_of_nccl_with_one_rank_trains(project: Project) -> None:
    """With ddp or fsdp, one rank makes a process group only if its weights are not on the device that computes."""
    run(project, "name=plain", *ONE, *FP32)
    words = ("device_ids=0", "launch.backend=nccl", "strategy=fsdp", "fsdp.cpu_offload=true")
    run(project, "name=nccl", *words, *FP32, command=TORCHRUN)
    assert losses(project, "nccl") == pytest.approx(losses(project, "plain"), rel=1e-4)


@pytest.mark.parametrize("option", ["training.precision=bf16", "training.precision=fp16", "training.compile=true"])
@pytest.mark.parametrize("devices", [ONE, SHARED, TWO])
def test_options_change_the_losses_by_rounding_alone(project: Project, option: str, devices: tuple[str, ...]) -> None:
    run(project, "name=plain", *ONE, *FP32)
    run(project, "name=option", *devices, option)
    assert losses(project, "option") == pytest.approx(losses(project, "plain"), rel=0.15)  # 21 steps amplify rounding


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("devices", [SHARED, TWO])
def test_resumed_run_equals_uninterrupted_run_to_the_bit(
    project: Project, strategy: str, devices: tuple[str, ...]
) -> None:
    words = (f"strategy={strategy}", *devices, "training.deterministic=true", "checkpoint.every_steps=5")
    run(project, *words)
    project.rewind("run", 10, "resumed")
    assert "resuming after step 10" in run(project, "name=resumed", *words)
    assert project.lines("resumed") == project.lines("run")
    assert_equal(project.checkpoint("resumed", 21), project.checkpoint("run", 21))


def test_checkpoint_moves_between_gpu_and_cpu(project: Project) -> None:
    run(project, *SHARED, "training.epochs=1", *FP32)
    assert "resuming after step 7" in run(project, "device_ids=cpu", "training.epochs=2", *FP32)
    assert "resuming after step 14" in run(project, *ONE, "training.epochs=3", *FP32)


@pytest.mark.parametrize("devices", [ONE, SHARED, TWO])
def test_run_that_is_asked_to_stop_saves_and_continues(project: Project, devices: tuple[str, ...]) -> None:
    words = (*devices, "model.seconds_per_step=0.2")
    process = project.start(*words)
    deadline = time.monotonic() + 120
    metrics = project.directory("run") / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text("utf-8")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "resuming after step" in run(project, *words)


@pytest.mark.parametrize("devices", [SHARED, TWO])
def test_killed_rank_ends_the_run_and_it_continues(project: Project, devices: tuple[str, ...]) -> None:
    assert "killed by SIGKILL" in run(project, *devices, "model.fault=kill", "checkpoint.every_steps=1", code=1)
    assert (project.directory("run") / "checkpoints" / "step_00000002.pt").exists()


def test_memory_that_runs_out_ends_in_smaller_micro_batches(project: Project) -> None:
    code = "torch.empty(2**50, device=outputs.device) if len(outputs) > 4 and outputs.requires_grad else None"
    project.edit("model.py", "    errors = (outputs", f"    {code}\n    errors = (outputs")
    assert "out of memory with micro-batches of 16 samples, trying 8" in run(project, *ONE)


@pytest.mark.parametrize("devices", [SHARED, TWO])
def test_device_side_assert_is_told(project: Project, devices: tuple[str, ...]) -> None:
    code = "torch.zeros(2, device=outputs.device)[torch.tensor([7 * rank()], device=outputs.device)]"
    project.edit("model.py", "    errors = (outputs", f"    {code}\n    errors = (outputs")
    output = run(project, *devices, code=1)
    assert "rank 1 (" in output and "device-side assert" in output


def test_auto_takes_the_gpu(project: Project) -> None:
    assert "-> cuda:0" in run(project, "device_ids=auto:1", "training.max_steps=1")
    assert "cuda:0" in project.json("run", "environment.json")["devices"][0]


def test_reserved_memory_does_not_grow_over_forty_evaluations(project: Project) -> None:
    code = "print('reserved', torch.cuda.memory_reserved()) if not module.training else None"
    project.edit("model.py", "    errors = (outputs", f"    {code}\n    errors = (outputs")
    words = ("evaluation.every_steps=1", "evaluation.every_epochs=null", "training.epochs=6")
    output = run(project, *ONE, *words)
    reserved = [int(line.split()[1]) for line in output.splitlines() if line.startswith("reserved ")]
    assert len(reserved) >= 40 and reserved[-1] == reserved[len(reserved) // 4]


@BETWEEN_TWO
def test_transposed_buffer_is_synchronized(project: Project) -> None:
    line = "    model.config, model"
    project.edit("model.py", line, f"    model.register_buffer('table', torch.rand(3, 2).t())\n{line}")
    run(project, "device_ids=[0,1]")


@BETWEEN_TWO
def test_batchnorm_over_two_ranks_is_that_of_one(project: Project) -> None:
    project.edit("model.py", "nn.Linear(6, 16), nn.Tanh()", "nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()")
    run(project, "name=one", *ONE, *FP32)
    run(project, "name=two", "device_ids=[0,1]", *FP32, "training.sync_batchnorm=true")
    assert losses(project, "two") == pytest.approx(losses(project, "one"), rel=1e-3)


@pytest.mark.parametrize("devices", [SHARED, TWO])
def test_fsdp_in_16_bits_trains_a_model_with_norms_as_ddp_does(project: Project, devices: tuple[str, ...]) -> None:
    project.edit("model.py", "def build_model(", TRANSFORMER.lstrip())
    project.edit("model.py", "model.config, model", "model = Transformer()\n    model.config, model")
    for strategy in ("ddp", "fsdp"):
        run(project, f"name={strategy}", f"strategy={strategy}", *devices, "training.precision=bf16")
    assert losses(project, "fsdp") == pytest.approx(losses(project, "ddp"), rel=0.15)


def test_fused_optimizer_is_used_with_a_worker(project: Project) -> None:
    run(project, *ONE, "loader.num_workers=1", "training.max_steps=2")
    state = project.checkpoint("run", 2)["optimizer"]
    assert all(group["fused"] for group in state["param_groups"])

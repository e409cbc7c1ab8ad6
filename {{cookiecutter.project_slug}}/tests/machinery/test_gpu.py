"""Tests that need a GPU (`make test-gpu`). Two ranks with gloo may share one GPU; two ranks with NCCL need two GPUs.

Those that tell the most come first, and each has a time limit: three times what its runs need on a busy machine.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time

import pynvml
import pytest
import torch
from test_global_batch import CLIP
from transformer import TRANSFORMER

from conftest import Project
from test_resuming import assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
limit = pytest.mark.timeout
ONE, SHARED = ("device_ids=0",), ("device_ids=[0,0]", "launch.backend=gloo")
BETWEEN_TWO = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="one GPU: NCCL wants one for each rank"
)
TWO = pytest.param(("device_ids=[0,1]",), marks=BETWEEN_TWO, id="nccl")
PAIRS = [
    ("ddp", ONE),
    ("ddp", SHARED),
    ("fsdp", SHARED),
    *(pytest.param(strategy, *TWO.values, marks=BETWEEN_TWO) for strategy in ("ddp", "fsdp")),
]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
FP32 = ("training.precision=fp32", "training.tf32=false")


def run(
    project: Project, *words: str, code: int = 0, command: tuple[str, ...] = (sys.executable,)
) -> str:
    """Run run.py in a new process, so that no process of an earlier test holds the GPU."""
    return project.run(*words, code=code, command=command)


def losses(project: Project, name: str) -> list[float]:
    return [
        line["loss"] for split in ("train", "validation") for line in project.lines(name, split)
    ]


def wait_for_steps(project: Project, name: str, number: int = 1) -> None:
    """Wait until the run has logged so many steps."""
    metrics, deadline = project.directory(name) / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < number:
        assert time.monotonic() < deadline, f"{name} has not logged {number} steps"
        time.sleep(0.05)


@limit(60)
def test_auto_takes_the_gpu(project: Project) -> None:
    assert "-> cuda:0" in run(project, "device_ids=auto:1", "training.max_steps=1")
    assert "cuda:0" in project.json("run", "environment.json")["devices"][0]


@limit(180)  # compiling takes half a minute
@pytest.mark.parametrize(
    "option", ["training.precision=bf16", "training.precision=fp16", "training.compile=true"]
)
@pytest.mark.parametrize("devices", [ONE, SHARED, TWO])
def test_options_change_the_losses_by_rounding_alone(
    project: Project, option: str, devices: tuple[str, ...]
) -> None:
    project.run("name=plain", "device_ids=cpu")
    run(project, "name=option", *devices, option)
    # 21 steps amplify rounding
    assert losses(project, "option") == pytest.approx(losses(project, "plain"), rel=0.15)
    assert bool(project.checkpoint("option", 21)["scaler"]) == ("fp16" in option)


@limit(120)
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("ddp", ONE),
        ("ddp", SHARED),
        ("fsdp", SHARED),
        ("data_parallel", ONE),
        *(
            pytest.param(strategy, *TWO.values, marks=BETWEEN_TWO)
            for strategy in ("ddp", "fsdp", "data_parallel")
        ),
    ],
)
def test_losses_are_those_of_the_cpu(
    project: Project, strategy: str, devices: tuple[str, ...]
) -> None:
    project.run("name=cpu", "device_ids=cpu")
    run(project, "name=gpu", f"strategy={strategy}", *devices, *FP32)
    assert losses(project, "gpu") == pytest.approx(losses(project, "cpu"), rel=1e-3)
    run(project, "evaluate", "name=gpu", f"strategy={strategy}", *devices, *FP32)


@limit(90)
def test_group_of_nccl_with_one_rank_trains(project: Project) -> None:
    """With ddp or fsdp, one rank makes a process group only if its weights are not on the device that computes."""
    run(project, "name=plain", *ONE, *FP32)
    words = ("device_ids=0", "launch.backend=nccl", "strategy=fsdp", "fsdp.cpu_offload=true")
    run(project, "name=nccl", *words, *FP32, command=TORCHRUN)
    assert losses(project, "nccl") == pytest.approx(losses(project, "plain"), rel=1e-4)


@limit(90)
@pytest.mark.parametrize(("strategy", "devices"), PAIRS)
def test_resumed_run_equals_uninterrupted_run_to_the_bit(
    project: Project, strategy: str, devices: tuple[str, ...]
) -> None:
    words = (
        f"strategy={strategy}",
        *devices,
        "training.deterministic=true",
        "checkpoint.every_steps=5",
    )
    run(project, *words)
    project.rewind("run", 10, "resumed")
    assert "resuming after step 10" in run(project, "name=resumed", *words)
    assert project.lines("resumed") == project.lines("run")
    assert_equal(project.checkpoint("resumed", 21), project.checkpoint("run", 21))


@limit(90)
@pytest.mark.parametrize("devices", [ONE, SHARED, TWO])
def test_run_that_is_asked_to_stop_saves_and_continues(
    project: Project, devices: tuple[str, ...]
) -> None:
    words = (*devices, "model.seconds_per_step=0.2")
    process = project.start(*words)
    wait_for_steps(project, "run")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "resuming after step" in run(project, *words)


@limit(90)
def test_killed_run_continues(project: Project) -> None:
    words = (*ONE, "model.seconds_per_step=0.2", "checkpoint.every_steps=1")
    process = project.start(*words)
    wait_for_steps(project, "run", number=2)
    process.kill()
    process.communicate(timeout=30)
    assert "resuming after step" in run(project, *words)
    assert len(project.lines("run")) == 21


@limit(60)
@pytest.mark.parametrize("devices", [SHARED, TWO])
def test_killed_rank_ends_the_run_whose_checkpoint_stays(
    project: Project, devices: tuple[str, ...]
) -> None:
    assert "killed by SIGKILL" in run(
        project, *devices, "model.fault=kill", "checkpoint.every_steps=1", code=1
    )
    assert (project.directory("run") / "checkpoints" / "step_00000002.pt").exists()


@limit(60)
def test_memory_that_runs_out_ends_in_smaller_micro_batches(project: Project) -> None:
    code = "torch.empty(2**50, device=outputs.device) if len(outputs) > 4 and outputs.requires_grad else None"
    project.edit("model.py", "    errors = (outputs", f"    {code}\n    errors = (outputs")
    assert "out of memory with micro-batches of 16 samples, trying 8" in run(project, *ONE)


@limit(60)
@pytest.mark.parametrize("devices", [ONE, SHARED, TWO])
def test_device_side_assert_is_told(project: Project, devices: tuple[str, ...]) -> None:
    last = 0 if devices == ONE else 1
    code = f"torch.zeros(2, device=outputs.device)[torch.tensor([7 * (rank() == {last})], device=outputs.device)]"
    project.edit("model.py", "    errors = (outputs", f"    {code}\n    errors = (outputs")
    output = run(project, *devices, code=1)
    assert f"rank {last} (" in output and "device-side assert" in output


@limit(120)
def test_auto_leaves_a_gpu_where_another_run_computes(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    process = project.start(
        "name=other", *ONE, "model.seconds_per_step=0.5", "training.epochs=1000"
    )
    try:
        wait_for_steps(project, "other")
        output = run(project, "device_ids=auto:1", code=2)
        assert "found 0 of 1" in output
        assert "computing on the CPU" in run(
            project, "name=cpu", "device_ids=auto", "training.max_steps=1"
        )
        run(project, "name=named", *ONE, "training.max_steps=1")
    finally:
        process.kill()
        process.communicate()


@limit(60)
def test_auto_leaves_a_gpu_whose_memory_another_process_holds(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    pynvml.nvmlInit()
    free_gib = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free / 2**30
    words = (
        "device_ids=auto:1",
        f"launch.min_free_memory_gib={free_gib - 1:.1f}",
        "training.max_steps=1",
    )
    code = "held = torch.empty(2**31, dtype=torch.uint8, device='cuda'); print(len(held), flush=True); input()"
    command = [sys.executable, "-c", f"import torch; {code}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == f"{2**31}\n"
        assert "launch.min_free_memory_gib" in run(project, *words, code=2)
        holder.communicate("")
    assert "-> cuda:0" in run(project, *words)


@limit(60)
@pytest.mark.parametrize("name", ["adamw", "sgd", "adam"])
def test_fused_optimizer_is_used_with_a_worker(project: Project, name: str) -> None:
    run(project, *ONE, f"optimizer.name={name}", "loader.num_workers=1", "training.max_steps=2")
    state = project.checkpoint("run", 2)["optimizer"]
    assert all(group["fused"] for group in state["param_groups"])


@limit(60)
def test_fp16_skips_steps_whose_gradients_overflow(project: Project) -> None:
    project.edit("model.py", "return loss, outputs", "return loss * 3000, outputs")
    run(project, *ONE, "training.precision=fp16")
    assert project.checkpoint("run", 21)["scaler"]["scale"] < 2**16  # what it begins with
    assert all(map(math.isfinite, losses(project, "run"))) and len(project.lines("run")) == 21


@limit(90)
def test_checkpoint_moves_between_gpu_and_cpu(project: Project) -> None:
    run(project, *SHARED, "training.epochs=1", *FP32)
    assert "resuming after step 7" in run(project, "device_ids=cpu", "training.epochs=2", *FP32)
    assert "resuming after step 14" in run(project, *ONE, "training.epochs=3", *FP32)


@limit(90)
@pytest.mark.parametrize("devices", [SHARED, TWO])
def test_fsdp_in_16_bits_trains_a_model_with_norms_as_ddp_does(
    project: Project, devices: tuple[str, ...]
) -> None:
    project.edit("model.py", "def build_model(", TRANSFORMER.lstrip())
    project.edit(
        "model.py", "model.config, model", "model = Transformer()\n    model.config, model"
    )
    for strategy in ("ddp", "fsdp"):
        run(
            project, f"name={strategy}", f"strategy={strategy}", *devices, "training.precision=bf16"
        )
    assert losses(project, "fsdp") == pytest.approx(losses(project, "ddp"), rel=0.15)


@limit(120)
@pytest.mark.parametrize(("strategy", "devices"), PAIRS)
def test_loss_over_the_global_batch_is_that_of_the_cpu(
    project: Project, strategy: str, devices: tuple[str, ...]
) -> None:
    project.append("model.py", CLIP)
    words = (*FP32, "evaluation.metric=loss", "evaluation.mode=min")
    project.run("name=cpu", "device_ids=cpu", *words)
    run(project, "name=gpu", f"strategy={strategy}", *devices, *words)
    assert losses(project, "gpu") == pytest.approx(losses(project, "cpu"), rel=1e-3)


@limit(90)
def test_reserved_memory_does_not_grow_over_forty_evaluations(project: Project) -> None:
    code = "print('reserved', torch.cuda.memory_reserved()) if not module.training else None"
    project.edit("model.py", "    errors = (outputs", f"    {code}\n    errors = (outputs")
    words = ("evaluation.every_steps=1", "evaluation.every_epochs=null", "training.epochs=6")
    output = run(project, *ONE, *words)
    reserved = [
        int(line.split()[1]) for line in output.splitlines() if line.startswith("reserved ")
    ]
    assert len(reserved) >= 40 and reserved[-1] == reserved[len(reserved) // 4]


@limit(60)
@BETWEEN_TWO
def test_transposed_buffer_is_synchronized(project: Project) -> None:
    line = "    model.config, model"
    project.edit(
        "model.py", line, f"    model.register_buffer('table', torch.rand(3, 2).t())\n{line}"
    )
    run(project, "device_ids=[0,1]")


@limit(90)
@BETWEEN_TWO
def test_batchnorm_over_two_ranks_is_that_of_one(project: Project) -> None:
    project.edit(
        "model.py", "nn.Linear(6, 16), nn.Tanh()", "nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()"
    )
    run(project, "name=one", *ONE, *FP32)
    run(project, "name=two", "device_ids=[0,1]", *FP32, "training.sync_batchnorm=true")
    assert losses(project, "two") == pytest.approx(losses(project, "one"), rel=1e-3)

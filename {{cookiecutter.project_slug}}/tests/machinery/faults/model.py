"""A model for the tests: six weight tensors, and faults that a test can switch on."""

# Tests replace text of this file.
# fmt: off
import ctypes
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .dataset import Batch

if TYPE_CHECKING:
    from torchmetrics import MetricCollection


@dataclass
class ModelConfig:
    dropout: float = 0.0
    dtype: str = "float32"
    is_weighted: bool = False
    """If True, the loss is a mean weighted by the samples' lengths. If False, it is a plain mean over samples."""
    has_unused_parameter: bool = False
    fault: str = "none"
    """The name of a fault in FAULTS or compute_loss. Most faults occur on rank fault_rank in step fault_step alone."""
    fault_rank: int = 1
    fault_step: int = 3
    seconds_per_step: float = 0.0


def build_model(config: ModelConfig) -> nn.Module:
    model: Any = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(config.dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    ).to(getattr(torch, config.dtype))
    if config.has_unused_parameter:
        model.unused = nn.Parameter(torch.zeros(3))
    model.config, model.num_calls = config, 0
    module: nn.Module = model
    return module


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    module: Any = getattr(model, "module", model)
    config = module.config
    module.num_calls += module.training and not is_rehearsal()
    time.sleep(config.seconds_per_step if module.training else seconds_per_evaluation())
    time.sleep(0.06 if (config.fault, rank()) == ("slow", config.fault_rank) else 0)
    inputs = batch.inputs
    outputs = module(inputs) if config.fault == "bypass" else model(inputs)
    if (config.fault, rank()) == ("skip", config.fault_rank):
        outputs = outputs.detach() + module[-1].bias
    is_due = module.training and rank() == config.fault_rank and module.num_calls == config.fault_step
    if config.fault == "skip_later" and is_due:
        outputs = outputs.detach() + module[-1].bias
    errors = (outputs - batch.targets).square().mean(1)
    loss = errors.mean()
    if config.is_weighted:
        loss = (errors * batch.lengths).sum() / batch.lengths.sum().clamp(min=1)
    if module.training and rank() == config.fault_rank:
        is_late = module.num_calls >= config.fault_step
        is_short = config.fault == "memory_probe" or (config.fault == "memory_later" and is_late)
        if is_short and len(outputs) > 2:
            outputs.register_hook(run_out_of_memory)  # in backward, where most memory is needed
        elif is_due:
            FAULTS.get(config.fault, lambda _: None)(module)
    return loss, outputs


def is_rehearsal() -> bool:
    trials = ("rehearse", "check_means")
    return any(frame.f_code.co_name in trials for frame, _ in traceback.walk_stack(None))


def seconds_per_evaluation() -> float:
    """Return the pause in seconds per evaluation batch, from a file, because a resumed run keeps its config."""
    path = Path(__file__).parents[1] / "seconds_per_evaluation"
    return float(path.read_text(encoding="utf-8")) if path.exists() else 0.0


def run_out_of_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("the fault that the test asked for")


def fail(_: nn.Module) -> None:
    raise ArithmeticError("the fault that the test asked for")


def flip_lowest_bit(module: nn.Module) -> None:
    """Flip the lowest bit of the 7th element of the third parameter."""
    parameter = list(module.parameters())[2]
    parameter.data.flatten().view(torch.int32)[6] ^= 1


def kill_once(_: nn.Module) -> None:
    """Kill this process with SIGKILL, but not again after torchrun has restarted it."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def clutch(_: nn.Module) -> None:
    """Hang for an hour in C code that keeps Python's global interpreter lock."""
    print("clutched", flush=True)
    ctypes.PyDLL(None).sleep(3600)


def abort(_: nn.Module) -> None:
    """Write a reason and C++ stacks to stderr and abort, as NCCL's watchdog does."""
    frames = "".join(f"frame #{number}: c10d::ProcessGroupNCCL::run() + 0x{number:x}\n" for number in range(9))
    block = f"Exception raised from run at ProcessGroupNCCL.cpp:2063 (most recent call first):\n{frames}\n"
    os.write(2, f"CUDA error: device-side assert triggered\n{block}{block}".encode())
    os.abort()


FAULTS: dict[str, Any] = {
    "abort": abort,
    "kill_once": kill_once,
    "clutch": clutch,
    "hang": lambda _: time.sleep(3600),
    "freeze": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": fail,
    "exit": lambda _: sys.exit("the user's own end"),
    "exit_0": lambda _: sys.exit(0),
    "exit_75": lambda _: sys.exit(75),
    "exit_143": lambda _: sys.exit(143),
    "vanish": lambda _: os._exit(0),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "flip": flip_lowest_bit,
}


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def build_metrics(config: ModelConfig) -> "MetricCollection":
    from torchmetrics import MeanAbsoluteError, MetricCollection

    return MetricCollection({"absolute_error": MeanAbsoluteError()})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    metrics.update(outputs, batch.targets)

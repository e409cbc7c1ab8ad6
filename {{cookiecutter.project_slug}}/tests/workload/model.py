"""A model for the tests: six tensors, and faults that the tests switch on."""

import os
import signal
import time
from dataclasses import dataclass
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
    has_unused_parameter: bool = False
    fault: str = "none"
    """What compute_loss does wrong, see there."""
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
    if module.training:
        module.num_calls += 1
        time.sleep(module.config.seconds_per_step)
    is_here = rank() == module.config.fault_rank
    if is_here and module.training and module.num_calls == module.config.fault_step + 1:  # the first is the rehearsal
        if module.config.fault == "raise":
            raise ArithmeticError("the fault that the test asked for")
        if module.config.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if module.config.fault == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
    outputs = module(batch.inputs) if module.config.fault == "bypass" else model(batch.inputs)
    return (outputs - batch.targets).square().mean(), outputs


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def build_metrics(config: ModelConfig) -> "MetricCollection":
    from torchmetrics import MeanAbsoluteError, MetricCollection

    return MetricCollection({"absolute_error": MeanAbsoluteError()})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    metrics.update(outputs, batch.targets)

"""A small model for the tests. Its config can make the loss a weighted mean, or make one rank fail."""

# Tests replace text of this file.
# fmt: off
import time
import traceback
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
    is_weighted: bool = False
    """If True, the loss is a mean weighted by the samples' lengths. If False, it is a plain mean over samples."""
    seconds_per_step: float = 0.0
    fault: str = "none"
    """With "raise" and several ranks, the rank `fault_rank` raises an error in step `fault_step`."""
    fault_rank: int = 1
    fault_step: int = 3


def build_model(config: ModelConfig) -> nn.Module:
    model: Any = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(config.dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    ).to(getattr(torch, config.dtype))
    model.config, model.num_calls = config, 0
    module: nn.Module = model
    return module


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    module: Any = getattr(model, "module", model)
    config = module.config
    outputs = model(batch.inputs)
    errors = (outputs - batch.targets).square().mean(1)
    loss = errors.mean()
    if config.is_weighted:
        loss = (errors * batch.lengths).sum() / batch.lengths.sum().clamp(min=1)
    if module.training:
        time.sleep(config.seconds_per_step)
        trials = ("rehearse", "check_means")
        module.num_calls += all(frame.f_code.co_name not in trials for frame, _ in traceback.walk_stack(None))
        is_due = config.fault == "raise" and module.num_calls == config.fault_step
        if is_due and torch.distributed.is_initialized() and torch.distributed.get_rank() == config.fault_rank:
            raise ArithmeticError("the fault that the test asked for")
    return loss, outputs


def build_metrics(config: ModelConfig) -> "MetricCollection":
    from torchmetrics import MeanAbsoluteError, MetricCollection

    return MetricCollection({"absolute_error": MeanAbsoluteError()})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    metrics.update(outputs, batch.targets)

"""Builds the optimizer, and computes the learning rate of each step."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import ConfigError
from .config import OptimizerConfig, ScheduleConfig
from .task import Task

logger = logging.getLogger(__name__)


def choose_optimizer(task: Task, model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build model.py's optimizer, or several, or else the one below."""
    built: Any = (task.build_optimizer or build_optimizer)(model, config)
    optimizer = Optimizers(built) if isinstance(built, list | tuple) else built
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if held - {*model.parameters()}:
        problem = "its optimizer has parameters that the model does not hold, and no checkpoint"
        remedy = "Put the loss's module into the model, and call it in forward()"
        raise ConfigError(f"build_optimizer in model.py: {problem}. {remedy}.")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in held:
            logger.warning("warning: %s never changes: no optimizer has it", name)
    return optimizer


class Optimizers(Optimizer):
    """Makes several optimizers look like one, with all their groups and a single state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # it refuses doubles
        super().__init__([{"params": group["params"]} for group in groups], {})
        self._optimizers, self.param_groups = optimizers, groups
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self._optimizers:
            optimizer.step()


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build AdamW, Adam or SGD. Biases and norms (fewer than two dimensions) get no weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # One kernel for all tensors: a third of a small model's step. None: torch chooses.
    can_fuse = all(p.is_floating_point() and p.device.type != "mps" for p in parameters)
    options: dict[str, Any] = {"lr": config.learning_rate, "fused": can_fuse or None}
    if config.name == "sgd":
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            options["fused"] = None  # torch has no such kernel for sharded tensors
        return torch.optim.SGD(groups, momentum=config.betas[0], **options)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, betas=(config.betas[0], config.betas[1]), **options)


def set_learning_rate(
    optimizer: Optimizer,
    schedule: ScheduleConfig,
    peak: float,
    step: int,
    total_steps: int,
    task: Task,
) -> None:
    """Set each group's rate: this step's part of the peak, times the group's initial rate."""
    rate = learning_rate(schedule, peak, step, total_steps)
    if task.learning_rate is not None:
        rate = peak * float(task.learning_rate(step, total_steps))
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", group["lr"])  # build_optimizer()'s own
        group["lr"] = rate if initial == peak or peak == 0 else rate * initial / peak


def learning_rate(schedule: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step`, counted from 1.

    Linear warm-up reaches `peak` at step `warmup_steps`. Linear and cosine decay reach
    `min_learning_rate` one step after the last.
    """
    warmup, floor = schedule.warmup_steps, schedule.min_learning_rate
    warmup = warmup if warmup >= 1 else round(warmup * total_steps)
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    if schedule.name == "constant":
        return peak
    if schedule.name == "linear":
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))

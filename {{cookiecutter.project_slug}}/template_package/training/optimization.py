"""The optimizer, and its learning rate as a function of the step. Strategies step it and clip gradients."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import model as user_model
from ..config import OptimizerConfig, ScheduleConfig
from ..errors import ConfigError

SET_BY_CONFIG = ("lr", "initial_lr", "weight_decay", "betas", "momentum")  # of a parameter group, by `optimizer:`


def choose_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer from model.py's build_optimizer, if it has one, else from the one below."""
    optimizer = getattr(user_model, "build_optimizer", build_optimizer)(model, config)
    if not isinstance(optimizer, Optimizer):
        rule = "it must return one torch optimizer; its parameter groups may have settings of their own"
        raise ConfigError(f"build_optimizer() in model.py returned a {type(optimizer).__name__}: {rule}.")
    return optimizer


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW, Adam or SGD over the parameters that are trained, with weight decay on matrices and kernels alone.

    Biases and norms (fewer than two dimensions) form a group without decay: pulling them to 0 regularizes nothing.
    Adam's decay is an L2 penalty, AdamW's is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [{**group, "initial_lr": config.learning_rate} for group in groups if group["params"]]
    # One kernel for all tensors instead of several for each: a third of a small model's step.
    has_kernel = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    fused = True if has_kernel else None  # None: torch's own choice among the others
    beta1, beta2 = config.betas
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(beta1, beta2), fused=fused)
        case "adam":
            return torch.optim.Adam(groups, lr=config.learning_rate, betas=(beta1, beta2), fused=fused)
        case "sgd":  # betas[0] is its momentum
            return torch.optim.SGD(groups, lr=config.learning_rate, momentum=beta1, fused=fused)


@contextmanager
def settings_kept(optimizer: Optimizer) -> Iterator[None]:
    """Restore the config's learning rate, decay and momentum after the body has loaded the state of another run."""
    own = [{key: group[key] for key in SET_BY_CONFIG if key in group} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, own, strict=True):
        for key in SET_BY_CONFIG:
            group.pop(key, None)
        group.update(values)


def learning_rate(config: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 1: a resumed run needs no scheduler's state.

    Linear warm-up reaches `peak` at step `warmup_steps`. The next step (step 1 without warm-up) has the peak too, and
    from there the rate falls as torch's schedulers do: the floor would be reached one step after the last.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    floor = config.min_learning_rate
    progress = min(1.0, (step - 1 - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    match config.name:
        case "constant":
            return peak
        case "linear":
            return peak + (floor - peak) * progress
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case "step":  # a milestone is a fraction of the whole run, warm-up included; 0.07 * 100 is above 7, so round
            num_drops = sum(step - 1 >= round(milestone * total_steps, 6) for milestone in config.milestones)
            return max(floor, peak * config.decay_factor**num_drops)


def set_learning_rate(optimizer: Optimizer, value: float, peak: float) -> None:
    """Set every group's rate: `value`, times the ratio of the group's own initial rate to `peak` (the config's).

    So the groups of a user's build_optimizer() may have different rates, and each follows the schedule.
    """
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", group["lr"])  # saved with the optimizer, so it outlives a resume
        group["lr"] = value if initial == peak or peak == 0 else value * initial / peak

"""The optimizer and its learning rate as a function of the step. When to step, and clipping, are the strategy's."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from .. import model as user_model
from ..config import OptimizerConfig, ScheduleConfig
from ..validation import ConfigError


def choose_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """What model.py's build_optimizer gives, if it has one, else the one below."""
    optimizer = getattr(user_model, "build_optimizer", build_optimizer)(model, config)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"build_optimizer() in model.py returned a {type(optimizer).__name__}: it must return one torch optimizer. "
            "Several are not offered; parameter groups of one may have settings of their own."
        )
    return optimizer


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW, Adam or SGD over the parameters that are trained, with weight decay on matrices and kernels alone.

    Biases and norms (fewer than two dimensions) form a group without decay: pulling them to 0 regularizes nothing.
    Adam's decay is an L2 penalty, AdamW's is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": group, "weight_decay": decay, "initial_lr": config.learning_rate}
        for group, decay in ((decayed, config.weight_decay), (others, 0.0))
        if group
    ]
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
    raise AssertionError(f"optimizer.name={config.name} is checked with the config")


CONFIGURED = ("lr", "initial_lr", "weight_decay", "betas", "momentum")
"""What `optimizer:` in the config decides of a group; the rest is the optimizer's own."""


@contextmanager
def configured(optimizer: Optimizer) -> Iterator[None]:
    """In the body a state is loaded, with the groups of the run that has saved it; after it they are the config's."""
    own = [{key: group[key] for key in CONFIGURED if key in group} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, own, strict=True):
        for key in CONFIGURED:
            group.pop(key, None)
        group.update(values)


def learning_rate(config: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 1. Nothing else enters: a resumed run needs no scheduler's state.

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
    raise AssertionError(f"schedule.name={config.name} is checked with the config")


def set_learning_rate(optimizer: Optimizer, value: float, peak: float) -> None:
    """Set every group's rate: `value`, times the ratio of the group's own initial rate to `peak`.

    peak: optimizer.learning_rate of the config. So the groups of a user's build_optimizer() may have different rates,
    and each follows the schedule.
    """
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", group["lr"])  # saved with the optimizer, so it outlives a resume
        group["lr"] = value if initial == peak or peak == 0 else value * initial / peak

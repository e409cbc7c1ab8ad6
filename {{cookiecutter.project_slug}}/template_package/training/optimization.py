"""The optimizer, and its learning rate as a function of the step. Strategies step it and clip gradients."""

import math
from collections.abc import Iterator, Sequence
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
    built = getattr(user_model, "build_optimizer", build_optimizer)(model, config)
    optimizers = built if isinstance(built, list | tuple) else [built]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            rule = "it must return a torch optimizer, or a list of them; parameter groups may have their own settings"
            raise ConfigError(f"build_optimizer() in model.py returned a {type(optimizer).__name__}: {rule}.")
    return optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers)


class Optimizers(Optimizer):
    """Several optimizers that step together, as one with the groups of all. They share one state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # torch refuses a parameter that two of these groups hold.
        super().__init__([{"params": [p for g in o.param_groups for p in g["params"]]} for o in optimizers], {})
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each optimizer."""
        for optimizer in self._optimizers:
            optimizer.step()


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


def learning_rate(config: ScheduleConfig, peak: float, step: int, total_steps: int, num_drops: int = 0) -> float:
    """The rate of optimizer step `step`, counted from 1: a resumed run needs no scheduler's state.

    learning_rate(step, total_steps) of model.py takes the place of `schedule:`: its value times `peak`. num_drops: how
    often the metric has come to a plateau.

    Linear warm-up reaches `peak` at step `warmup_steps`. The next step (step 1 without warm-up) has the peak too, and
    from there the rate falls as torch's schedulers do: the floor would be reached one step after the last.
    """
    if (of_user := getattr(user_model, "learning_rate", None)) is not None:
        return peak * float(of_user(step, total_steps))
    warmup = config.warmup_steps if config.warmup_steps >= 1 else round(config.warmup_steps * total_steps)
    if config.name == "one_cycle":
        return _one_cycle(peak, step - 1, (warmup or 0.3 * total_steps) - 1, total_steps - 1)
    if step <= warmup:
        return peak * step / warmup
    floor = config.min_learning_rate
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
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
        case "plateau":
            return max(floor, peak * config.decay_factor**num_drops)


def _one_cycle(peak: float, index: int, peak_index: float, last_index: int) -> float:
    """From a 25th of `peak` up to it and down to nearly 0: torch's OneCycleLR (Smith and Topin, arXiv:1708.07120)."""
    if index <= peak_index:
        start, end, progress = peak / 25, peak, index / max(peak_index, 1e-9)
    else:
        start, end, progress = peak, peak / 25e4, (index - peak_index) / max(last_index - peak_index, 1e-9)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_learning_rate(optimizer: Optimizer, value: float, peak: float) -> None:
    """Set every group's rate: `value`, times the ratio of the group's own initial rate to `peak` (the config's).

    So the groups of a user's build_optimizer() may have different rates, and each follows the schedule.
    """
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", group["lr"])  # saved with the optimizer, so it outlives a resume
        group["lr"] = value if initial == peak or peak == 0 else value * initial / peak

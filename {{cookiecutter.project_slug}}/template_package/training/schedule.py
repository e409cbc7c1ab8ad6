"""Computes the learning rate as a function of the step."""

import math
from collections.abc import Callable

from torch.optim import Optimizer

from ..config import ScheduleConfig


def learning_rate(
    config: ScheduleConfig, peak: float, step: int, total_steps: int, num_drops: int = 0,
    factor: Callable[[int, int], float] | None = None,
) -> float:  # fmt: skip
    """Return the learning rate of optimizer step `step`, counted from 1.

    If there is a `factor`, learning_rate(step, total_steps) of model.py, return its value times `peak`.
    Otherwise, linear warm-up reaches `peak` at step `warmup_steps`, and linear or cosine decay reaches
    `min_learning_rate` one step after the last step. one_cycle follows torch's OneCycleLR instead.
    """
    if factor is not None:
        return peak * float(factor(step, total_steps))
    warmup = (
        config.warmup_steps
        if config.warmup_steps >= 1
        else round(config.warmup_steps * total_steps)
    )
    # torch's OneCycleLR (arXiv:1708.07120): from a 25th of `peak` to nearly 0
    if config.name == "one_cycle":
        top, last = (warmup or 0.3 * total_steps) - 1, total_steps - 1  # counted from 0
        if step - 1 <= top:
            return _cosine(peak / 25, peak, (step - 1) / max(top, 1e-9))
        return _cosine(peak, peak / 25e4, (step - 1 - top) / max(last - top, 1e-9))
    if step <= warmup:
        return peak * step / warmup
    floor = config.min_learning_rate
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    # a milestone is a fraction of the whole run, warm-up included; 0.07 * 100 > 7, so round
    if config.name == "step":
        num_drops = sum(
            step - 1 >= round(milestone * total_steps, 6) for milestone in config.milestones
        )
    match config.name:
        case "constant":
            return peak
        case "linear":
            return peak + (floor - peak) * progress
        case "cosine":
            return _cosine(peak, floor, progress)
        case "step" | "plateau":
            return max(floor, peak * config.decay_factor**num_drops)


def _cosine(start: float, end: float, progress: float) -> float:
    """Interpolate along half a cosine wave, from `start` at progress 0 to `end` at progress 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_learning_rate(optimizer: Optimizer, value: float, peak: float) -> None:
    """Set each group's learning rate to `value / peak` (this step's fraction of the peak) times its initial rate."""
    for group in optimizer.param_groups:
        # the one of build_optimizer(), also after a resume
        initial = group.setdefault("initial_lr", group["lr"])
        group["lr"] = value if initial == peak or peak == 0 else value * initial / peak

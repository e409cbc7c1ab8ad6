"""The schedules that size=full adds to those of core/optimizer.py: one_cycle, step and plateau."""

import math
from collections.abc import Callable

from ..config import ScheduleConfig
from ..core import optimizer
from ..core.optimizer import warmup_of


def learning_rate(
    config: ScheduleConfig, peak: float, step: int, total_steps: int, num_drops: int = 0,
    factor: Callable[[int, int], float] | None = None,
) -> float:  # fmt: skip
    """Return the learning rate of optimizer step `step`, counted from 1. one_cycle follows torch's OneCycleLR."""
    warmup = warmup_of(config, total_steps)
    # torch's OneCycleLR (arXiv:1708.07120): from a 25th of `peak` to nearly 0
    if factor is None and config.name == "one_cycle":
        top, last = (warmup or 0.3 * total_steps) - 1, total_steps - 1  # counted from 0
        if step - 1 <= top:
            return _cosine(peak / 25, peak, (step - 1) / max(top, 1e-9))
        return _cosine(peak, peak / 25e4, (step - 1 - top) / max(last - top, 1e-9))
    # a milestone is a fraction of the whole run, warm-up included; 0.07 * 100 > 7, so round
    if config.name == "step":
        num_drops = sum(
            step - 1 >= round(milestone * total_steps, 6) for milestone in config.milestones
        )
    if factor is None and config.name in ("step", "plateau") and step > warmup:
        return max(config.min_learning_rate, peak * config.decay_factor**num_drops)
    return optimizer.learning_rate(config, peak, step, total_steps, factor)


def _cosine(start: float, end: float, progress: float) -> float:
    """Interpolate along half a cosine wave, from `start` at progress 0 to `end` at progress 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

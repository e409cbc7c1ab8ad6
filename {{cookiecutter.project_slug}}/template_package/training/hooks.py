"""Calls the optional functions of model.py for the trainer."""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from ..core.random_states import seed_alike
from ..core.task import Task
from ..errors import ConfigError
from ..strategies.base import Strategy
from .media import Log

logger = logging.getLogger(__name__)


def check_before_step(task: Task, strategy: Strategy) -> None:
    """Raise ConfigError if model.py has a before_step(), and the strategy shows no averaged gradients."""
    if task.before_step is not None and not strategy.has_gradients:
        remedy = "Take it out, or set strategy=ddp"
        raise ConfigError(f"before_step in model.py: this strategy shows no gradients. {remedy}.")


def call_on_epoch_begin(task: Task, strategy: Strategy, seed: int, epochs: Iterable[int]) -> None:
    """Call on_epoch_begin(model, epoch) in model.py, where all ranks draw alike."""
    for epoch in epochs:
        seed_alike(seed, -1 - epoch)
        task.on_epoch_begin(strategy.module, epoch)
    # It may put BatchNorm layers in eval mode: from then on, forwards read their statistics.
    strategy.synchronize_buffers()


def call_before_step(task: Task, strategy: Strategy, seed: int, step: int, tracking: Any) -> None:
    """Call before_step(model, step, log) in model.py, where all ranks draw alike."""
    if task.before_step is not None:
        seed_alike(seed, 2 * step)
        with torch.no_grad():
            task.before_step(strategy.evaluation_model, step, Log(tracking, step))


def call_after_step(task: Task, strategy: Strategy, seed: int, step: int, tracking: Any) -> None:
    """Call after_step(model, step, log) in model.py, if defined, where all ranks draw alike."""
    if task.after_step is not None:
        seed_alike(seed, 2 * step + 1)
        with torch.no_grad(), strategy.autocast():
            task.after_step(strategy.evaluation_model, step, Log(tracking, step))

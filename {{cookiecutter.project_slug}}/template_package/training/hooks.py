"""Calls the optional functions of model.py for the trainer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.random_states import derive_seed, generators_restored, seed_generators
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


@contextmanager
def drawing_for(strategy: Strategy, seed: int, step: int) -> Iterator[None]:
    """Inside, all ranks draw alike, in each step anew. What a rank draws elsewhere is as without it."""
    with generators_restored(*strategy.rank.devices):
        seed_generators(derive_seed(seed, -(2**20), step))
        yield


def call_before_step(task: Task, strategy: Strategy, seed: int, step: int, tracking: Any) -> None:
    """Call before_step(model, step, log) in model.py. Then reset random generators to their old states."""
    if task.before_step is not None:
        with torch.no_grad(), drawing_for(strategy, seed, step):
            task.before_step(strategy.evaluation_model, step, Log(tracking, step))


def call_after_step(task: Task, strategy: Strategy, seed: int, step: int, tracking: Any) -> None:
    """Call after_step(model, step, log) in model.py, if defined. Then reset random generators to their old states."""
    if task.after_step is not None:
        with torch.no_grad(), drawing_for(strategy, seed, step), strategy.autocast():
            task.after_step(strategy.evaluation_model, step, Log(tracking, step))

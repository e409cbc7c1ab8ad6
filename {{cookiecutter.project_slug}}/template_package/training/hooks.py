"""Calls the optional functions of model.py for the trainer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.random_states import derive_seed, generators_restored, seed_generators
from ..core.task import Task
from ..errors import ConfigError
from ..strategies.base import Strategy

logger = logging.getLogger(__name__)


def total_of(loss: Any) -> Any:
    """Return the loss to train: `loss` itself or, if compute_loss returns a dict of terms, their sum."""
    return torch.stack([*loss.values()]).sum() if isinstance(loss, dict) and loss else loss


@torch.no_grad()
def figures_of(task: Task, loss: Any, outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Return the loss, its terms and the means of training_metrics() by name, as detached 0-dim tensors."""
    means = task.training_metrics(outputs, batch) if task.training_metrics else {}
    total, terms = total_of(loss), loss if isinstance(loss, dict) else {}
    figures = {"loss": total, **terms, **means}
    # sorted: ranks add them up by their places
    return {name: figures[name].detach().to(total.device) for name in sorted(figures)}


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
            task.before_step(strategy.evaluation_model, step, tracking.log(step))


def call_after_step(task: Task, strategy: Strategy, seed: int, step: int, tracking: Any) -> None:
    """Call after_step(model, step, log) in model.py, if defined. Then reset random generators to their old states."""
    if task.after_step is not None:
        with torch.no_grad(), drawing_for(strategy, seed, step), strategy.autocast():
            task.after_step(strategy.evaluation_model, step, tracking.log(step))


@torch.no_grad()
def call_on_evaluation_end(task: Task, strategy: Strategy, log: Any) -> None:
    """Call on_evaluation_end(model, log) in model.py, if defined. If the call fails, log a warning and continue."""
    if task.on_evaluation_end is not None:
        with (
            generators_restored(*strategy.rank.devices),
            strategy.gathered(),
            strategy.autocast(),
        ):
            try:
                task.on_evaluation_end(strategy.evaluation_model, log)
            except Exception:
                logger.warning(
                    "warning: on_evaluation_end() of model.py failed; the run goes on",
                    exc_info=True,
                )

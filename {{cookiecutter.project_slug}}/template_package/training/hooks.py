"""Calls the optional functions in model.py for the trainer, and warns if a function's name looks misspelt."""

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from .. import dataset as user_data
from .. import model as user_model
from ..data.loader import generators_restored, inner
from ..errors import ConfigError
from ..strategies.base import Strategy

FUNCTIONS = """build_model compute_loss build_metrics update_metrics build_optimizer loss_weight predict
    training_metrics evaluate_batch learning_rate on_epoch_begin on_evaluation_end after_step complete_config
    build_datasets collate read_inputs sample_lengths sample_weights label_names""".split()
RESERVED = {"split", "step", "epoch", "loss", "learning_rate", "samples_per_second", "gradient_norm", "num_samples"}
logger = logging.getLogger(__name__)
_names: set[str] = set()  # the names that the first call of training_metrics() returned


def figures_of(loss: Tensor, outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Return the loss and any metrics from training_metrics() in model.py, by name, as detached 0-dim tensors."""
    figures = {"loss": loss.detach()}
    if (training_metrics := getattr(user_model, "training_metrics", None)) is not None:
        with torch.no_grad():
            means = training_metrics(outputs, batch)
        is_right = isinstance(means, Mapping) and all(isinstance(v, Tensor) and v.dim() == 0 for v in means.values())
        if not is_right or RESERVED & means.keys() or (_names and means.keys() != _names):
            rule = f"a dict of 0-dim tensors with the same names each time, none of them {', '.join(sorted(RESERVED))}"
            raise ConfigError(f"training_metrics() in model.py: it must return {rule}.")
        _names.update(means)
        figures |= {name: value.detach().to(loss.device) for name, value in means.items()}
    return figures


def call_on_epoch_begin(model: nn.Module, epochs: range) -> bool:
    """Call on_epoch_begin() in model.py for each of `epochs`. Return True if a parameter's requires_grad changed."""
    on_epoch_begin = getattr(user_model, "on_epoch_begin", lambda *_: None)
    former = [parameter.requires_grad for parameter in model.parameters()]
    for epoch in epochs:
        on_epoch_begin(model, epoch)
    return former != [parameter.requires_grad for parameter in model.parameters()]


def call_after_step(strategy: Strategy, step: int, tracking: Any) -> None:
    """Call after_step(model, step, log) in model.py, if defined. Then reset random generators to their old states."""
    if (after_step := getattr(user_model, "after_step", None)) is not None:
        with torch.no_grad(), generators_restored(*strategy.context.devices), strategy.autocast():
            after_step(strategy.evaluation_model, step, tracking.log(step))


@torch.no_grad()
def call_on_evaluation_end(strategy: Strategy, log: Any) -> None:
    """Call on_evaluation_end(model, log) in model.py, if defined. If the call fails, log a warning and continue."""
    if (on_evaluation_end := getattr(user_model, "on_evaluation_end", None)) is not None:
        with generators_restored(*strategy.context.devices), strategy.gathered(), strategy.autocast():
            try:
                on_evaluation_end(strategy.evaluation_model, log)
            except Exception:
                logger.warning("warning: on_evaluation_end() of model.py failed; the run goes on", exc_info=True)


def tell_of_names(*datasets: Any) -> None:
    """Warn if the user's files misspell a name that FUNCTIONS lists."""
    places = [user_model, user_data, *(place for dataset in datasets for place in (dataset, *inner(dataset)))]
    names = dict.fromkeys(name for place in places for name in getattr(place, "__dict__", ()))
    for name in names:
        close = get_close_matches(name, FUNCTIONS, n=1, cutoff=0.8)
        if close and close[0] not in names:
            logger.warning("warning: the trainer does not use %s. Did you mean %s?", name, close[0])

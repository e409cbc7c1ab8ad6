"""One forward and backward pass before the first step, whose gradients count for nothing.

It finds what would go wrong later (a loss that goes around the strategy's model, parameters without a gradient), and
it lets DDP settle its buckets: DDP orders them anew after its first backward, and from three ranks up the sums of
another order differ in the last bit, so a resumed run would differ from an uninterrupted one.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import model as user_model
from ..launching.distributed import RankContext
from ..strategies.base import Strategy
from ..validation import ConfigError
from .checksum import plain
from .fetching import MicroBatch
from .random_state import get_random_states, set_random_states
from .workers import samples_named


def rehearse(strategy: Strategy, micro_batch: MicroBatch, context: RankContext) -> None:
    """Run one pass on `micro_batch` with weight 0; random states and buffers are as before afterwards.

    ConfigError if compute_loss does not call the model it is given exactly once, or the strategy needs gradients that
    are not there.
    """
    _check_state(dict(strategy.module.state_dict()))  # before a step is made that could not be saved
    random_states = get_random_states(*context.devices)
    buffers = {name: buffer.clone() for name, buffer in strategy.module.named_buffers()}
    num_calls = 0

    def count_call(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    hook = strategy.model.register_forward_pre_hook(count_call)
    with strategy.accumulate(is_last_micro_batch=True):
        with strategy.autocast(), samples_named(micro_batch.request.indices):
            loss, _ = user_model.compute_loss(strategy.model, micro_batch.batch)
        _check_loss(loss, num_calls)
        strategy.backward(loss, 0.0)
    hook.remove()
    strategy.check_gradients()
    strategy.optimizer.zero_grad()
    with torch.no_grad():
        for name, buffer in strategy.module.named_buffers():
            buffer.copy_(buffers[name])
    set_random_states(random_states, *context.devices)


def _check_state(state: dict[str, Any]) -> None:
    plain(state, "model")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"model: its state_dict() holds {name}, a {type(value).__name__}: it must hold tensors alone. Register "
                "a tensor as a buffer in place of get_extra_state()."
            )


def _check_loss(loss: torch.Tensor, num_calls: int) -> None:
    if num_calls != 1:
        raise ConfigError(
            f"compute_loss in model.py called model(...) {num_calls} times: it must call it exactly once, "
            "since gradients are shared by what is around the model. Call model(inputs), not model.module(inputs) or "
            "a part of the model."
        )
    if loss.dim() != 0 or not loss.requires_grad:
        raise ConfigError(
            f"compute_loss in model.py returned a loss of shape {tuple(loss.shape)}, requires_grad="
            f"{loss.requires_grad}: it must be a scalar that depends on the parameters. Return the mean over the "
            "micro-batch, not detached."
        )

"""Keeps an exponential moving average (EMA) of the weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.strategies import receive
from ..strategies.base import Strategy

logger = logging.getLogger(__name__)


class WeightAverage:
    """Keeps an exponential moving average of the weights, as torch.optim.swa_utils does. Buffers are not averaged.

    The average of 16-bit weights is in fp32, also in checkpoints: in 16 bits it would not move.
    """

    def __init__(self, strategy: Strategy, decay: float, total_steps: int) -> None:
        if (share := decay**total_steps) > 0.01:
            message = "warning: with training.ema_decay=%g, %d steps leave %.0f%% of the first weights in the average"
            logger.warning(message, decay, total_steps, 100 * share)
        self._strategy = strategy
        self._weights = strategy.local_weights()  # they share memory with the model
        module, fp32 = strategy.module, torch.float32
        averages = {
            p: p.detach().to(torch.promote_types(p.dtype, fp32), copy=True)
            for p in module.parameters()
        }
        self._average = [a.to_local() if isinstance(a, DTensor) else a for a in averages.values()]
        names = module.named_parameters(remove_duplicate=False)
        # than the weights
        self._wider = {name: averages[p] for name, p in names if averages[p].dtype != p.dtype}
        self._decay, self._is_loaded = decay, False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averaged weights after step `step`. Step 1 copies the weights, unless an average was loaded."""
        weights = [
            weight.to(average.dtype)
            for weight, average in zip(self._weights, self._average, strict=True)
        ]
        torch._foreach_lerp_(
            self._average, weights, 1 - self._decay if step > 1 or self._is_loaded else 1.0
        )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside this context, the model has the averaged weights."""
        averages = [
            average.to(weight.dtype)
            for weight, average in zip(self._weights, self._average, strict=True)
        ]
        self._swap(averages)
        try:
            yield
        finally:
            self._swap(averages)

    def get_weights(self) -> dict[str, Any]:
        """Return the averaged model's state dict on the CPU. All ranks must call this. Only rank 0 gets all weights."""
        with self.swapped_in():  # on the CPU the state dict shares memory with the model
            weights = {
                name: None if weight is None else weight.clone()
                for name, weight in self._strategy.get_weights().items()
            }
        for name, average in self._wider.items():
            weights[name] = self._strategy.collect(average, self._strategy.rank)
        return weights

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        self._is_loaded = True
        with self.swapped_in():
            self._strategy.set_weights(weights)
        for name, average in self._wider.items():
            average.copy_(receive(weights[name], self._strategy.rank, average))

    @torch.no_grad()
    def _swap(self, averages: list[Tensor]) -> None:
        self._strategy.drop_gathered()
        # one by one: no third copy of all
        for weight, average in zip(self._weights, averages, strict=True):
            former = weight.clone()
            weight.copy_(average)
            average.copy_(former)

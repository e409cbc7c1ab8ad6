"""An average of the weights over the steps, which evaluation and export use in place of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..strategies.base import Strategy


class WeightAverage:
    """The exponential moving average that torch.optim.swa_utils defines. A rank averages the parts that it holds.

    Buffers, such as BatchNorm's statistics, are the model's own.
    """

    def __init__(self, strategy: Strategy, decay: float) -> None:
        self._strategy = strategy
        self._weights = strategy.local_weights()  # they share memory with the model
        self._average = [weight.clone() for weight in self._weights]
        self._average_fn = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.is_begun = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of one step more. The first ones are the average."""
        if self.is_begun:
            self._average_fn(self._average, self._weights, 0)
        else:
            torch._foreach_copy_(self._average, self._weights)
        self.is_begun = True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside this context the model has the averaged weights."""
        if not self.is_begun:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def get_weights(self) -> dict[str, Tensor]:
        """The state dict of the averaged model on the CPU; all ranks call it, rank 0's is whole."""
        with self.in_place():  # on the CPU the state dict shares memory with the model
            return {name: weight.clone() for name, weight in self._strategy.get_weights().items()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Load such a state dict, which rank 0 has."""
        self.is_begun = True
        with self.in_place():
            self._strategy.set_weights(weights)

    @torch.no_grad()
    def _swap(self) -> None:
        self._strategy.drop_gathered()
        for weight, average in zip(self._weights, self._average, strict=True):  # one by one: no third copy of all
            former = weight.clone()
            weight.copy_(average)
            average.copy_(former)

"""Orders of an epoch's samples besides the shuffled one: drawn by weight, in batches of like lengths, or very long."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.data import Order, epoch_order, numbers_of
from ..core.random_states import derive_seed
from ..errors import ConfigError

WINDOW = 50  # global batches whose samples are sorted together, where samples have lengths
LONG = 10_000_000  # from this many samples on, an epoch's order is computed piece by piece


def find_order(dataset: Any, seed: int, global_batch_size: int) -> Order | None:
    """Return the order that the data set's length, `sample_weights` or `sample_lengths` ask for; None: the usual."""
    num_samples = len(dataset)
    weights, lengths = numbers_of(dataset, "sample_weights"), numbers_of(dataset, "sample_lengths")
    if (
        weights is not None
        and num_samples
        and not (weights.min() >= 0 and 0 < weights.sum() < math.inf)
    ):
        raise ConfigError(
            "sample_weights of the training set: must be finite, from 0, and not all 0."
        )
    if weights is None and lengths is None:
        return partial(LongOrder, num_samples, seed) if num_samples >= LONG else None

    def order(epoch: int) -> Tensor:
        draws = (
            epoch_order(num_samples, seed, epoch)
            if weights is None
            else weighted_order(weights, seed, epoch)
        )
        return (
            draws
            if lengths is None
            else bucket_by_length(draws, lengths, global_batch_size, seed, epoch)
        )

    return order


def weighted_order(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """Draw indices with replacement, in proportion to their weights, and add i * num_samples to draw i."""
    num_samples = len(weights)
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -1))
    bounds = weights.cumsum(0)  # torch.multinomial() stops at 2**24 samples
    points = torch.rand(num_samples, generator=generator, dtype=torch.float64) * bounds[-1]
    return torch.searchsorted(bounds, points, right=True) + num_samples * torch.arange(num_samples)


class LongOrder:
    """An epoch's shuffled order that is computed where it is sliced."""

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self._num_samples, self._seed = num_samples, derive_seed(seed, epoch, -1)

    def __getitem__(self, part: slice) -> Tensor:
        return long_order(torch.arange(part.start, part.stop), self._num_samples, self._seed)


def long_order(positions: Tensor, num_samples: int, seed: int) -> Tensor:
    """Return the entries of a shuffled range(num_samples) at these positions, without computing any other entry.

    `positions` and the result are int64 tensors of shape (n,). A Feistel network of six rounds permutes the numbers
    below a power of 4. A result of num_samples or more is permuted again until it is smaller (cycle walking).
    """
    half = max(1, ((num_samples - 1).bit_length() + 1) // 2)  # bits
    left, right = positions >> half, positions & (1 << half) - 1
    for number in range(6):
        mixed = (right ^ derive_seed(seed, number, 0)) * 0x2545F4914F6CDD1D  # wraps around
        mixed = (mixed ^ mixed >> 32) * 0x369DEA0F31A53F85
        left, right = right, left ^ (mixed >> 32 & (1 << half) - 1)
    found = left << half | right
    if len(beyond := (found >= num_samples).nonzero().flatten()):
        found[beyond] = long_order(found[beyond], num_samples, seed)
    return found


def bucket_by_length(order: Tensor, lengths: Tensor, size: int, seed: int, epoch: int) -> Tensor:
    """Reorder an epoch's indices so that samples of similar lengths share a global batch, which saves padding.

    In each group of WINDOW global batches (`size` samples each), samples are sorted by length and batched again. Then
    all the epoch's batches are shuffled. If the last batch has fewer samples, it stays at the end, unsorted.
    """
    whole, last = order.tensor_split([len(order) // size * size])
    windows = torch.split(whole, WINDOW * min(size, len(order)))
    # With sample_weights, each index is larger by a multiple of num_samples: see weighted_order().
    batches = torch.cat(
        [window[lengths[window % len(lengths)].argsort(stable=True)] for window in windows]
    )
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -2))
    shuffled = torch.randperm(len(whole) // size, generator=generator)
    return torch.cat([batches.view(-1, size)[shuffled].flatten(), last])

"""Who gets which samples: the epoch's order, its global batches, each rank's share, and the micro-batches of a share.

All of it is arithmetic on (seed, epoch, position), so a run resumes in the middle of an epoch without replaying
anything, on any number of ranks. Reading, collating and copying to the device is left to fetching.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset

from ..config import LoaderConfig
from ..launching.distributed import RankContext, broadcast_object, gather_objects
from ..validation import ConfigError
from .fetching import Collate, Fetcher, MicroBatch, Request, read_batches
from .random_state import cpu_generators_put_back, mix

BLOCK = 65_536
"""Indices of the epoch's order that are turned from a tensor into Python numbers at a time."""
WINDOW = 50
"""Global batches whose samples are sorted together, where samples have lengths."""


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """(num_samples,) int64: the shuffled order of one epoch, the same on every rank."""
    generator = torch.Generator().manual_seed(mix(seed, epoch, -1))
    return torch.randperm(num_samples, generator=generator)


def bucket_by_length(order: Tensor, lengths: Tensor, size: int, seed: int, epoch: int) -> Tensor:
    """`order` with samples of like length in each global batch of `size`, so that little is padded.

    Every WINDOW batches of the order are sorted by length and cut anew, then the epoch's batches are shuffled. The
    last, shorter one stays as and where it is.
    """
    whole, last = order.tensor_split([len(order) // size * size])
    windows = torch.split(whole, WINDOW * min(size, len(order)))
    batches = torch.cat([window[lengths[window].argsort(stable=True)] for window in windows])
    generator = torch.Generator().manual_seed(mix(seed, epoch, -2))
    places = torch.randperm(len(whole) // size, generator=generator)
    return torch.cat([batches.view(-1, size)[places].flatten(), last])


def split_evenly(num_samples: int, num_parts: int, part: int) -> tuple[int, int]:
    """Start and stop of one of `num_parts` contiguous parts whose sizes differ by at most one."""
    return num_samples * part // num_parts, num_samples * (part + 1) // num_parts


def cut(indices: list[int], num_pieces: int) -> list[list[int]]:
    """`indices` in so many pieces, whose sizes differ by at most one."""
    bounds = [split_evenly(len(indices), num_pieces, piece) for piece in range(num_pieces)]
    return [indices[start:stop] for start, stop in bounds]


class TrainLoader:
    """This rank's micro-batches, step by step, from any position on and without end."""

    def __init__(
        self,
        dataset: Dataset[Any],
        config: LoaderConfig,
        context: RankContext,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int | str,
        collate: Collate | None = None,
    ) -> None:
        self.num_samples = check_dataset(dataset, "training")
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = -(-self.num_samples // global_batch_size)
        largest_share = -(-min(global_batch_size, self.num_samples) // context.world_size)
        self.micro_batch_size = (
            largest_share if micro_batch_size == "auto" else min(int(micro_batch_size), largest_share)
        )
        self._context, self._config, self._seed = context, config, seed
        self._lengths = lengths_of(dataset)
        self._fetcher = Fetcher(dataset, collate, seed)
        self._batches: Iterator[MicroBatch] = iter(())
        self._steps_before = 0
        """What the run's steps are more than their place tells: its first ones may have been on fewer samples."""
        self.seconds_waited = 0.0
        """Spent in reading, or in waiting for the workers that read."""

    def start(self, epoch: int, position: int, steps_done: int = 0) -> None:
        """The next step, after `steps_done`, begins `position` samples into `epoch` (epochs counted from 0)."""
        self.close()
        self._steps_before = steps_done - epoch * self.steps_per_epoch - position // self.global_batch_size
        self._batches = read_batches(self._fetcher, self._requests(epoch, position), self._config, self._context)

    def next_step(self) -> Iterator[MicroBatch]:
        """The micro-batches of this rank's share of the next global batch."""
        asked_at = time.perf_counter()
        for micro_batch in self._batches:
            self.seconds_waited += time.perf_counter() - asked_at
            yield micro_batch
            if micro_batch.request.is_last:
                return
            asked_at = time.perf_counter()

    def indices_of_step(self, step: int) -> tuple[list[int], list[int]]:
        """The samples of this rank's share of one step, counted from 1; those of them that hold a NaN or infinity.

        They are read again for that, here.
        """
        epoch, place = divmod(step - 1 - self._steps_before, self.steps_per_epoch)
        requests = self._requests_of_step(epoch, place * self.global_batch_size)
        indices = [index for request in requests for index in request.indices]
        return indices, [index for index in indices if holds_non_finite(self._fetcher, epoch, index)]

    def read_first(self, epoch: int, position: int) -> MicroBatch:
        """The largest micro-batch of this rank's next step, for a rehearsal; what steps will read is not touched."""
        request = max(self._requests_of_step(epoch, position), key=lambda request: len(request.indices))
        # By a worker, if there are any: a file that the data set opens here would be shared by those forked later.
        with cpu_generators_put_back():  # a start more or less must not shift what is drawn
            (micro_batch,) = read_batches(self._fetcher, [request], self._config, self._context)
        return micro_batch

    def mean_over_epoch(self, sum_of_losses: float, num_steps: int, last_loss: float) -> float:
        """The mean over the samples of an epoch's last `num_steps` steps, of which the last may have been shorter."""
        last = self.num_samples - (self.steps_per_epoch - 1) * self.global_batch_size
        full = (num_steps - 1) * self.global_batch_size
        return ((sum_of_losses - last_loss) * self.global_batch_size + last_loss * last) / (full + last)

    def close(self) -> None:
        """Ends the worker processes."""
        self._batches = iter(())

    def _requests_of_step(self, epoch: int, position: int) -> Iterator[Request]:
        for request in self._requests(epoch, position):
            yield request
            if request.is_last:
                return

    def _requests(self, epoch: int, position: int) -> Iterator[Request]:
        size = self.global_batch_size
        block = size * max(1, BLOCK // size)
        while True:
            order = epoch_order(self.num_samples, self._seed, epoch)
            if self._lengths is not None:
                order = bucket_by_length(order, self._lengths, size, self._seed, epoch)
            for start in range(position, self.num_samples, block):
                indices = order[start : start + block].tolist()
                for first in range(0, len(indices), size):
                    yield from self._share(epoch, indices[first : first + size])
            epoch, position = epoch + 1, 0

    def _share(self, epoch: int, global_batch: list[int]) -> Iterator[Request]:
        world_size, size = self._context.world_size, len(global_batch)
        first, last = split_evenly(size, world_size, self._context.rank)
        share = global_batch[first:last]
        # As many pieces on every rank, since forward passes may hold collectives (SyncBatchNorm, FSDP). A rank without
        # samples for a piece runs one with weight 0.
        largest_share = -(-size // world_size)
        num_pieces = -(-largest_share // self.micro_batch_size)
        if num_pieces == 1 and share:
            yield Request(epoch, share, len(share), len(share) * world_size / size, True)
            return
        for number, piece in enumerate(cut(share, num_pieces), start=1):
            weight = len(piece) * world_size / size
            yield Request(epoch, piece or global_batch[:1], len(piece), weight, number == num_pieces)


def holds_non_finite(fetcher: Fetcher, epoch: int, index: int) -> bool:
    """Whether a tensor of this sample holds a NaN or infinity; False too if the sample cannot be read alone."""
    try:
        leaves = tree_leaves(fetcher[Request(epoch, [index], 1, 1.0, is_last=True)].batch)
        return any(isinstance(leaf, Tensor) and not leaf.isfinite().all() for leaf in leaves)
    except Exception:  # a collate function that wants several, a sparse tensor: the run fails for another reason
        return False


def lengths_of(dataset: Any) -> Tensor | None:
    """The length of each sample, if the data set tells it in an attribute `sample_lengths`."""
    lengths = getattr(dataset, "sample_lengths", None)
    if lengths is not None and len(lengths) != len(dataset):
        raise ConfigError(
            f"sample_lengths of {type(dataset).__name__} holds {len(lengths)} lengths of {len(dataset)} samples. "
            "Give it one a sample."
        )
    return None if lengths is None else torch.as_tensor(lengths)


def check_dataset(dataset: Dataset[Any], name: str) -> int:
    """The number of samples, the same on every rank; ConfigError for what cannot be shared out. All ranks call it."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise ConfigError(
            f"the {name} data set ({type(dataset).__name__}) has no length: samples are shared out by their index. "
            "Give it __len__ and __getitem__; an IterableDataset is not supported."
        )
    of_ranks: list[int] = broadcast_object(gather_objects(len(dataset)))
    if len(set(of_ranks)) > 1:
        found = "; ".join(f"{number} on rank {rank}" for rank, number in enumerate(of_ranks))
        raise ConfigError(
            f"the {name} data set differs between ranks. Samples: {found}. "
            "Every rank must see the same ones: is a folder still being filled, or a node's copy not whole?"
        )
    if len(dataset) == 0:
        raise ConfigError(
            f"the {name} data set is empty: build_datasets() in dataset.py must return at least one sample."
        )
    return len(dataset)

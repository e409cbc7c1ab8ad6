"""Decides who gets which samples: the epoch's order, its global batches, each rank's share, and its micro-batches.

All of it is arithmetic on (seed, epoch, position), so a run resumes in the middle of an epoch, on any number of ranks,
without replaying anything. reading.py reads the samples.
"""

import time
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from .. import dataset as user_data
from .. import model as user_model
from ..config import Config, LoaderConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext, all_reduce, broadcast_object, gather_objects
from .random_state import derive_seed, generators_restored, seed_generators
from .reading import Fetcher, MicroBatch, Request, read_batches

WINDOW = 50
"""Global batches whose samples are sorted together, where samples have lengths."""

_collate = getattr(user_data, "collate", None)
_loss_weight = getattr(user_model, "loss_weight", None)


def build_datasets(config: Config, context: RankContext) -> tuple[Dataset[Any], ...]:
    """The user's data sets, from generators seeded alike on all ranks; local rank 0 is first: one download a node."""
    seed_generators(config.seed)
    with context.local_rank_first():
        return tuple(user_data.build_datasets(config.data))


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """(num_samples,) int64: the shuffled order of one epoch, the same on every rank."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -1))
    return torch.randperm(num_samples, generator=generator)


def bucket_by_length(order: Tensor, lengths: Tensor, size: int, seed: int, epoch: int) -> Tensor:
    """`order` with samples of like length in each global batch of `size`, so that little is padded.

    Every WINDOW batches of the order are sorted by length and cut anew, then the epoch's batches are shuffled. The
    last, shorter one stays as and where it is.
    """
    whole, last = order.tensor_split([len(order) // size * size])
    windows = torch.split(whole, WINDOW * min(size, len(order)))
    batches = torch.cat([window[lengths[window].argsort(stable=True)] for window in windows])
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -2))
    shuffled = torch.randperm(len(whole) // size, generator=generator)
    return torch.cat([batches.view(-1, size)[shuffled].flatten(), last])


def split_evenly(num_samples: int, num_parts: int, part: int) -> tuple[int, int]:
    """Start and stop of one of `num_parts` contiguous parts whose sizes differ by at most one."""
    return num_samples * part // num_parts, num_samples * (part + 1) // num_parts


def cut_evenly(indices: list[int], num_pieces: int) -> list[list[int]]:
    """`indices` in `num_pieces` pieces whose sizes differ by at most one."""
    bounds = [split_evenly(len(indices), num_pieces, piece) for piece in range(num_pieces)]
    return [indices[start:stop] for start, stop in bounds]


class TrainLoader:
    """This rank's micro-batches, step by step, from any position on and without end."""

    def __init__(
        self, dataset: Dataset[Any], config: LoaderConfig, context: RankContext, *, seed: int, global_batch_size: int,
        micro_batch_size: int | str,
    ) -> None:  # fmt: skip
        self.num_samples = check_dataset(dataset, "training")
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = -(-self.num_samples // global_batch_size)
        largest_share = -(-min(global_batch_size, self.num_samples) // context.world_size)
        size = largest_share if micro_batch_size == "auto" else int(micro_batch_size)
        self.micro_batch_size = min(size, largest_share)
        self._context, self._config, self._seed = context, config, seed
        self._lengths = lengths_of(dataset)
        self._fetcher = Fetcher(dataset, _collate, seed)
        self._batches: Iterator[MicroBatch] = iter(())
        self.seconds_waited = 0.0  # in reading, or for the workers that read

    def start(self, epoch: int, position: int) -> None:
        """Let the next step begin `position` samples into `epoch` (epochs counted from 0)."""
        self.close()
        requests = (request for batch in self._global_batches(epoch, position) for request in self._share(*batch))
        self._batches = read_batches(self._fetcher, requests, self._config, self._context)

    def next_step(self) -> Iterator[tuple[MicroBatch, float | Tensor]]:
        """The micro-batches of this rank's share of the next global batch, each with its weight in the loss.

        A weight is the micro-batch's part of the global batch, times world_size: averaged over ranks, they sum to 1.
        With loss_weight in model.py all micro-batches of the step are read before the first one runs.
        """
        if _loss_weight is None:
            for micro_batch in self._next_batches():
                yield micro_batch, micro_batch.request.weight
            return
        held = list(self._next_batches())
        weights = torch.stack([loss_weight_of(micro_batch, self._context) for micro_batch in held])
        total = all_reduce(weights.sum())
        # A global batch may count nothing at all.
        share = torch.where(total == 0, 0.0, self._context.world_size / total)
        yield from zip(held, weights * share, strict=True)

    def read_first(self, epoch: int, position: int) -> MicroBatch:
        """The largest micro-batch of this rank's next step, for a rehearsal; the steps read it again."""
        next_batch = next(self._global_batches(epoch, position))
        largest = max(self._share(*next_batch), key=lambda request: len(request.indices))
        # By a worker, if there are any: a file that the data set opens here would be shared by those forked later.
        with generators_restored():  # a start more or less must not shift what is drawn
            (micro_batch,) = read_batches(self._fetcher, [largest], self._config, self._context)
        return micro_batch

    def close(self) -> None:
        """End the worker processes."""
        self._batches = iter(())

    def _next_batches(self) -> Iterator[MicroBatch]:
        asked_at = time.perf_counter()
        for micro_batch in self._batches:
            self.seconds_waited += time.perf_counter() - asked_at
            yield micro_batch
            if micro_batch.request.is_last:
                return
            asked_at = time.perf_counter()

    def _global_batches(self, epoch: int, position: int) -> Iterator[tuple[int, list[int]]]:
        """Each global batch from there on: its epoch and its indices."""
        size = self.global_batch_size
        while True:
            order = epoch_order(self.num_samples, self._seed, epoch)
            if self._lengths is not None:
                order = bucket_by_length(order, self._lengths, size, self._seed, epoch)
            for start in range(position, self.num_samples, size):
                yield epoch, order[start : start + size].tolist()
            epoch, position = epoch + 1, 0

    def _share(self, epoch: int, global_batch: list[int]) -> Iterator[Request]:
        """This rank's micro-batches of a global batch."""
        world_size, size = self._context.world_size, len(global_batch)
        first, last = split_evenly(size, world_size, self._context.rank)
        # As many pieces on every rank, since forward passes may hold collectives (SyncBatchNorm, FSDP). A rank without
        # samples for a piece runs one with weight 0.
        largest_share = -(-size // world_size)
        num_pieces = -(-largest_share // self.micro_batch_size)
        for number, piece in enumerate(cut_evenly(global_batch[first:last], num_pieces), start=1):
            weight = len(piece) * world_size / size
            yield Request(epoch, piece or global_batch[:1], len(piece), weight, number == num_pieces)


class EvaluationLoader:
    """Each sample of a data set once, over all ranks; all run the same number of micro-batches, as in TrainLoader."""

    def __init__(self, dataset: Dataset[Any], config: LoaderConfig, context: RankContext, name: str) -> None:
        self.num_samples = check_dataset(dataset, name)
        self._context, self._config = context, config
        self._order, lengths = torch.arange(self.num_samples), lengths_of(dataset)
        if lengths is not None:  # like lengths together, and some of each on every rank
            order = lengths.argsort(stable=True)
            self._order = torch.cat([order[rank :: context.world_size] for rank in range(context.world_size)])
        self._fetcher = Fetcher(dataset, _collate, seed=0, is_ahead=True)  # nothing here moves the run's generators

    def read(self, micro_batch_size: int, max_batches: int | None = None) -> Iterator[MicroBatch]:
        """This rank's micro-batches, of at most so many samples; `max_batches`: only the first."""
        world_size = self._context.world_size
        first, last = split_evenly(self.num_samples, world_size, self._context.rank)
        largest_part = -(-self.num_samples // world_size)
        num_batches = -(-largest_part // micro_batch_size)
        pieces = cut_evenly(self._order[first:last].tolist(), num_batches)[:max_batches]
        requests = [Request(0, piece or [0], len(piece), float(len(piece)), is_last=True) for piece in pieces]
        return read_batches(self._fetcher, requests, self._config, self._context)


def loss_weight_of(micro_batch: MicroBatch, context: RankContext) -> Tensor:
    """The weight of this micro-batch's mean loss: 0-dim float64; 0 for one that only keeps the ranks in step."""
    request = micro_batch.request
    weight = _loss_weight(micro_batch.batch) if _loss_weight and request.num_samples else request.num_samples
    if isinstance(weight, Tensor):
        return weight.to(context.device, torch.float64)
    return torch.full((), weight, dtype=torch.float64, device=context.device)  # a copy from the host would wait


def lengths_of(dataset: Any) -> Tensor | None:
    """The length of each sample, if the data set has an attribute `sample_lengths`."""
    lengths = getattr(dataset, "sample_lengths", None)
    if lengths is None:
        return None
    if len(lengths) != len(dataset):
        words = f"holds {len(lengths)} lengths for {len(dataset)} samples. Give it one length per sample."
        raise ConfigError(f"sample_lengths of {type(dataset).__name__} {words}")
    return torch.as_tensor(lengths)


def check_dataset(dataset: Dataset[Any], name: str) -> int:
    """The number of samples, the same on every rank; ConfigError for what cannot be shared out. All ranks call it."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        rule = "Give it __len__ and __getitem__; an IterableDataset is not supported."
        raise ConfigError(f"the {name} data set ({type(dataset).__name__}) has no length. {rule}")
    lengths: list[int] = broadcast_object(gather_objects(len(dataset)))
    if len(set(lengths)) > 1:
        found = "; ".join(f"{number} on rank {rank}" for rank, number in enumerate(lengths))
        rule = "Every rank must see the same ones: is a folder still being filled, or a node's copy not whole?"
        raise ConfigError(f"the {name} data set differs between ranks. Samples: {found}. {rule}")
    if len(dataset) == 0:
        raise ConfigError(f"the {name} data set is empty: build_datasets() must return at least one sample.")
    return len(dataset)

"""Decides who gets which samples (the epoch's order, its global batches, each rank's share, its micro-batches), and
reads them, in the rank or in worker processes.

All of it is arithmetic on (seed, epoch, position), so a run resumes in the middle of an epoch, on any number of ranks,
without replaying anything.
"""

import copy
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from .. import dataset as user_data
from .. import model as user_model
from ..config import Config, LoaderConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext, all_reduce, broadcast_object, gather_objects
from ..launching.processes import STOP_SIGNALS, die_with_parent, num_usable_cores, signals_blocked
from . import random_state
from .random_state import derive_seed, generators_restored, seed_generators

WINDOW = 50  # global batches whose samples are sorted together, where samples have lengths

_collate: Callable[[list[Any]], Any] = getattr(user_data, "collate", default_collate)
_loss_weight = getattr(user_model, "loss_weight", None)


@dataclass(slots=True)
class Request:
    """A micro-batch to read: `num_samples` of `indices` count, with `weight` in the step's loss.

    No tuple: torch's pinning would look at each index in search of tensors.
    """

    epoch: int
    indices: list[int]
    num_samples: int
    weight: float
    is_last: bool


class MicroBatch(NamedTuple):
    """The samples of one forward pass, and the request they answer."""

    batch: Any
    request: Request


def build_datasets(config: Config, context: RankContext) -> tuple[Dataset[Any], ...]:
    """The user's data sets, from generators seeded alike on all ranks; local rank 0 is first: one download a node."""
    seed_generators(config.seed)
    with context.local_rank_first("data"):
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
        self.num_samples, self.global_batch_size = check_dataset(dataset, "training"), global_batch_size
        self.steps_per_epoch = -(-self.num_samples // global_batch_size)
        largest_share = -(-min(global_batch_size, self.num_samples) // context.world_size)
        self.micro_batch_size = min(
            largest_share if micro_batch_size == "auto" else int(micro_batch_size), largest_share
        )
        self._context, self._config, self._seed = context, config, seed
        self._lengths, self._fetcher = lengths_of(dataset), Fetcher(dataset, seed)
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
        share = torch.where(total == 0, 0.0, self._context.world_size / total)  # a batch may count nothing at all
        yield from zip(held, weights * share, strict=True)

    def read_first(self, epoch: int, position: int, choose: Any = max) -> MicroBatch:
        """One micro-batch of this rank's step there, the largest (or by `choose`), to rehearse; steps read it again."""
        next_batch = next(self._global_batches(epoch, position))
        chosen = choose(self._share(*next_batch), key=lambda request: len(request.indices))
        # By a worker, if there are any: a file that the data set opens here would be shared by those forked later.
        with generators_restored():  # a start more or less must not shift what is drawn
            (micro_batch,) = read_batches(self._fetcher, [chosen], self._config, self._context)
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
            weight = len(piece) * world_size / size  # 3 and 4 of 7: 6/7 and 8/7; DDP's mean makes 3/7 and 4/7 of them
            yield Request(epoch, piece or global_batch[:1], len(piece), weight, number == num_pieces)


class Fetcher(Dataset[MicroBatch]):
    """Reads one requested micro-batch. The random generators are seeded from (seed, epoch, index) before each item.

    Only generators that the data set draws from are seeded: at the first draw the micro-batch is read again, seeded, so
    an item may be read twice. A data set whose `__getitems__` returns a whole batch is asked once for it, and derives
    its random numbers from `set_epoch(epoch)` and the indices itself.

    is_ahead: read ahead of their step, or outside of any, collate and `__getitems__` are seeded per micro-batch.
    Otherwise they draw from the rank's generators, whose states a checkpoint holds.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, *, is_ahead: bool = False) -> None:
        self._dataset, self._seed, self.is_ahead = dataset, seed, is_ahead
        self._epoch: int | None = None
        self._draws_from = "nothing"  # as far as is known: "torch", or "all" generators
        self._states: tuple[Any, dict[str, Any]] = None, {}  # the count of draws, and the generators' states then
        while isinstance(dataset, Subset):  # a Subset has __getitems__ whatever the data set below offers
            dataset = dataset.dataset
        self.has_whole_batches = hasattr(dataset, "__getitems__")
        self.is_quick = self.has_whole_batches and not type(dataset).__module__.startswith("datasets.")  # Hugging Face

    def __getitem__(self, request: Request) -> MicroBatch:
        try:
            with generators_restored() if self.is_ahead else nullcontext():
                if self.is_ahead:
                    seed_generators(derive_seed(self._seed, request.epoch, -3 - request.indices[0]), is_cpu_only=True)
                return MicroBatch(self._read(request), request)
        except (StopIteration, SystemExit) as error:  # an iterator over the batches would end, as if they were all
            raise RuntimeError(f"the data set, or its collate function, raised {type(error).__name__}") from error
        except Exception as error:
            error.add_note(f"while reading the samples {request.indices} of {type(self._dataset).__name__}")
            raise

    def _read(self, request: Request) -> Any:
        if request.epoch != self._epoch and hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(request.epoch)
        self._epoch = request.epoch
        if self.has_whole_batches:
            batch = cast(Any, self._dataset).__getitems__(request.indices)
            return _collate(batch) if isinstance(batch, list) else batch
        dataset: Any = self._dataset
        rows = request.indices
        if type(dataset) is Subset:
            dataset, rows = dataset.dataset, [int(dataset.indices[row]) for row in rows]
        if type(dataset) is TensorDataset and _collate is default_collate:
            return [tensor[rows] for tensor in dataset.tensors]  # as collated items, without reading them one by one
        return _collate(self._read_items(request))

    def _read_items(self, request: Request) -> list[Any]:
        items, count = [], random_state.draw_counter()
        seeds = (derive_seed(self._seed, request.epoch, index) for index in request.indices)
        if self._draws_from == "all" or count is None:
            with generators_restored():
                for index, seed in zip(request.indices, seeds, strict=True):
                    seed_generators(seed, is_cpu_only=True)
                    items.append(self._dataset[index])
            return items
        if self._states[0] != count():
            self._states = count(), random_state.get_random_states()
        torch_state = torch.get_rng_state()
        for index in request.indices:
            if self._draws_from == "torch":
                torch.default_generator.manual_seed(next(seeds))
            items.append(self._dataset[index])
        has_drawn = self._draws_from == "nothing" and not torch.equal(torch_state, torch.get_rng_state())
        if self._states[0] != count():
            self._draws_from, has_drawn = "all", True
            random_state.set_random_states(self._states[1])
        elif has_drawn:
            self._draws_from = "torch"
        torch.set_rng_state(torch_state)
        return self._read_items(request) if has_drawn else items


def read_batches(
    fetcher: Fetcher, requests: Iterable[Request], config: LoaderConfig, context: RankContext,
    kept: dict[int, DataLoader[MicroBatch]] | None = None, size: int = 0,
) -> Iterator[MicroBatch]:  # fmt: skip
    """The requested micro-batches in order, on the rank's device. Dropping the iterator ends its workers.

    kept: loaders whose workers live on instead, by micro-batch size, for requests that are the same each time.
    """
    is_on_cpu = context.device.type == "cpu"
    if config.num_workers != "auto":
        num_workers = config.num_workers
    elif is_on_cpu or fetcher.is_quick:
        num_workers = 0  # a worker's pipe costs about 1 ms a batch, and on the CPU the cores are busy computing
    else:
        num_workers = min(8, num_usable_cores() // context.local_world_size)
    if is_on_cpu and num_workers == 0:
        return (fetcher[request] for request in requests)
    fetcher = copy.copy(fetcher)
    fetcher.is_ahead = True
    loader: DataLoader[MicroBatch] = (kept or {}).get(size) or DataLoader(
        fetcher,
        batch_size=None,  # a request is a whole micro-batch already
        collate_fn=cast(Any, _identity),  # torch's own would turn tuples into lists, and arrays into tensors
        sampler=cast(Any, requests),
        num_workers=num_workers,
        prefetch_factor=config.prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0 and kept is not None,
        pin_memory=context.device.type == "cuda",
        worker_init_fn=partial(_start_worker, os.getpid()),
        # A rank started by a fork server would start a server of its own for them, and each would import torch anew.
        multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # otherwise each iterator would draw from the run's own generator
    )
    if kept is not None:
        kept[size] = loader
    with signals_blocked() if num_workers else nullcontext():  # a worker that one reaches at its start would die
        micro_batches = iter(loader)
    if is_on_cpu:
        return micro_batches
    return (micro_batch._replace(batch=move(micro_batch.batch, context.device)) for micro_batch in micro_batches)


def _identity(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch


def _start_worker(rank_pid: int, _worker_id: int) -> None:
    die_with_parent(rank_pid)
    os.setpgrp()  # Ctrl-C goes to a whole group: the rank decides, and saves first
    for number in STOP_SIGNALS:  # some schedulers signal each process of a run
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # for the processes that user code starts here
    torch.set_num_threads(1)


@runtime_checkable
class Movable(Protocol):
    """A tensor, or another object with a method `to`: a graph, a tokenizer's output."""

    def to(self, device: torch.device, **options: Any) -> Any: ...


def move(batch: Any, device: torch.device) -> Any:
    """The batch with everything movable on `device`; tuples, lists, mappings and dataclasses keep their types."""

    def move_one(value: Movable) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)

    return apply_to_collection(batch, dtype=Movable, function=move_one)


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
    if lengths is not None and len(lengths) != len(dataset):
        words = f"holds {len(lengths)} lengths for {len(dataset)} samples. Give it one length per sample."
        raise ConfigError(f"sample_lengths of {type(dataset).__name__} {words}")
    return None if lengths is None else torch.as_tensor(lengths)


def check_dataset(dataset: Dataset[Any], name: str) -> int:
    """The number of samples, the same on every rank; ConfigError for what cannot be shared out. All ranks call it."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise ConfigError(f"the {name} data set has no __len__ and __getitem__: an IterableDataset is not supported.")
    lengths: list[int] = broadcast_object(gather_objects(len(dataset)))
    if min(lengths) != max(lengths):
        rule = "Every rank must see the same ones: is a folder still being filled, or a node's copy not whole?"
        raise ConfigError(f"the {name} data set differs between ranks: {lengths} samples. {rule}")
    if lengths[0] == 0:
        raise ConfigError(f"the {name} data set is empty: build_datasets() must return at least one sample.")
    return lengths[0]

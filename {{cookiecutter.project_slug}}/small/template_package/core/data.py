"""Decides which samples each rank takes in each step, and reads them.

Any global batch size is exact on any number of ranks:

- An epoch's order is a function of (seed, epoch). It is cut into global batches, of which the last
  may be short. A position in the order says where a run is, whatever its ranks.
- cut_share() cuts a global batch of B samples into a share per rank, and each share into
  micro-batches. Their sizes differ by at most one sample.
- A micro-batch of n samples has the mean loss of its n samples. Its loss is multiplied by
  n * world_size / B. DDP averages gradients over ranks, that is, it divides their sum by
  world_size. What is left is the sum of n / B times each mean: the mean over all B samples.
- Ranks with fewer samples run as many micro-batches as the others, with weight 0 where they have
  no sample, since forward and backward passes may hold collectives.
"""

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ..errors import ConfigError
from .config import LoaderConfig
from .launch import STOP_SIGNALS, die_with_parent
from .random_states import (
    derive_seed,
    generators_of,
    generators_restored,
    seed_cpu,
    seed_generators,
)
from .ranks import Rank, all_reduce, from_main, gather_objects, num_usable_cores
from .settings import NEEDS_FULL
from .task import Task, inner


@dataclass(slots=True)
class Request:
    """The samples of one micro-batch. No tuple: pin_memory would search a tuple for tensors."""

    epoch: int
    indices: list[int]
    num_samples: int  # how many count: all, or 0 for a filler, which keeps the ranks together
    weight: float = 0.0  # in training: num_samples * world_size / samples of the global batch
    is_last: bool = False  # in training: of this rank in its step


class MicroBatch(NamedTuple):
    batch: Any
    request: Request


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return each index once, shuffled: (num_samples,) int64, the same on every rank."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -1))
    return torch.randperm(num_samples, generator=generator)


def cut_share(
    batch: list[int], rank: int, world_size: int, micro_batch_size: int
) -> list[list[int]]:
    """Return this rank's micro-batches of a batch, equally many on all ranks. Some may be empty.

    No share is larger than rank 0's, so that its micro-batches are never empty: its BatchNorm
    statistics are the ones that are saved.
    """
    largest_share = -(-len(batch) // world_size)
    return split(split(batch, world_size)[rank], -(-largest_share // micro_batch_size))


def split(samples: list[int], num_parts: int) -> list[list[int]]:
    """Split a list into parts whose sizes differ by at most one, the larger ones first."""
    size, num_larger = divmod(len(samples), num_parts)
    bounds = [part * size + min(part, num_larger) for part in range(num_parts + 1)]
    return [samples[start:stop] for start, stop in pairwise(bounds)]


def check_dataset(dataset: Any, name: str) -> int:
    """Count the samples. Raise ConfigError if there are none, or if ranks disagree."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        problem = f"the {name} data set has no __len__ and __getitem__; a stream"
        raise ConfigError(f"{problem} {NEEDS_FULL}")
    parts = [dataset, *inner(dataset)]
    if any(getattr(part, "sample_weights", None) is not None for part in parts):
        raise ConfigError(f"sample_weights of the {name} data set: drawing by weight {NEEDS_FULL}")
    lengths = from_main(partial(list, gather_objects(len(dataset)) or []))
    if min(lengths) != max(lengths):
        rule = "All must see the same ones: is a folder still being filled?"
        raise ConfigError(f"the {name} data set differs between ranks: {lengths} samples. {rule}")
    if lengths[0] == 0:
        raise ConfigError(f"the {name} data set is empty. build_datasets() must return samples.")
    return int(lengths[0])


class TrainLoader:
    """Reads this rank's micro-batches, step after step. It can begin anywhere in an epoch."""

    def __init__(
        self,
        dataset: Any,
        task: Task,
        config: LoaderConfig,
        rank: Rank,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int | str,
    ) -> None:
        self._reader = BatchReader(dataset, task, config, rank, seed, "training")
        self._task, self._rank, self._seed = task, rank, seed
        self.num_samples, self.global_batch_size = self._reader.num_samples, global_batch_size
        self.steps_per_epoch = -(-self.num_samples // global_batch_size)
        largest_share = -(-min(global_batch_size, self.num_samples) // rank.world_size)
        self.micro_batch_size = largest_share
        if micro_batch_size != "auto":
            self.micro_batch_size = min(int(micro_batch_size), largest_share)

    def start(self, epoch: int, position: int) -> None:
        """Begin the next step at sample number `position` of `epoch`. Both count from 0."""
        self._batches = self._reader.read(self._requests(epoch, position))

    def next_step(self, module: nn.Module) -> Iterator[tuple[MicroBatch, float | Tensor]]:
        """Yield this rank's micro-batches of the next global batch, each with its loss's weight.

        With loss_weight() in model.py, weights are fractions of the batch's total loss weight.
        """
        if self._task.loss_weight is None:
            yield from ((micro_batch, micro_batch.request.weight) for micro_batch in self._step())
            return
        held = list(self._step())
        weights = torch.stack([loss_weight_of(one, self._task, module, self._rank) for one in held])
        total = all_reduce(weights.sum())
        scale = torch.where(total == 0, 0.0, self._rank.world_size / total)
        yield from zip(held, weights * scale, strict=True)

    def read_first(self, epoch: int, position: int, choose: Any = max) -> MicroBatch:
        """For a rehearsal, return the largest micro-batch of the step there; choose=min: the smallest."""
        requests = self._cut(*next(self._global_batches(epoch, position)))
        chosen = choose(requests, key=lambda request: len(request.indices))
        return next(self._reader.read([chosen]))  # call start() before training reads on

    def _step(self) -> Iterator[MicroBatch]:
        for micro_batch in self._batches:
            yield micro_batch
            if micro_batch.request.is_last:
                return

    def _requests(self, epoch: int, position: int) -> Iterator[Request]:
        for batch in self._global_batches(epoch, position):
            yield from self._cut(*batch)

    def _global_batches(self, epoch: int, position: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (epoch, indices) for each global batch, without end."""
        while True:
            order = epoch_order(self.num_samples, self._seed, epoch)
            for start in range(position, self.num_samples, self.global_batch_size):
                yield epoch, order[start : start + self.global_batch_size].tolist()
            epoch, position = epoch + 1, 0

    def _cut(self, epoch: int, global_batch: list[int]) -> list[Request]:
        world_size, requests = self._rank.world_size, []
        for piece in cut_share(global_batch, self._rank.rank, world_size, self.micro_batch_size):
            weight = len(piece) * world_size / len(global_batch)
            requests.append(Request(epoch, piece or global_batch[:1], len(piece), weight))
        requests[-1].is_last = True
        return requests


class EvaluationLoader:
    """Gives each evaluated sample to exactly one rank. All ranks read equally many micro-batches."""

    def __init__(
        self,
        dataset: Any,
        task: Task,
        config: LoaderConfig,
        rank: Rank,
        name: str,
        limit: int | None = None,
    ) -> None:
        self._reader, self._rank = BatchReader(dataset, task, config, rank, 0, name), rank
        num_all = self._reader.num_samples
        self.num_samples = min(num_all, limit or num_all)
        # With a limit, take samples at even distances: the first ones may be of one class.
        self._order = (torch.arange(self.num_samples) * num_all // self.num_samples).tolist()

    def read(self, micro_batch_size: int) -> Iterator[MicroBatch]:
        requests = [self._request(piece) for piece in self._cut(micro_batch_size)]
        for micro_batch in self._reader.read(requests):
            self._seed_for(micro_batch.request)
            yield micro_batch

    def read_first(self, micro_batch_size: int, num_parts: int) -> Iterator[MicroBatch]:
        """Read the first micro-batch alone, in so many parts, which draw what their whole does."""
        parts = split(self._cut(micro_batch_size)[0], num_parts)
        for number, micro_batch in enumerate(self._reader.read([*map(self._request, parts)])):
            if number == 0:
                self._seed_for(micro_batch.request)
            yield micro_batch

    def _cut(self, micro_batch_size: int) -> list[list[int]]:
        return cut_share(self._order, self._rank.rank, self._rank.world_size, micro_batch_size)

    def _request(self, piece: list[int]) -> Request:
        return Request(0, piece or [0], len(piece))

    def _seed_for(self, request: Request) -> None:
        """Make what the model draws depend on nothing that came before."""
        seed = seed_cpu if self._rank.device.type == "mps" else seed_generators
        seed(derive_seed(0, 0, request.indices[0]))


class Fetcher(Dataset[MicroBatch]):
    """Reads the samples of a Request.

    Augmentation is repeatable: before each sample, and before collating, the random generators and
    those that the data set owns are seeded from a hash of (seed, epoch, index). Afterwards the
    rank's own states are restored. Samples that __getitems__ reads together share one seed.
    """

    _is_checked = False
    _own: list[Any] | None = None  # the data set's generators, once this process has looked for them

    def __init__(self, dataset: Any, task: Task, seed: int) -> None:
        self._dataset, self._task, self._seed, self._epoch = dataset, task, seed, -1
        while isinstance(dataset, Subset):  # a Subset has __getitems__ whatever is below
            dataset = dataset.dataset
        self._reads_many = hasattr(dataset, "__getitems__")

    def __getitem__(self, request: Request) -> MicroBatch:
        try:
            if request.epoch != self._epoch:
                for one in [self._dataset, *inner(self._dataset)]:
                    getattr(one, "set_epoch", lambda _: None)(request.epoch)
            self._epoch = request.epoch
            batch = self._read(request)
            if not self._is_checked:  # what collate() makes may differ from the first batch
                check_batch(batch, len(request.indices), self._task)
                is_plain = self._task.collate is default_collate and not self._reads_many
                self._is_checked = is_plain
            return MicroBatch(batch, request)
        except (StopIteration, SystemExit) as error:  # it would end the loop without an error
            name = type(error).__name__
            raise RuntimeError(f"the data set, or its collate(), raised {name}") from error
        except ConfigError:
            raise
        except Exception as error:
            name = type(self._dataset).__name__
            error.add_note(f"while reading the samples {request.indices} of {name}")
            raise

    def _read(self, request: Request) -> Any:
        dataset, rows = self._dataset, request.indices
        if type(dataset) is Subset:
            rows, dataset = [int(dataset.indices[row]) for row in rows], dataset.dataset
        if type(dataset) is TensorDataset and self._task.collate is default_collate:
            index = torch.tensor(rows)
            return [tensor[index] for tensor in dataset.tensors]  # as collated, without drawing
        with generators_restored() if get_worker_info() is None else nullcontext():
            roots = self._dataset, self._task.data_globals
            is_first = self._own is None
            if is_first:
                self._own = generators_of(*roots)
            batch = self._read_seeded(request)
            if is_first and len(own := generators_of(*roots)) > len(self._own or ()):
                self._own = own  # some were made when first used
                batch = self._read_seeded(request)
            return batch

    def _read_seeded(self, request: Request) -> Any:
        items: Any = []
        if not self._reads_many:
            for index in request.indices:
                self._seed_for(request.epoch, index)
                items.append(self._dataset[index])
        self._seed_for(request.epoch, -3 - request.indices[0])
        if self._reads_many:
            items = self._dataset.__getitems__(request.indices)
        return self._task.collate(items) if isinstance(items, list) else items

    def _seed_for(self, epoch: int, number: int) -> None:
        seed_cpu(derive_seed(self._seed, epoch, number), self._own or ())


class Requests:
    """A sampler for the DataLoader, whose requests can change while its workers live on."""

    now: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)


class BatchReader:
    """Reads micro-batches to the rank's device. Its worker processes live as long as this object."""

    def __init__(
        self, dataset: Any, task: Task, config: LoaderConfig, rank: Rank, seed: int, name: str
    ) -> None:
        self.num_samples, self._device = check_dataset(dataset, name), rank.device
        self._fetcher, self._requests = Fetcher(dataset, task, seed), Requests()
        # A worker's pipe costs about 1 ms a batch, and on the CPU the cores are busy.
        is_gpu = rank.device.type == "cuda"
        num_auto = min(8, num_usable_cores() // rank.local_world_size) if is_gpu else 0
        num_workers = num_auto if config.num_workers == "auto" else config.num_workers
        self._loader: DataLoader[MicroBatch] | None = None
        if num_workers or rank.device.type != "cpu":
            self._loader = DataLoader(
                self._fetcher,
                batch_size=None,  # a request is a whole micro-batch already
                collate_fn=cast(Any, MicroBatch._make),  # torch's own would turn tuples into lists
                sampler=cast(Any, self._requests),
                num_workers=num_workers,
                prefetch_factor=config.prefetch_factor if num_workers else None,
                persistent_workers=num_workers > 0,
                pin_memory=rank.device.type == "cuda",
                worker_init_fn=partial(_start_worker, os.getpid()),
                multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
                generator=torch.Generator(),  # otherwise iterators draw from the run's own
            )

    def read(self, requests: Iterable[Request]) -> Iterator[MicroBatch]:
        """Return the requested micro-batches in order. Only the latest call's iterator is valid."""
        if self._loader is None:
            return map(self._fetcher.__getitem__, requests)
        self._requests.now = requests
        former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # they would kill a new worker
        try:
            micro_batches = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        if self._device.type == "cpu":
            return micro_batches
        return (one._replace(batch=move(one.batch, self._device)) for one in micro_batches)


def _start_worker(rank_pid: int, _worker_id: int) -> None:
    die_with_parent(rank_pid)
    os.setpgrp()  # Ctrl-C goes to a whole group: the rank decides, and saves first
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@runtime_checkable
class Movable(Protocol):
    to: Any  # the method of a tensor, a graph, a tokenizer's output


def move(batch: Any, device: torch.device) -> Any:
    """Move all that has a to() method to `device`, in lists, mappings and dataclasses too."""

    def move_one(value: Movable) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=device.type == "cuda")
        return value.to(device)

    return apply_to_collection(batch, dtype=Movable, function=move_one)


@torch.no_grad()
def loss_weight_of(micro_batch: MicroBatch, task: Task, module: nn.Module, rank: Rank) -> Tensor:
    """Return this micro-batch's loss weight, 0-dim. It is 0 if no sample counts."""
    weight: Any = micro_batch.request.num_samples
    if task.loss_weight is not None and weight:
        weight = task.loss_weight(micro_batch.batch, module)
    return torch.ones((), dtype=rank.sum_dtype, device=rank.device).mul(weight)


def check_batch(batch: Any, num_samples: int, task: Task) -> None:
    """Raise ConfigError if a batch requires a gradient, or has left samples out that count."""
    entries = [*entries_of(batch)]
    if any(getattr(entry, "requires_grad", False) for entry in entries):
        raise ConfigError("samples require a gradient. Detach them in dataset.py.")
    sizes = [len(entry) for entry in entries if getattr(entry, "ndim", 1)]
    largest = max(sizes, default=num_samples)
    if largest < num_samples and task.loss_weight is None:
        remedy = "Leave none out, or let loss_weight() return what the loss is a mean over"
        problem = f"dataset.py made a batch of {largest} entries from {num_samples} samples"
        raise ConfigError(f"{problem}. {remedy}.")


def entries_of(batch: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and lists in a batch. Of a list, look into the first item only."""
    if isinstance(batch, Tensor | numpy.ndarray | list):
        yield batch
    parts: Any = batch if isinstance(batch, tuple) else ()
    if isinstance(batch, list):
        parts = batch[:1]
    elif isinstance(batch, Mapping):
        parts = batch.values()
    elif is_dataclass(batch):
        parts = vars(batch).values()
    for part in parts:
        yield from entries_of(part)

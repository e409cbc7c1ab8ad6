"""Decides which samples each rank takes in each step, and reads them, in the rank's own process or in workers.

Any global batch size is exact on any number of ranks:

- An epoch's order is a function of (seed, epoch). It is cut into global batches, of which the last may be short, so a
  position in the order says where a run is, whatever its ranks.
- cut_share() cuts a global batch of B samples into one share per rank, and each share into micro-batches.
- A micro-batch of n samples has the mean loss of its n samples. Its loss is multiplied by n * world_size / B. DDP
  averages gradients over ranks, that is, divides their sum by world_size, so what is left is the sum of n / B times
  each mean: the mean over all B samples.
- Ranks with fewer samples run as many micro-batches as the others, with weight 0 where they have no sample, since
  forward and backward passes may hold collectives.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ..errors import ConfigError
from ..launching.distributed import RankContext
from ..launching.processes import STOP_SIGNALS, die_with_parent, signals_blocked
from .config import LoaderConfig
from .random_states import (
    derive_seed,
    generators_of,
    generators_restored,
    seed_cpu,
    seed_generators,
)
from .ranks import all_reduce, from_main, gather_objects, num_usable_cores
from .task import Task, inner

Order = Callable[[int], Any]
"""Returns the draws of an epoch: a tensor, or an object that can be sliced as one.

A draw modulo num_samples is a sample's index. Samples are seeded from draws, so repeats are augmented differently.
"""


@dataclass(slots=True)
class Request:
    """Lists the samples of one micro-batch. It is not a tuple, since pin_memory would search a tuple for tensors."""

    epoch: int
    indices: list[int]
    draws: list[int]  # what each sample's random seed derives from: an entry of the epoch's order
    num_samples: int  # how many of them count: all, or 0 for a filler, which a rank runs to stay together with others
    # A stream has no indices. There, num_samples says how many items to read and, once read, how many there were.
    weight: float = 0.0  # in training: num_samples * world_size / samples of the global batch
    is_last: bool = False  # in training: the last one of this rank in its step
    cursor: Any = None  # in a stream: where to begin reading and, once read, where that ended


class MicroBatch(NamedTuple):
    """Holds the samples of one forward pass, and the Request that asked for them."""

    batch: Any
    request: Request


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return each index once, shuffled: an int64 tensor (num_samples,), the same on every rank."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -1))
    return torch.randperm(num_samples, generator=generator)


def cut_share(
    batch: list[int], rank: int, world_size: int, micro_batch_size: int
) -> list[list[int]]:
    """Return this rank's micro-batches of a batch. All ranks get equally many, and some of them may be empty.

    Shares differ by at most one sample. None is larger than rank 0's, whose micro-batches are thus never empty, and
    whose BatchNorm statistics are the ones that are saved.
    """
    largest_share = -(-len(batch) // world_size)
    return split(split(batch, world_size)[rank], -(-largest_share // micro_batch_size))


def split(samples: list[int], num_parts: int) -> list[list[int]]:
    """Split a list into parts whose sizes differ by at most one, the larger ones first."""
    size, num_larger = divmod(len(samples), num_parts)
    bounds = [part * size + min(part, num_larger) for part in range(num_parts + 1)]
    return [samples[start:stop] for start, stop in pairwise(bounds)]


def numbers_of(dataset: Any, name: str) -> Tensor | None:
    """Return the data set's attribute `name` as a float64 tensor, one number per sample, or None if it is not set.

    A Subset or ConcatDataset has the numbers of its data sets. Raise ConfigError if another data set hides them.
    """
    values, kind = getattr(dataset, name, None), type(dataset).__name__
    holders = (
        []
        if hasattr(dataset, name)
        else [one for one in inner(dataset) if getattr(one, name, None) is not None]
    )
    if holders:
        parts = [
            numbers_of(part, name) for part in getattr(dataset, "datasets", inner(dataset)[:1])
        ]
        if not isinstance(dataset, Subset | ConcatDataset) or any(part is None for part in parts):
            remedy = "Give it to the data set that build_datasets() returns, if that is no stream; None turns it off"
            raise ConfigError(
                f"{name} of {type(holders[0]).__name__} is out of reach (in {kind}). {remedy}."
            )
        values = torch.cat(cast(Any, parts))[
            torch.as_tensor(getattr(dataset, "indices", range(len(dataset))))
        ]
    if values is None:
        return None
    numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if (shape := tuple(numbers.shape)) != (len(dataset),):
        raise ConfigError(f"{name} of {kind} has the shape {shape}, not one number per sample.")
    return numbers


def is_stream(dataset: Any) -> bool:
    """Return True if the data set can only be iterated: it has no __len__, or neither __getitem__ nor __getitems__."""
    own = {name for kind in type(dataset).__mro__ if kind is not Dataset for name in vars(kind)}
    return "__len__" not in own or not own & {"__getitem__", "__getitems__"}


def check_dataset(dataset: Any, name: str) -> int:
    """Count the samples. Raise ConfigError if the count is 0 or unknown, or if ranks disagree. All ranks call this."""
    if is_stream(dataset):
        rule = "a stream can be trained on, not evaluated. Return a list of its first items, say"
        raise ConfigError(f"the {name} data set has no __len__ and __getitem__: {rule}.")
    gathered = gather_objects(len(dataset))
    lengths: list[int] = from_main(lambda: gathered)
    if min(lengths) != max(lengths):
        rule = "Every rank must see the same ones: is a folder still being filled, or a node's copy not whole?"
        raise ConfigError(f"the {name} data set differs between ranks: {lengths} samples. {rule}")
    if lengths[0] == 0:
        raise ConfigError(
            f"the {name} data set is empty: build_datasets() must return at least one sample."
        )
    return lengths[0]


class TrainLoader:
    """Reads this rank's micro-batches, step after step and epoch after epoch. It can begin anywhere in an epoch."""

    cursor: Any = None  # what a stream's checkpoint must hold besides epoch and position

    def __init__(
        self, dataset: Dataset[Any], task: Task, config: LoaderConfig, context: RankContext, *, seed: int,
        global_batch_size: int, micro_batch_size: int | str, order: Order | None = None,
    ) -> None:  # fmt: skip
        self._reader = BatchReader(dataset, task, config, context, seed, "training")
        self.num_samples, self.global_batch_size = self._reader.num_samples, global_batch_size
        self.steps_per_epoch = -(-self.num_samples // global_batch_size)
        largest_share = -(-min(global_batch_size, self.num_samples) // context.world_size)
        self.micro_batch_size = largest_share
        if micro_batch_size != "auto":
            self.micro_batch_size = min(int(micro_batch_size), largest_share)
        self._context, self._task = context, task
        self._order = order or partial(epoch_order, self.num_samples, seed)
        self.seconds_waited = 0.0  # in reading, or for the workers that read

    def start(self, epoch: int, position: int) -> None:
        """Make the next step begin at sample number `position` of epoch number `epoch`. Both numbers count from 0."""
        self._batches = self._reader.read(self._requests(epoch, position))

    def next_step(self, module: nn.Module) -> Iterator[tuple[MicroBatch, float | Tensor]]:
        """Yield this rank's micro-batches of the next global batch, each with the weight to multiply its loss by.

        If model.py defines loss_weight(), the weights are fractions of the global batch's total loss weight.
        """
        if self._task.loss_weight is None:
            for micro_batch in self._next_batches():
                yield micro_batch, micro_batch.request.weight
            return
        held = list(self._next_batches())
        weights = torch.stack(
            [loss_weight_of(micro_batch, self._task, module, self._context) for micro_batch in held]
        )
        total = all_reduce(weights.sum())
        # all weights of a batch may be 0
        scale = torch.where(total == 0, 0.0, self._context.world_size / total)
        yield from zip(held, weights * scale, strict=True)

    def read_first(self, epoch: int, position: int, choose: Any = max) -> MicroBatch:
        """For a dry run, return the largest micro-batch of the step at this position, or the smallest if choose=min."""
        requests = self._cut(*next(self._global_batches(epoch, position)))
        chosen = choose(requests, key=lambda request: len(request.indices))
        # A worker reads, if there is one: workers that are forked later would share a file that is opened here.
        return next(self._reader.read([chosen]))  # start() must be called before training reads on

    def close(self) -> None:
        del self._batches, self._reader  # this ends the worker processes

    def _next_batches(self) -> Iterator[MicroBatch]:
        asked_at = time.perf_counter()
        for micro_batch in self._batches:
            self.seconds_waited += time.perf_counter() - asked_at
            yield micro_batch
            if micro_batch.request.is_last:
                return
            asked_at = time.perf_counter()

    def _requests(self, epoch: int, position: int) -> Iterator[Request]:
        batches = self._global_batches(epoch, position)
        while True:  # 32 steps at once: one by one, with CPU caches that a step has left cold, they take far longer
            yield from chain.from_iterable([self._cut(*batch) for batch in islice(batches, 32)])

    def _global_batches(self, epoch: int, position: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (epoch, draws) for each global batch, without end. Start at `position`."""
        while True:
            order = self._order(epoch)
            for start in range(position, self.num_samples, self.global_batch_size):
                yield (
                    epoch,
                    order[start : min(start + self.global_batch_size, self.num_samples)].tolist(),
                )
            epoch, position = epoch + 1, 0

    def _cut(self, epoch: int, global_batch: list[int]) -> list[Request]:
        """Return a Request for each micro-batch in this rank's share of the global batch."""
        world_size, requests = self._context.world_size, []
        pieces = cut_share(global_batch, self._context.rank, world_size, self.micro_batch_size)
        for piece in pieces:
            draws = piece or global_batch[:1]
            indices = [draw % self.num_samples for draw in draws]
            weight = len(piece) * world_size / len(global_batch)
            requests.append(Request(epoch, indices, draws, len(piece), weight))
        requests[-1].is_last = True
        return requests


class EvaluationLoader:
    """Gives each evaluated sample to exactly one rank. All ranks read the same number of micro-batches."""

    def __init__(
        self, dataset: Dataset[Any], task: Task, config: LoaderConfig, context: RankContext, name: str,
        limit: int | None = None,
    ) -> None:  # fmt: skip
        self._reader, self._context = BatchReader(dataset, task, config, context, 0, name), context
        num_all = self._reader.num_samples
        self.num_samples = min(num_all, limit or num_all)
        # With a limit, take samples at even distances: the first ones may be of one class.
        order = torch.arange(self.num_samples) * num_all // self.num_samples
        # like lengths together, long ones first
        if (lengths := numbers_of(dataset, "sample_lengths")) is not None:
            order = order[(-lengths[order]).argsort(stable=True)]
            order = torch.cat(
                [order[rank :: context.world_size] for rank in range(context.world_size)]
            )
        self._order: list[int] = order.tolist()

    def read(self, micro_batch_size: int) -> Iterator[MicroBatch]:
        """Read this rank's micro-batches."""
        # Lists: an iterator would hold self, and keep the workers alive until a garbage collection.
        for micro_batch in self._reader.read(
            [self._request(piece) for piece in self._cut(micro_batch_size)]
        ):
            self._seed(micro_batch)
            yield micro_batch

    def read_first(self, micro_batch_size: int, num_parts: int) -> Iterator[MicroBatch]:
        """Read the first micro-batch alone, in so many parts."""
        parts = split(self._cut(micro_batch_size)[0], num_parts)
        requests = [self._request(part) for part in parts]
        for number, micro_batch in enumerate(self._reader.read(requests)):
            if number == 0:  # the parts draw what their whole does
                self._seed(micro_batch)
            yield micro_batch

    def _cut(self, micro_batch_size: int) -> list[list[int]]:
        return cut_share(
            self._order, self._context.rank, self._context.world_size, micro_batch_size
        )

    def _request(self, piece: list[int]) -> Request:
        indices = piece or [0]
        return Request(0, indices, indices, len(piece))

    def _seed(self, micro_batch: MicroBatch) -> None:
        """Make what the model draws depend on nothing that came before."""
        # MPS's is not restored
        seed = seed_cpu if self._context.device.type == "mps" else seed_generators
        seed(derive_seed(0, 0, micro_batch.request.indices[0]))


class Fetcher(Dataset[MicroBatch]):
    """Reads the samples that a Request lists. Afterwards, it restores the states of the random generators.

    To make augmentation repeatable, it seeds the random generators, and those that the data set owns, from a hash of
    (seed, epoch, index) before it reads each sample, and again before it collates the batch. Samples that
    `__getitems__` reads together share one seed.
    """

    max_workers = 8
    _is_checked = False  # its batches are as they should be
    # the data set's generators, once this process has looked for them
    _own: list[Any] | None = None

    def __init__(self, dataset: Dataset[Any], task: Task, seed: int) -> None:
        self._dataset: Any = dataset
        self._task = task
        self._roots: list[Any] = [dataset]  # where to look for generators, besides dataset.py
        self._seed, self._epoch = seed, -1
        # a Subset has __getitems__ whatever the data set below offers
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        self._has_whole_batches = hasattr(dataset, "__getitems__")
        # Hugging Face
        self.is_quick = self._has_whole_batches and not type(dataset).__module__.startswith(
            "datasets."
        )

    def __getitem__(self, request: Request) -> MicroBatch:
        try:
            self.set_epoch(request.epoch)
            micro_batch = MicroBatch(self._read(request), request)
            # a batch that collate() or __getitems__ makes may differ from the first
            if not self._is_checked:
                check_batch(
                    micro_batch.batch, len(request.indices) or request.num_samples, self._task
                )
                self._is_checked = (
                    self._task.collate is default_collate and not self._has_whole_batches
                )
            return micro_batch
        # it would end the loop over batches without an error
        except (
            StopIteration,
            SystemExit,
        ) as error:
            raise RuntimeError(
                f"the data set, or its collate function, raised {type(error).__name__}"
            ) from error
        except ConfigError:
            raise
        except Exception as error:
            if "default_collate: batch must" in str(error) or "automatic differentiation" in str(
                error
            ):
                raise ConfigError(
                    f"{error} Mend the samples in dataset.py, or write collate(items) there."
                ) from None
            error.add_note(
                f"while reading the samples {request.indices} of {type(self._dataset).__name__}"
            )
            raise

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            for one in (
                [self._dataset] if hasattr(self._dataset, "set_epoch") else inner(self._dataset)
            ):
                getattr(one, "set_epoch", lambda _: None)(epoch)
        self._epoch = epoch

    def _read(self, request: Request) -> Any:
        dataset, rows = self._dataset, request.indices
        if type(dataset) is Subset:
            rows, dataset = [int(dataset.indices[row]) for row in rows], dataset.dataset
        if type(dataset) is TensorDataset and self._task.collate is default_collate:
            # once: each tensor would make its own from a list
            index = torch.from_numpy(numpy.array(rows))
            # as collated items, without reading them one by one
            return [tensor[index] for tensor in dataset.tensors]
        # in a worker, nobody else draws
        with generators_restored() if get_worker_info() is None else nullcontext():
            is_first, batch = self._own is None, self._read_seeded(request)
            own = generators_of(*self._roots, self._task.data_globals) if is_first else []
            if len(own) > len(self._own or ()):  # some were made when first used
                self._own = own
                batch = self._read_seeded(request)
            return batch

    def _read_seeded(self, request: Request) -> Any:
        items: Any = []
        if not self._has_whole_batches:
            for draw, index in zip(request.draws, request.indices, strict=True):
                self._seed_for(request.epoch, draw)
                items.append(self._dataset[index])
        self._seed_for(request.epoch, -3 - request.draws[0])
        if self._has_whole_batches:
            items = self._dataset.__getitems__(request.indices)
        return self._task.collate(items) if isinstance(items, list) else items

    def _seed_for(self, epoch: int, number: int) -> None:
        if self._own is None:
            self._own = generators_of(*self._roots, self._task.data_globals)
        seed_cpu(derive_seed(self._seed, epoch, number), self._own)


class Requests:
    """A sampler for the DataLoader. The samples that it requests can be changed without restarting the workers."""

    now: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)


class BatchReader:
    """Reads micro-batches and moves them to the rank's device. Its worker processes live as long as this object."""

    def __init__(
        self,
        dataset: Any,
        task: Task,
        config: LoaderConfig,
        context: RankContext,
        seed: int,
        name: str,
    ) -> None:
        self.num_samples = check_dataset(dataset, name)
        self.fetcher: Any = (
            dataset if isinstance(dataset, Fetcher) else Fetcher(dataset, task, seed)
        )
        self._requests, self.device = Requests(), context.device
        # A worker's pipe costs about 1 ms a batch, and on the CPU the cores are busy.
        is_slow = context.device.type == "cuda" and not self.fetcher.is_quick
        num_auto = (
            min(self.fetcher.max_workers, num_usable_cores() // context.local_world_size)
            if is_slow
            else 0
        )
        self.num_workers = num_auto if config.num_workers == "auto" else config.num_workers
        self._loader: DataLoader[MicroBatch] | None = None
        if self.num_workers or context.device.type != "cpu":
            self._loader = DataLoader(
                self.fetcher,
                batch_size=None,  # a request is a whole micro-batch already
                collate_fn=cast(
                    Any, MicroBatch._make
                ),  # torch's own would turn tuples into lists, arrays into tensors
                sampler=cast(Any, self._requests),
                num_workers=self.num_workers,
                prefetch_factor=config.prefetch_factor if self.num_workers else None,
                persistent_workers=self.num_workers > 0,
                pin_memory=context.device.type == "cuda",
                worker_init_fn=partial(_start_worker, os.getpid()),
                # By default a rank that a fork server has started would start one of its own, which imports torch anew.
                multiprocessing_context="fork"
                if self.num_workers and sys.platform == "linux"
                else None,
                generator=torch.Generator(),  # otherwise each iterator would draw from the run's own generator
            )

    def read(self, requests: Iterable[Request]) -> Iterator[MicroBatch]:
        """Return an iterator over the requested micro-batches, in order. It is valid until the next call of read()."""
        if self._loader is None:
            return map(self.fetcher.__getitem__, requests)
        self._requests.now = requests
        # they would kill a worker that starts
        with signals_blocked() if self._loader.num_workers else nullcontext():
            micro_batches = iter(self._loader)
        if self.device.type == "cpu":
            return micro_batches
        return (
            micro_batch._replace(batch=move(micro_batch.batch, self.device))
            for micro_batch in micro_batches
        )


def _start_worker(rank_pid: int, _worker_id: int) -> None:
    die_with_parent(rank_pid)
    os.setpgrp()  # Ctrl-C goes to a whole group: the rank decides, and saves first
    for number in STOP_SIGNALS:  # some schedulers signal each process of a run
        signal.signal(number, signal.SIG_IGN)
    # for the processes that user code starts here
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@runtime_checkable
class Movable(Protocol):
    to: Any  # the method of a tensor, a graph, a tokenizer's output


def move(batch: Any, device: torch.device) -> Any:
    """Move everything that has a to() method to `device`, including items of lists, mappings and dataclasses."""

    def move_one(value: Movable) -> Any:
        return (
            value.to(device, non_blocking=device.type == "cuda")
            if isinstance(value, Tensor)
            else value.to(device)
        )

    return apply_to_collection(batch, dtype=Movable, function=move_one)


@torch.no_grad()
def loss_weight_of(
    micro_batch: MicroBatch, task: Task, module: nn.Module, context: RankContext
) -> Tensor:
    """Return this micro-batch's loss weight as a 0-dim tensor. It is 0 if no sample counts toward the loss."""
    weight: Any = micro_batch.request.num_samples
    if task.loss_weight is not None and weight:
        weight = task.loss_weight(micro_batch.batch, module)
    # a copy from the host would wait
    return torch.ones((), dtype=context.sum_dtype, device=context.device).mul(weight)


def check_batch(batch: Any, num_samples: int, task: Task) -> None:
    """Raise ConfigError if a batch requires a gradient, or has left samples out that its weight in the loss counts."""
    entries = [*entries_of(batch)]
    if any(getattr(entry, "requires_grad", False) for entry in entries):
        raise ConfigError(
            "samples require a gradient. Detach them in dataset.py; compute_loss may require one anew."
        )
    largest = max(
        [len(entry) for entry in entries if getattr(entry, "ndim", 1)], default=num_samples
    )
    # also (T, B), where loss_weight() can return B
    if largest < num_samples and task.loss_weight is None:
        remedy = (
            "Leave none out, or let loss_weight() of model.py return what the loss is a mean over"
        )
        raise ConfigError(
            f"dataset.py made a batch of {largest} entries from {num_samples} samples. {remedy}."
        )


def entries_of(batch: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and lists in a batch. In a list, look at the first item only."""
    if isinstance(batch, Tensor | numpy.ndarray | list):
        yield batch
    parts: Any = batch[:1] if isinstance(batch, list) else batch if isinstance(batch, tuple) else ()
    if is_dataclass(batch) or isinstance(batch, Mapping):
        parts = (batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})).values()
    for part in parts:
        yield from entries_of(part)

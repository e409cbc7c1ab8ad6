"""Reads the micro-batches that loader.py asks for, in worker processes or in the rank, and moves them to the device."""

import copy
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from ..config import LoaderConfig
from ..launching.distributed import RankContext
from ..launching.processes import STOP_SIGNALS, die_with_parent, num_usable_cores, signals_blocked
from .random_state import derive_seed, generators_restored, seed_generators

Collate = Callable[[list[Any]], Any]


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


class Fetcher(Dataset[MicroBatch]):
    """Reads one requested micro-batch. The random generators are seeded from (seed, epoch, index) before each item.

    A data set whose `__getitems__` returns a whole batch is asked once for it, and derives its random numbers from
    `set_epoch(epoch)` and the indices itself.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None, seed: int, *, is_ahead: bool = False) -> None:
        self._dataset, self._collate, self._seed = dataset, collate or default_collate, seed
        self._epoch: int | None = None
        # Read ahead of their step, or outside of any, collate and `__getitems__` are seeded per micro-batch. Otherwise
        # they draw from the rank's generators, whose states a checkpoint holds.
        self.is_ahead = is_ahead
        while isinstance(dataset, Subset):  # a Subset has __getitems__ whatever the data set below offers
            dataset = dataset.dataset
        self.has_whole_batches = hasattr(dataset, "__getitems__")

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
            return self._collate(batch) if isinstance(batch, list) else batch
        items = []
        with generators_restored():
            for index in request.indices:
                seed_generators(derive_seed(self._seed, request.epoch, index), is_cpu_only=True)
                items.append(self._dataset[index])
        return self._collate(items)


def read_batches(
    fetcher: Fetcher, requests: Iterable[Request], config: LoaderConfig, context: RankContext
) -> Iterator[MicroBatch]:
    """The requested micro-batches in order, on the rank's device. Dropping the iterator ends its workers."""
    is_on_cpu = context.device.type == "cpu"
    if config.num_workers != "auto":
        num_workers = config.num_workers
    elif is_on_cpu or fetcher.has_whole_batches:
        num_workers = 0  # a worker's pipe costs about 1 ms a batch, and on the CPU the cores are busy computing
    else:
        num_workers = min(8, num_usable_cores() // context.local_world_size)
    if is_on_cpu and num_workers == 0:
        return (fetcher[request] for request in requests)
    fetcher = copy.copy(fetcher)
    fetcher.is_ahead = True
    loader: DataLoader[MicroBatch] = DataLoader(
        fetcher,
        batch_size=None,  # a request is a whole micro-batch already
        collate_fn=cast(Any, _identity),  # torch's own would turn tuples into lists, and arrays into tensors
        sampler=cast(Any, requests),
        num_workers=num_workers,
        prefetch_factor=config.prefetch_factor if num_workers else None,
        pin_memory=not is_on_cpu,
        worker_init_fn=partial(_start_worker, os.getpid()),
        # A rank started by a fork server would start a server of its own for them, and each would import torch anew.
        multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # otherwise each iterator would draw from the run's own generator
    )
    with signals_blocked() if num_workers else nullcontext():  # a worker that one reaches at its start would die
        micro_batches = iter(loader)
    if is_on_cpu:
        return micro_batches
    return (micro_batch._replace(batch=move(micro_batch.batch, context.device)) for micro_batch in micro_batches)


@runtime_checkable
class Movable(Protocol):
    """A tensor, or another object with a method `to`: a graph, a tokenizer's output."""

    def to(self, device: torch.device, **options: Any) -> Any: ...


def move(batch: Any, device: torch.device) -> Any:
    """The batch with everything movable on `device`; tuples, lists, mappings and dataclasses keep their types."""

    def move_one(value: Movable) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)

    return apply_to_collection(batch, dtype=Movable, function=move_one)


def _identity(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch


def _start_worker(rank_pid: int, _worker_id: int) -> None:
    die_with_parent(rank_pid)
    os.setpgrp()  # Ctrl-C goes to a whole group: the rank decides, and saves first
    for number in STOP_SIGNALS:  # some schedulers signal each process of a run
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # for the processes that user code starts here
    torch.set_num_threads(1)

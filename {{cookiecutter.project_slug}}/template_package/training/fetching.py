"""Reads the micro-batches that loader.py asks for: in worker processes or in the rank itself, collated, on the device.

Random augmentation is made exact here: the generators are seeded per sample, so neither rank nor worker nor position
matters. What a collate function draws is the micro-batch's own, wherever it is read ahead.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import tee
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from ..config import LoaderConfig
from ..launching.distributed import RankContext
from ..launching.starting import RunEnds, num_usable_cores, signals_held_back
from .random_state import cpu_generators_put_back, mix, seed_cpu_generators
from .transfer import to_device
from .workers import WaitedFor, kill_workers, samples_named, start_worker

Collate = Callable[[list[Any]], Any]


@dataclass(slots=True)
class Request:
    """A micro-batch to read: `num_samples` of `indices` count, with `weight` in the step's loss.

    No tuple: the loader would look at each index in search of tensors to pin.
    """

    epoch: int
    indices: list[int]
    num_samples: int
    weight: float
    is_last: bool


class MicroBatch(NamedTuple):
    """What one forward pass sees, and the request it answers."""

    batch: Any
    request: Request


class Fetcher(Dataset[MicroBatch]):
    """Reads one requested micro-batch; runs in a worker, or in the rank itself when there are none.

    Before each item the random generators are seeded from (seed, epoch, index), so that augmentation is the same on any
    rank, in any worker and at any position. A data set whose `__getitems__` returns a whole batch is asked once for it.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None, seed: int, *, draws_alone: bool = False) -> None:
        self._dataset, self._collate, self._seed = dataset, collate or default_collate, seed
        self._epoch: int | None = None
        self.draws_alone = draws_alone
        """What draws from the rank's generators at its step resumes with them (collate, `__getitems__`). Read ahead, or
        in a worker, it draws from a seed of its own."""
        self.hands_out_batches = _hands_out_batches(dataset)

    def __getitem__(self, request: Request) -> MicroBatch:
        if not self.draws_alone:
            return self._read(request)
        with cpu_generators_put_back():
            seed_cpu_generators(mix(self._seed, request.epoch, -3 - request.indices[0]))
            return self._read(request)

    def _read(self, request: Request) -> MicroBatch:
        with samples_named(request.indices):
            try:
                return MicroBatch(self._batch(request), request)
            except (StopIteration, SystemExit) as error:  # who iterates over the batches would take one for their end
                if isinstance(error, RunEnds):
                    raise
                raise RuntimeError(f"the data set, or its collate function, raised {type(error).__name__}") from error

    def _batch(self, request: Request) -> Any:
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            if hasattr(self._dataset, "set_epoch"):  # not of one below a Subset: others may share that
                self._dataset.set_epoch(request.epoch)
        if self.hands_out_batches:
            batch = cast(Any, self._dataset).__getitems__(request.indices)
            return self._collate(batch) if isinstance(batch, list) else batch
        items = self._items(request)
        with _odd_one_named(items, request.indices):
            return self._collate(items)

    def _items(self, request: Request) -> list[Any]:
        items = []
        with cpu_generators_put_back():
            for index in request.indices:
                seed_cpu_generators(mix(self._seed, request.epoch, index))
                try:
                    items.append(self._dataset[index])
                except (Exception, SystemExit) as error:
                    error.add_note(f"while reading sample {index} of {type(self._dataset).__name__}")
                    raise
        return items


@contextmanager
def _odd_one_named(items: list[Any], indices: list[int]) -> Iterator[None]:
    """In the body they become a batch; if that fails, the error tells which differs in form from most."""
    try:
        yield
    except Exception as error:
        forms = [_form(item) for item in items]
        usual = Counter(forms).most_common(1)[0][0]
        odd = [(index, form) for index, form in zip(indices, forms, strict=True) if form != usual]
        for index, form in odd[:1]:
            error.add_note(f"sample {index} is {form}; most others of its micro-batch are {usual}")
        raise


def _form(item: Any) -> str:
    """`(float32 (6,), int)`"""
    if isinstance(item, Mapping):
        return "{" + ", ".join(f"{key}: {_form(value)}" for key, value in item.items()) + "}"
    if isinstance(item, list | tuple):
        return "(" + ", ".join(map(_form, item)) + ")"
    if hasattr(item, "shape") and hasattr(item, "dtype"):
        return f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
    return type(item).__name__


def read_batches(
    fetcher: Fetcher, requests: Iterable[Request], config: LoaderConfig, context: RankContext
) -> Iterator[MicroBatch]:
    """The requested micro-batches in order, on the rank's device. Dropping the iterator ends its workers."""
    num_workers = _num_workers(config, fetcher, context)
    if context.device.type == "cpu" and num_workers == 0:
        return (fetcher[request] for request in requests)
    ahead = copy.copy(fetcher)
    ahead.draws_alone = True
    requests, asked = tee(requests)
    loader: DataLoader[MicroBatch] = DataLoader(
        ahead,
        batch_size=None,  # a request is a whole micro-batch already
        collate_fn=cast(Any, _as_it_is),  # torch's own would turn tuples into lists, and arrays into tensors
        sampler=cast(Any, requests),
        num_workers=num_workers,
        prefetch_factor=config.prefetch_factor if num_workers else None,
        pin_memory=context.device.type == "cuda",
        worker_init_fn=partial(start_worker, os.getpid()),
        # A rank started by a fork server would start a server of its own for them, and each would import torch anew.
        multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # otherwise each iterator would draw from the run's own generator
    )
    with signals_held_back() if num_workers else nullcontext():  # torch ends a worker that one reaches at its start
        micro_batches = WaitedFor(iter(loader), (request.indices for request in asked))
    atexit.unregister(kill_workers)
    atexit.register(kill_workers)  # now, so that it comes before torch's own, which waits 5 seconds for each of them
    return micro_batches if context.device.type == "cpu" else to_device(micro_batches, context.device)


def _num_workers(config: LoaderConfig, fetcher: Fetcher, context: RankContext) -> int:
    if config.num_workers != "auto":
        return int(config.num_workers)
    if fetcher.hands_out_batches or context.device.type == "cpu":
        return 0  # a worker's pipe costs about 1 ms a batch, and on CPU the cores are busy computing
    return min(8, num_usable_cores() // context.local_world_size)


def _as_it_is(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch


def _hands_out_batches(dataset: Any) -> bool:
    while isinstance(dataset, Subset):  # a Subset has __getitems__ whatever the data set below offers
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")

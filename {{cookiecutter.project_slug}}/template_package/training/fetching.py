"""Reads the micro-batches that loader.py asks for: in worker processes or in the rank itself, collated, on the device.

Random augmentation is made exact here: the generators are seeded per sample, so neither rank nor worker nor position
matters.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import multiprocessing
import os
import random
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from ..config import LoaderConfig
from ..launching.distributed import RankContext
from ..launching.starting import ENDINGS, die_with_parent, num_usable_cores

Collate = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """A micro-batch to read: `num_samples` of `indices` count, with `weight` in the step's loss."""

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

    def __init__(self, dataset: Dataset[Any], collate: Collate | None, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate or default_collate, seed
        self._epoch: int | None = None
        self.hands_out_batches = _hands_out_batches(dataset)

    def __getitem__(self, request: Request) -> MicroBatch:
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(request.epoch)
        try:
            if self.hands_out_batches:
                batch = cast(Any, self._dataset).__getitems__(request.indices)
                if isinstance(batch, list):
                    batch = self._collate(batch)
            else:
                batch = self._collate(self._items(request))
        except Exception as error:
            error.add_note(f"in a micro-batch of the samples {request.indices}")
            raise
        return MicroBatch(batch, request)

    def _items(self, request: Request) -> list[Any]:
        states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        items = []
        for index in request.indices:
            _seed_generators(mix(self._seed, request.epoch, index))
            try:
                items.append(self._dataset[index])
            except Exception as error:
                error.add_note(f"while reading sample {index} of {type(self._dataset).__name__}")
                raise
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        return items


def read_batches(
    fetcher: Fetcher, requests: Iterable[Request], config: LoaderConfig, context: RankContext
) -> Iterator[MicroBatch]:
    """The requested micro-batches in order, on the rank's device. Dropping the iterator ends its workers."""
    num_workers = _num_workers(config, fetcher, context)
    if context.device.type == "cpu" and num_workers == 0:
        return (fetcher[request] for request in requests)
    loader: DataLoader[MicroBatch] = DataLoader(
        fetcher,
        batch_size=None,  # a request is a whole micro-batch already
        collate_fn=cast(Any, _as_it_is),  # torch's own would turn tuples into lists, and arrays into tensors
        sampler=cast(Any, requests),
        num_workers=num_workers,
        prefetch_factor=config.prefetch_factor if num_workers else None,
        pin_memory=context.device.type == "cuda",
        worker_init_fn=partial(_start_worker, os.getpid()),
        # A rank started by a fork server would start a server of its own for them, and each would import torch anew.
        multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # otherwise each iterator would draw from the run's own generator
    )
    micro_batches = iter(loader)
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)  # now, so that it comes before torch's own, which waits 5 seconds for each of them
    return micro_batches if context.device.type == "cpu" else _to_device(micro_batches, context.device)


def _num_workers(config: LoaderConfig, fetcher: Fetcher, context: RankContext) -> int:
    if config.num_workers != "auto":
        return int(config.num_workers)
    if fetcher.hands_out_batches or context.device.type == "cpu":
        return 0  # a worker's pipe costs about 1 ms a batch, and on CPU the cores are busy computing
    return min(8, num_usable_cores() // context.local_world_size)


def _as_it_is(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch


def _start_worker(rank_pid: int, _worker_id: int) -> None:
    die_with_parent(rank_pid)
    os.setpgrp()  # Ctrl-C and a scheduler's SIGTERM go to a whole group: the rank decides, and saves first
    for number in ENDINGS:  # some tell each process of a run
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _kill_workers() -> None:
    """At exit. Python would ask them to end, which they do not hear, and wait."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise that a worker was killed
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _to_device(micro_batches: Iterable[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Each micro-batch on the device, the next one's copy under way on a stream of its own while this one computes."""
    copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ready: tuple[MicroBatch, torch.cuda.Event] | None = None
    for micro_batch in micro_batches:
        # Memory of former batches is used again here: not before what reads them has run.
        copy_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copy_stream):
            upcoming = micro_batch._replace(batch=move(micro_batch.batch, device)), copy_stream.record_event()
        if ready is not None:
            yield _wait_for_copy(*ready)
        ready = upcoming
    if ready is not None:
        yield _wait_for_copy(*ready)


def _wait_for_copy(micro_batch: MicroBatch, copied: torch.cuda.Event) -> MicroBatch:
    torch.cuda.current_stream().wait_event(copied)
    return micro_batch


def move(value: Any, device: torch.device) -> Any:
    """A batch of the same type with its tensors on `device`: what has `.to()` by itself, the items of tuples, lists,
    mappings and dataclasses; anything else as it is.
    """
    if isinstance(value, Tensor | PackedSequence):
        return cast(Any, value).to(device, non_blocking=True)
    if hasattr(value, "to") and not isinstance(value, type):  # a graph, a tokenizer's output
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # NamedTuple
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move(item, device) for item in value)
    if isinstance(value, Mapping):
        moved: Any = copy.copy(value) if isinstance(value, MutableMapping) else {}
        for key, item in value.items():
            moved[key] = move(item, device)
        return moved
    if is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)  # not made anew: its __post_init__ has run
        for field in fields(value):
            object.__setattr__(moved, field.name, move(getattr(value, field.name), device))
        return moved
    return value


def _hands_out_batches(dataset: Any) -> bool:
    while isinstance(dataset, Subset):  # a Subset has __getitems__ whatever the data set below offers
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def _seed_generators(value: int) -> None:
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)  # not torch.manual_seed: that would move the GPU's generator too


def mix(seed: int, epoch: int, index: int) -> int:
    """A 63-bit seed that differs for every (seed, epoch, index): neighbours share no bits, as sums of them would."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

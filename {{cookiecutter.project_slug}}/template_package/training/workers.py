"""A loader's worker processes: how they begin and end; and which samples an error tells of, theirs or the rank's."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch

from ..launching.starting import ENDINGS, die_with_parent

MAX_NAMED = 64
"""Samples that an error lists."""
_all: WeakSet[WaitedFor] = WeakSet()


def start_worker(rank_pid: int, _worker_id: int) -> None:
    """What a worker does first."""
    die_with_parent(rank_pid)
    os.setpgrp()  # Ctrl-C and a scheduler's SIGTERM go to a whole group: the rank decides, and saves first
    for number in ENDINGS:  # some tell each process of a run
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)  # for what your code starts here
    torch.set_num_threads(1)


def kill_workers() -> None:
    """At exit. Python would ask them to end, which they do not hear, and wait."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise that a worker was killed
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class WaitedFor:
    """The micro-batches, and those that are still to come.

    No generator: an exception that passes through one would drop torch's iterator, which then waits for its workers.
    """

    def __init__(self, micro_batches: Iterator[Any], asked: Iterator[list[int]]) -> None:
        self._micro_batches, self.asked = micro_batches, asked
        _all.add(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        micro_batch = next(self._micro_batches)
        next(self.asked)
        return micro_batch

    def has_lost_worker(self) -> bool:
        has_ended = any(worker.exitcode is not None for worker in getattr(self._micro_batches, "_workers", ()))
        return has_ended and self._num_outstanding() > 0

    def outstanding(self) -> list[int]:
        """The samples that workers were asked for and have not handed out; they read ahead."""
        return [index for indices in islice(self.asked, self._num_outstanding()) for index in indices]

    def _num_outstanding(self) -> int:
        loader: Any = self._micro_batches
        return int(loader._send_idx - loader._rcvd_idx) if hasattr(loader, "_send_idx") else 0  # torch 2.13


@contextmanager
def lost_samples_named() -> Iterator[None]:
    """If the system ends a worker while the body runs, the error tells which samples would have come next. torch raises
    it wherever this process then is: in a forward pass, in a save.
    """
    try:
        yield
    except RuntimeError as error:
        if is_of_worker(error):
            for waited in [waited for waited in _all if waited.has_lost_worker()]:
                error.add_note(f"while waiting for {name_samples(waited.outstanding())}")
        raise


def is_of_worker(error: Exception) -> bool:
    """Whether it is torch's, which says that a worker was killed."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


@contextmanager
def samples_named(indices: list[int]) -> Iterator[None]:
    """If the body fails, the error tells which samples it worked on."""
    try:
        yield
    except Exception as error:
        if not is_of_worker(error):
            error.add_note(f"in a micro-batch of {name_samples(indices)}")
        raise


def name_samples(indices: list[int]) -> str:
    more = f" and {len(indices) - MAX_NAMED} more" if len(indices) > MAX_NAMED else ""
    return f"the samples {indices[:MAX_NAMED]}{more}"

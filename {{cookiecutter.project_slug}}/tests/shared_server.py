"""A shared server to test on: GPUs in the place of the machine's own, and real processes, other users' among them."""
# ruff: noqa: N802 - the functions' names are pynvml's

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from secrets import token_hex
from types import SimpleNamespace
from typing import Any

import pynvml

from template_package.launching.gpus import GIB

OWN_USER = os.geteuid()
IS_ROOT = OWN_USER == 0
NOBODY = 65534


class SimulatedNvml:
    """pynvml's functions for GPUs with these GiB free of 40. broken: one that is lost; processes[i]: ids on GPU i.

    Each object has GPUs of its own: their UUIDs, and so their locks, meet no other test's.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *free_gib: float, init_error: int = 0, mig: tuple[int, ...] = (), broken: int = -1) -> None:
        self.free_gib, self.init_error, self.mig, self.broken = list(free_gib), init_error, mig, broken
        self.processes: dict[int, list[int]] = {}
        self.own, self.num_reads = token_hex(8), 0

    def nvmlInit(self) -> None:
        if self.init_error:
            raise pynvml.NVMLError(self.init_error)

    def nvmlDeviceGetCount(self) -> int:
        self.num_reads += 1
        return len(self.free_gib)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abcdef'[handle]}1234567-89ab-{self.own}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"Simulated {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.free_gib[handle] < 0:  # as on machines where GPU and CPU share their memory
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(free=int(self.free_gib[handle] * GIB), total=40 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=10 * handle, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.processes.get(handle, [])]

    def nvmlDeviceGetMigMode(self, device: int) -> list[int]:
        if not self.mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(device in self.mig)] * 2


@contextmanager
def child(work: Callable[[Connection], None], uid: int = OWN_USER) -> Iterator[tuple[int, Connection]]:
    """(process id, pipe) of a process that runs work(its end of the pipe) as a user; SIGKILL at the body's end."""
    processes = multiprocessing.get_context("fork")  # starts in milliseconds, so that starts can meet
    own_end, end = processes.Pipe()
    process = processes.Process(target=_become, args=(uid, work, end))
    process.start()
    try:
        yield process.pid or 0, own_end
    finally:
        process.kill()
        process.join()


def _become(uid: int, work: Callable[[Connection], None], pipe: Connection) -> None:
    os.umask(0o077)
    if uid != OWN_USER:
        os.setgid(uid)
        os.setuid(uid)
    work(pipe)


def receive(pipe: Connection) -> Any:
    """What a child has sent."""
    assert pipe.poll(20), "no answer from a child"
    return pipe.recv()


@contextmanager
def someone_elses_process() -> Iterator[tuple[int, str]]:
    """The id and the user's name of a process whose owner is not who runs the tests."""
    if not IS_ROOT:
        yield 1, "root"
        return
    with child(_sleep, NOBODY) as (pid, pipe):
        receive(pipe)
        yield pid, "nobody"


def _sleep(pipe: Connection) -> None:
    pipe.send("asleep")
    time.sleep(60)

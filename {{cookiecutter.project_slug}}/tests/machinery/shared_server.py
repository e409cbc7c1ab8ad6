"""Helpers that imitate a shared server: simulated GPUs, and real processes of two users that compete for them."""
# ruff: noqa: N802 - the functions' names are pynvml's

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from template_package.core import launch
from template_package.core.launch import GIB, Devices, choose_devices
from template_package.core.settings import CommandLine, read_words

OWN_USER = os.geteuid()
IS_ROOT = OWN_USER == 0
NOBODY = 65534
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="locks, and /proc with processes' owners, are Linux's"
)


class SimulatedNvml:
    """The functions of pynvml for simulated GPUs, of which GPU i has `free_gib[i]` GiB free.

    A negative `free_gib[i]` means that the memory cannot be read. The GPU with the index `broken` is lost, and
    `processes[i]` lists the ids of the processes on GPU i. Each object has its own UUIDs, and therefore its own locks,
    so that tests that run at the same time share no lock.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *free_gib: float, init_error: int = 0, broken: int = -1) -> None:
        self.free_gib, self.init_error, self.broken = list(free_gib), init_error, broken
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

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.free_gib[handle] < 0:  # as on machines where GPU and CPU share their memory
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(free=int(self.free_gib[handle] * GIB))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.processes.get(handle, [])]


@contextmanager
def driver(nvml: SimulatedNvml, mask: str | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Put `nvml` in place of the driver, and `mask` in CUDA_VISIBLE_DEVICES, during the `with` body.

    Locks on GPUs that this process takes for good end with it, too.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as locks:

        class Lock(socket.socket):
            def detach(self) -> int:
                return locks.enter_context(self).fileno()

        patch.setattr(launch, "socket", SimpleNamespace(socket=Lock, AF_UNIX=socket.AF_UNIX))
        patch.setitem(sys.modules, "pynvml", nvml)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if mask is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", mask)
        yield patch


@contextmanager
def choice(
    device_ids: Any,
    nvml: SimulatedNvml,
    mask: str | None = None,
    num_ranks: int = 0,
    **options: Any,
) -> Iterator[Devices]:
    """Choose the devices of a run, and keep their locks during the `with` body. `options` are those of launch."""
    words = [f"launch.{key}={value}" for key, value in options.items()]
    line = CommandLine(Path())
    # no file is read: the user `nobody` may not even import the codec of one
    vars(line)["settings"] = read_words([f"device_ids={device_ids}", *words])
    with driver(nvml, mask):
        yield choose_devices(line, num_ranks)


@contextmanager
def child(
    work: Callable[[Connection], None], uid: int = OWN_USER
) -> Iterator[tuple[int, Connection]]:
    """Run `work` in a process of the user `uid`, with one end of a pipe as its argument.

    Yield the process id and the other end of the pipe. SIGKILL ends the process after the `with` body.
    """
    # starts in milliseconds, so that starts can meet
    processes = multiprocessing.get_context("fork")
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
    """Return the next object that a child sends. The test fails after 20 seconds without an object."""
    assert pipe.poll(20), "no answer from a child"
    return pipe.recv()


@contextmanager
def someone_elses_process() -> Iterator[tuple[int, str]]:
    """Yield the id of a process of another user, and the number of that user."""
    if not IS_ROOT:
        yield 1, "0"
        return
    with child(_sleep, NOBODY) as (pid, pipe):
        receive(pipe)
        yield pid, str(NOBODY)


def _sleep(pipe: Connection) -> None:
    pipe.send("asleep")
    time.sleep(60)

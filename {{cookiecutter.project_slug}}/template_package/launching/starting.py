"""How a process of ours begins: what it imports before it is needed, which signals reach it, and with whom it dies."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

from .environment import launcher_of

PARENT_AT_START = os.getppid()
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What asks a run to stop. A lost terminal (SIGHUP) and SLURM's warning (SIGUSR1) count as SIGTERM."""


class RunEnds(SystemExit):
    """This package ends the run in good order; any other SystemExit is somebody else's, whatever its code."""


early_requests: list[int] = []
"""Signals that asked this rank to stop before it could: training/stopping.py heeds them."""


def note_request(number: int, _frame: FrameType | None) -> None:
    """A signal handler for the time until then."""
    early_requests.append(number)


@contextmanager
def requests_end_it() -> Iterator[None]:
    """In the body what asks to stop ends this process with 143, where SIGUSR1 would end it with 138. A run that trains
    hears it first, and saves.
    """

    own_pid = os.getpid()

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own_pid:  # forked by somebody else's code
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        print("asked to stop: there is nothing to save", file=sys.stderr)
        raise RunEnds(128 + signal.SIGTERM)

    wanted = [number for number in ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    for number in wanted:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in wanted:
            signal.signal(number, signal.SIG_DFL)


def num_usable_cores() -> int:
    """Cores that this process may use (a scheduler may have given it fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_started_at() -> float:
    """When this process began, in seconds since 1970 (elsewhere than on Linux: about now)."""
    if sys.platform != "linux":
        return time.time()
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def die_with_parent(parent: int | None = None) -> None:
    """Ask the system to kill this process when its parent is gone (Linux), so that none is left on a GPU.

    parent: its id when this process began: if it has gone before this call, this process ends now.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def die_with_pipe(descriptor: int) -> None:
    """Kill this process when the other end of a pipe is closed, as it is when who holds it has gone.

    On Linux the system does it, whatever C code runs here; elsewhere a thread.
    """
    if sys.platform == "linux":
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([descriptor], timeout=0):
            os._exit(1)
    else:
        threading.Thread(target=lambda: wait([descriptor]) and os._exit(1), daemon=True).start()


_is_interrupted = False


def heed_ctrl_c() -> None:
    """From now on a Ctrl-C is noted too: one that comes while something is imported, Python may drop with a warning."""

    def note(_number: int, _frame: FrameType | None) -> None:
        global _is_interrupted  # noqa: PLW0603 - as a signal is
        _is_interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)


def raise_if_interrupted() -> None:
    """KeyboardInterrupt if one was dropped."""
    if _is_interrupted:
        raise KeyboardInterrupt


def escape_output() -> None:
    """Print characters that the encoding of stdout lacks as \\u…, here and in all processes that this one starts.
    What is printed to a closed one (`nohup … >&- &`) goes nowhere.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open() takes the lowest that is free
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8"))
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
        os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:backslashreplace"


def warm_up(words: Sequence[str], config_path: Path) -> None:
    """Start the fork server, if these words and this config look like several ranks: it imports what is slow, once for
    all of them, while this process reads the config. A wrong guess costs time alone.
    """
    starts_none = {"benchmark", "doctor", "smoke"} & {*words}
    if sys.platform != "linux" or launcher_of(os.environ) or starts_none:
        return
    # None of it may touch CUDA: a forked child could not use it. So nothing of yours is among them.
    modules = ("torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torchmetrics", "tqdm", "omegaconf")
    multiprocessing.set_forkserver_preload(list(modules))
    text = ""
    with suppress(OSError):  # told by who reads it for good
        if config_path.is_file():  # to open a pipe may take for ever
            with config_path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(100_000)  # a longer one is refused
    text += "".join(f"\n{word.replace('=', ': ')}" for word in words)
    device_ids = re.findall(r"^device_ids: *([^#\n]*)", text, re.MULTILINE)
    num_gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if device_ids and ("," in device_ids[-1] or (device_ids[-1].startswith("auto") and num_gpus > 1)):
        with signals_held_back():
            forkserver.ensure_running()


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Processes started in the body begin with these signals blocked: a fork server would otherwise die of them."""
    resource_tracker.ensure_running()  # before: its start ends with SIGINT and SIGTERM unblocked
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def choose_start_method(name: str) -> str:
    if name != "auto":
        return name
    return "forkserver" if sys.platform == "linux" else "spawn"

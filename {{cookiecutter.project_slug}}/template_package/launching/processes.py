"""Starts one process per rank on this node, watches them, and ends them together.

The launcher says what each rank runs; this file knows only processes: the first that fails ends the others, and none
outlives its parent.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a rank that was asked to stop and has saved its work."""
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a run to stop. A lost terminal (SIGHUP) counts as SIGTERM."""
OUT_OF_MEMORY = 75
"""Exit code of a rank that ran out of memory and has written a smaller size down: the ranks start again."""


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: `text` is a traceback, or the one line of a user's mistake (exit_code 2)."""

    rank: int
    exit_code: int
    text: str
    time: float


def num_usable_cores() -> int:
    """Cores that this process may use (a scheduler may have given it fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_started_at() -> float:
    """When this process began, in seconds since 1970 (elsewhere than on Linux: about now)."""
    if sys.platform != "linux":
        return time.time()
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def die_with_parent() -> None:
    """Ask the system to kill this process when its parent is gone (Linux), so that none is left on a GPU."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def warm_up(words: Sequence[str], config_path: Path) -> None:
    """Start the fork server, if these words and this config look like several ranks: it imports what is slow, once for
    all of them, while this process reads the config. A wrong guess costs time alone.
    """
    if sys.platform != "linux" or "RANK" in os.environ:
        return
    # None of it may touch CUDA: a forked child could not use it. So nothing of yours is among them.
    modules = ("torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torchmetrics", "tqdm", "omegaconf")
    multiprocessing.set_forkserver_preload(list(modules))
    text = config_path.read_text(encoding="utf-8", errors="replace") if config_path.is_file() else ""
    text += "".join(f"\n{word.replace('=', ': ')}" for word in words)
    device_ids = re.findall(r"^device_ids: *([^#\n]*)", text, re.MULTILINE)
    num_gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if device_ids and ("," in device_ids[-1] or (device_ids[-1].startswith("auto") and num_gpus > 1)):
        with _signals_held_back():
            forkserver.ensure_running()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes started in the body begin with these signals blocked: a fork server would otherwise die of them."""
    resource_tracker.ensure_running()  # before: its start ends with SIGINT and SIGTERM unblocked
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def run_processes(
    work: Callable[..., int],
    arguments: Sequence[tuple[Any, ...]],
    *,
    start_method: str,
    environment: Mapping[str, str],
    ask_to_stop: Callable[[int], bool],
) -> tuple[int, Failure | None]:
    """The exit code of `work(*arguments[i], report)` run in one process for each i, and the first failure.

    environment: variables that all of them have. ask_to_stop(signal number) is called on the first SIGINT or
    SIGTERM and returns False if the ranks cannot stop by themselves yet; then, and on a second signal, they are
    killed.
    """
    context: Any = multiprocessing.get_context(_start_method(start_method))
    processes, reports = [], []
    for own_arguments in arguments:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(work, own_arguments, environment, sender))
        with _signals_held_back():
            process.start()
        sender.close()
        processes.append(process)
        reports.append(receiver)
    with _Signals() as signals:
        return _supervise(processes, reports, signals, ask_to_stop)


def _start_method(name: str) -> str:
    if name != "auto":
        return name
    return "forkserver" if sys.platform == "linux" else "spawn"


def _supervise(
    processes: list[BaseProcess], reports: list[Connection], signals: _Signals, ask_to_stop: Callable[[int], bool]
) -> tuple[int, Failure | None]:
    is_asked = False
    while alive := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in alive], timeout=0.2)
        if any(process.exitcode not in (None, 0, *STOPPED) for process in processes):
            break
        if signals.received.count(signal.SIGINT) > 1:
            break
        if signals.received and not is_asked:
            is_asked = True
            if not ask_to_stop(signals.received[0]):
                break
    if alive and not signals.received:
        time.sleep(0.2)  # ranks that fell together: let the reports arrive, and judge by the first
    failures = _failures(processes, reports)
    for process in processes:
        process.kill()  # SIGKILL: a rank inside a collective does not answer to anything else
    for process in processes:
        process.join()
    if failures:
        return failures[0].exit_code, failures[0]
    stopped = [128 + number for number in signals.received] + [
        code for p in processes if (code := p.exitcode) in STOPPED
    ]
    return (stopped[0] if stopped else 0), None


def _failures(processes: list[BaseProcess], reports: list[Connection]) -> list[Failure]:
    """What went wrong, the cause first: a killed rank says nothing, and its neighbours report lost connections."""
    failures = []
    for rank, (process, report) in enumerate(zip(processes, reports, strict=True)):
        code = process.exitcode
        if report.poll():
            try:
                failures.append(report.recv())
                continue
            except EOFError:
                pass
        if code is not None and code < 0:
            text = f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
            failures.append(Failure(rank, 1, text, 0.0))
        elif code is not None and code > 0 and code not in STOPPED:
            failures.append(Failure(rank, code, f"ended with exit code {code}", 0.0))
    return sorted(failures, key=lambda failure: failure.time)


def _main(
    work: Callable[..., int], arguments: tuple[Any, ...], environment: Mapping[str, str], report: Connection
) -> NoReturn:
    os.environ.update(environment)
    for number in ENDINGS:  # they reach the whole group: the launching process, or later StopRequest, decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    die_with_parent()
    # The fork server, not the launching process, is the parent that the system knows.
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    code = work(*arguments, report.send)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads abort about one interpreter exit in ten (torch 2.13)


def _end_with_launcher() -> None:
    launching_process = multiprocessing.parent_process()
    assert launching_process is not None
    launching_process.join()
    os._exit(1)


class _Signals:
    """Collects SIGINT and SIGTERM (a lost terminal counts as one) while the ranks run; then puts the handlers back."""

    def __enter__(self) -> _Signals:
        self.received: list[int] = []
        wanted = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
        self._previous = {number: signal.signal(number, self._receive) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        self.received.append(signal.SIGTERM if number == signal.SIGHUP else number)

"""Starts one process per rank and watches them. The first failure ends all ranks, and no rank outlives its parent."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..core.processes import STOP_SIGNALS, die_with_parent, end_process
from ..errors import StopRun

if TYPE_CHECKING:  # the launching process starts the fork server before it imports torch
    from torch.distributed import Store

STARTED_AT = time.time()  # this file is imported early

STOP_MESSAGE = "\nasked to stop: saving within a few steps (Ctrl-C again: at once)"

# Exit codes of a rank.
# it was asked to stop, and has saved if it had time to
STOPPED = (
    128 + signal.SIGINT,
    128 + signal.SIGTERM,
)
DONE = 64  # it finished. Not 0: a stray sys.exit(0) in user code must not look like success
IN_ORDER = (DONE, *STOPPED)
OUT_OF_MEMORY = 75  # memory ran out and a smaller size is written down: the ranks start again

# Keys of the store that all ranks of one start share.
READY = "stop/ready"  # set by the first rank that can stop by itself
STOP = "stop/signal"  # the signal that asks all ranks to stop
BEGUN = "stop/begun/{rank}"  # how many steps and evaluation batches a rank had begun when it heard of the request
FAILURE = "failure"  # set by the first rank that fails: its Failure, as JSON

# stop signals that reached this rank before training: StopRequest reads them
early_requests: list[int] = []


class Failure(NamedTuple):
    """Says why a rank failed. `text` is a traceback or, for a user's mistake, a one-line message."""

    rank: int
    exit_code: int
    text: str
    is_silent: bool = False  # it was killed, and could not say why


def start_fork_server() -> None:
    """Start the server that will fork the ranks. It imports slow packages while this process reads the config."""
    # Nothing here may touch CUDA, which a forked child could not use. So no file of the user's is preloaded.
    names = [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torchmetrics",
        "tqdm",
        "pydantic",
    ]
    multiprocessing.set_forkserver_preload(names)
    with signals_blocked():
        forkserver.ensure_running()


def run_processes(
    work: Callable[..., int],
    arguments: Sequence[tuple[Any, ...]],
    store: "Store",
    start_method: str,
) -> tuple[int, Failure | None]:
    """Run `work(*arguments[i])` in a process for each rank i. Return the exit code and the failure, if any."""
    default = "forkserver" if sys.platform == "linux" else "spawn"
    context: Any = multiprocessing.get_context(default if start_method == "auto" else start_method)
    processes = [context.Process(target=_main, args=(work, own)) for own in arguments]
    signals: list[int] = []
    # before the first rank starts, which would wait for others
    with stop_signals_call(signals.append):
        try:
            with signals_blocked():
                for process in processes:
                    process.start()
            _wait(processes, signals, store)
            if any(process.exitcode is None for process in processes) and not signals:
                time.sleep(0.2)  # ranks that fell together: let them end, and judge by all
            # None: still alive, and killed below
            codes = [process.exitcode for process in processes]
        finally:
            for process in (process for process in processes if process.pid is not None):
                process.kill()  # SIGKILL: a rank inside a collective answers to nothing else
    for process in processes:
        process.join(30.0)  # one that waits for a dead disk does not even answer to SIGKILL
    failure = _find_failure(codes, store)
    if failure is not None and not (signals and failure.exit_code == OUT_OF_MEMORY):
        return failure.exit_code, failure
    if all(code == DONE for code in codes):
        return 0, None  # a request to stop came too late
    return (128 + signals[0] if signals else max(code for code in codes if code in STOPPED)), None


def _wait(processes: Sequence[BaseProcess], signals: list[int], store: "Store") -> None:
    """Wait until all ranks exit, one fails, or it is time to kill them all. Forward stop signals to the ranks."""
    while alive := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in alive], timeout=0.2)
        if (
            any(process.exitcode not in (None, *IN_ORDER) for process in processes)
            or signal.SIGINT in signals[1:]
        ):
            return
        if signals and not store.check([STOP]):
            if not store.check([READY]):
                return
            store.set(STOP, str(int(signals[0])))
            with suppress(OSError):  # Ctrl-C has ended `2>&1 | tee log` too
                print(STOP_MESSAGE, file=sys.stderr, flush=True)


def _find_failure(codes: Sequence[int | None], store: "Store") -> Failure | None:
    """Return the failure to report, or None if no rank failed. Prefer a rank that ended without a message."""
    failed = [
        (rank, code) for rank, code in enumerate(codes) if code is not None and code not in IN_ORDER
    ]
    silent = [(rank, code) for rank, code in failed if code not in (1, 2)]
    if not failed:
        return None
    first = Failure(*json.loads(store.get(FAILURE))) if store.check([FAILURE]) else None
    told = first and first.rank
    # Memory that ran out comes first. NCCL may abort the others, and a rank that has just stored its traceback.
    rank, code = min(
        silent or failed,
        key=lambda it: (it[1] != OUT_OF_MEMORY, it[1] == -signal.SIGABRT, it[0] != told),
    )
    if first and (not silent or rank == told):
        return first
    text = (
        f"killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}, without a word"
    )
    text = text.replace("SIGKILL", "SIGKILL (out of memory?)")
    return Failure(rank, OUT_OF_MEMORY if code == OUT_OF_MEMORY else 1, text, is_silent=True)


def _main(work: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    """Run a rank in its new process: set signal handlers, call work(*arguments), and end the process."""
    # Ctrl-C and a lost terminal reach the whole group, and the launching process decides. SIGTERM may be for one rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: early_requests.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    die_with_parent()
    os.environ["MPLBACKEND"] = "agg"  # a notebook's own backend may be missing here
    if alive := vars(forkserver._forkserver).get("_forkserver_alive_fd"):
        # the launching process alone keeps the fork server, this rank's parent, alive
        os.close(alive)
    end_process(work(*arguments) or DONE, at_once=True)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Inside this context, block stop signals, so that they cannot kill a process that is just being started."""
    resource_tracker.ensure_running()  # before: its start ends with SIGINT and SIGTERM unblocked
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def raise_stop(number: int) -> NoReturn:
    """Handle signal `number` by raising StopRun (exit code 130 or 143). In training, StopRequest is used instead."""
    raise StopRun(128 + number)


@contextmanager
def stop_signals_call(handle: Callable[[int], None]) -> Iterator[None]:
    """Inside this context, Ctrl-C calls handle(SIGINT), and every other stop signal calls handle(SIGTERM)."""

    def handler(number: int, _: FrameType | None) -> None:
        handle(number if number == signal.SIGINT else signal.SIGTERM)

    # nohup, _main()
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)

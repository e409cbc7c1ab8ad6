"""Stops all ranks after the same step when one rank is asked to stop, and ends a run that hangs.

If `python run.py` receives SIGTERM while several ranks run, it stops them through their shared torch store:
1. The launching process writes STOP to the store, or kills all ranks if none has reported READY there yet.
2. On each rank, a thread sees STOP, and makes the rank wait before the next step or evaluation batch.
3. Each rank stores how many steps and evaluation batches it has begun. All ranks continue up to the largest number.
4. Then allows() refuses any further step, the trainer saves, and all processes exit with code 143.
If only a single rank receives the signal, that rank writes STOP.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from ..config import LaunchConfig
from ..errors import StopRun
from ..launching.distributed import RankContext
from ..launching.processes import (
    BEGUN,
    FAILURE,
    READY,
    STOP,
    STOP_MESSAGE,
    early_requests,
    stop_signals_call,
)

POLL_SECONDS = 0.2
_num_beats = 0


def beat() -> None:
    """Tell hang_watch() that this rank is making progress. Call this before each step, evaluation batch and save."""
    global _num_beats  # noqa: PLW0603 - one process is one rank
    _num_beats += 1


class StopRequest:
    """Receives stop signals. The trainer calls allows() to see if it may run the next step or evaluation batch."""

    def __init__(self, context: RankContext) -> None:
        self.signal_number: int | None = None
        self._context, self._begun, self._limit = context, 0, sys.maxsize
        self._received: int | None = None
        self._decided, self._closed = threading.Event(), threading.Event()
        # for the thread: on a shared one, a thread that waits blocks the other
        self._store = context.store.clone()
        # not for Ctrl-C, which ranks of run.py ignore: _main()
        self._handlers = stop_signals_call(self._receive)

    def __enter__(self) -> "StopRequest":
        self._handlers.__enter__()
        self._received = self._received or (signal.SIGTERM if early_requests else None)
        self._store.set(READY, "1")
        if self._context.world_size > 1:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closed.set()
        self._handlers.__exit__(None, None, None)
        if kind is StopRun and self._context.world_size == 1 and self._received is not None:
            # out of memory after the signal: stop, instead of starting again
            raise StopRun(128 + self._received)

    def allows(self) -> bool:
        """Return False if the run must end before the next step or batch. All ranks get the same answer."""
        beat()
        if self._context.world_size == 1:  # a single rank decides alone
            self.signal_number = self._received
            return self._received is None
        self._begun += 1
        # read once: _watch() may change it now, and has then counted this step
        if self._begun <= self._limit:
            return True
        self._decided.wait()
        return self._begun <= self._limit

    def _receive(self, number: int) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the step
        if self._context.world_size == 1 and self._received is None:
            print(STOP_MESSAGE, file=sys.stderr)
        self._received = number

    def _watch(self) -> None:
        # the launching process was killed, and this rank is about to be
        with suppress(dist.DistError):
            while not self._store.check([STOP]):
                if self._received is not None:
                    self._store.set(STOP, str(self._received))
                elif self._closed.wait(POLL_SECONDS):
                    return
            self._limit = -1  # first: a step that begins after this line waits in allows(), so none goes unreported
            self._store.set(BEGUN.format(rank=self._context.rank), str(self._begun))
            begun = [
                int(self._store.get(BEGUN.format(rank=rank)))
                for rank in range(self._context.world_size)
            ]
            self.signal_number = int(self._store.get(STOP))
            self._limit = max(begun)
            self._decided.set()


@contextmanager
def hang_watch(context: RankContext, launch: LaunchConfig, directory: Path) -> Iterator[None]:
    """If this rank hangs for launch.timeout_minutes in the `with` block, log stack traces and end all ranks."""
    is_over = threading.Event()
    thread = threading.Thread(
        target=_end_hang, args=(context, launch.timeout_minutes, directory, is_over), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _end_hang(
    context: RankContext, timeout_minutes: float, directory: Path, is_over: threading.Event
) -> None:
    store = context.store.clone()
    timeout, interval = 60 * timeout_minutes, min(1.0, 6 * timeout_minutes)
    seen, seconds = _num_beats, 0.0
    while not is_over.wait(interval):
        # Count the time awake: a run that was halted meanwhile (Ctrl-Z) has not hung.
        seconds = seconds + interval if seen == _num_beats else 0.0
        seen = _num_beats
        try:
            if store.check([FAILURE]):
                # a rank has failed and said why; srun does not end the others, which wait for it
                os._exit(1)
        # the launching process is gone, or a rank's end has taken the store along
        except dist.DistError:
            return
        if seconds <= timeout:
            continue
        with (
            suppress(OSError),
            (directory / "logs" / f"rank_{context.rank}.log").open("a", encoding="utf-8") as log,
        ):
            faulthandler.dump_traceback(log)
        # the other ranks notice it too, and must write their stacks before they are killed
        time.sleep(2 * interval)
        problem = f"no progress for launch.timeout_minutes={timeout_minutes:g}: no step, evaluation batch or save"
        stacks = f"{directory}/logs/rank_*.log hold the stacks of all ranks"
        context.report_failure(
            f"{problem}. {stacks}. Raise the value if one of them takes longer.", 1
        )
        os._exit(1)

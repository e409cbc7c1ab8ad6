"""Starts one process per rank on this node, watches them, and ends them together.

The launcher says what each rank runs; this file knows only processes: the first that fails ends the others, and none
outlives its parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, Protocol

from .starting import ENDINGS, choose_start_method, die_with_parent, die_with_pipe, note_request, signals_held_back

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a rank that was asked to stop and has saved its work."""
DONE = 64
"""Exit code of a rank that has come to its end. 0 is what one ends with that somebody else's code has ended."""
ASKED = "asked to stop: saving after this step (Ctrl-C again: at once)"
OUT_OF_MEMORY = 75
"""Exit code of a rank that ran out of memory and has written a smaller size down: the ranks start again."""
END_SECONDS = 30.0
"""A process that waits for a disk which does not answer does not even die of SIGKILL."""


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: `text` is a traceback, or the one line of a user's mistake (exit_code 2)."""

    local_rank: int
    exit_code: int
    text: str
    time: float


Report = Callable[[Failure], None]


class Peers(Protocol):
    """The launching processes of the other nodes."""

    def announce(self, code: int) -> None:
        """Tell them that ranks of this node have failed."""

    def has_ended(self) -> bool:
        """Whether one of them has told that, or is gone."""


def run_processes(
    work: Callable[..., int],
    arguments: Sequence[tuple[Any, ...]],
    *,
    start_method: str,
    environment: Mapping[str, str],
    ask_to_stop: Callable[[int], bool],
    peers: Peers | None = None,
) -> tuple[int, Failure | None]:
    """The exit code of `work(*arguments[i], report)` run in one process for each i, and the first failure.

    environment: variables that all of them have. ask_to_stop(signal number) is called on the first SIGINT or
    SIGTERM and returns False if the ranks cannot stop by themselves yet; then, on a second Ctrl-C, and when a peer has
    ended, they are killed.
    """
    context: Any = multiprocessing.get_context(choose_start_method(start_method))
    processes: list[BaseProcess] = []
    reports: list[Connection] = []
    with _Signals() as signals:  # before the first rank starts: Ctrl-C would leave some of them waiting for the others
        try:
            for own_arguments in arguments:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_main, args=(work, own_arguments, environment, sender))
                with signals_held_back():
                    process.start()
                sender.close()
                processes.append(process)
                reports.append(receiver)
            return _supervise(processes, reports, signals, ask_to_stop, peers)
        except BaseException:
            for process in processes:
                process.kill()
            raise


def _supervise(
    processes: list[BaseProcess],
    reports: list[Connection],
    signals: _Signals,
    ask_to_stop: Callable[[int], bool],
    peers: Peers | None,
) -> tuple[int, Failure | None]:
    is_asked = False
    while alive := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in alive], timeout=0.2)
        if any(_has_failed(process) for process in processes):
            break
        if peers is not None and peers.has_ended():
            break
        if signals.received.count(signal.SIGINT) > 1:
            break
        if signals.received and not is_asked:
            is_asked = True
            if not ask_to_stop(signals.received[0]):
                break
            print(ASKED, file=sys.stderr)
    codes = [_known(p.exitcode) for p in processes if _has_failed(p)]
    is_stopped = bool(signals.received) and OUT_OF_MEMORY in codes  # it would begin again
    if peers is not None and codes:
        # At once: their ranks are about to lose their connections to these.
        peers.announce(128 + signals.received[0] if is_stopped else max(codes))
    if alive and not signals.received:
        time.sleep(0.2)  # ranks that fell together: let the reports arrive, and judge by the first
    failures = _failures(processes, reports)
    for process in processes:
        process.kill()  # SIGKILL: a rank inside a collective does not answer to anything else
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():  # Python would wait for it at its own end
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    if failures and not is_stopped:
        return failures[0].exit_code, failures[0]
    if all(process.exitcode == DONE for process in processes):
        return 0, None  # the request came too late
    stopped = [128 + number for number in signals.received] + [
        code for p in processes if (code := p.exitcode) in STOPPED
    ]
    return (stopped[0] if stopped else 0), None


def _has_failed(process: BaseProcess) -> bool:
    return process.exitcode not in (None, DONE, *STOPPED)


def _known(code: int | None) -> int:
    return code if code in (2, OUT_OF_MEMORY) else 1


def _failures(processes: list[BaseProcess], reports: list[Connection]) -> list[Failure]:
    """What went wrong, the cause first: a killed rank says nothing, and its neighbours report lost connections."""
    failures = []
    for local_rank, (process, report) in enumerate(zip(processes, reports, strict=True)):
        code = process.exitcode
        if report.poll():
            try:
                failures.append(report.recv())
                continue
            except EOFError:
                pass
        if code is not None and code < 0:
            text = f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
            failures.append(Failure(local_rank, 1, text, 0.0))
        elif _has_failed(process):
            text = f"ended by itself, with exit code {code}" + (
                " (or its fork server was killed)" if code == 255 else ""
            )
            failures.append(Failure(local_rank, OUT_OF_MEMORY if code == OUT_OF_MEMORY else 1, text, 0.0))
    return sorted(failures, key=lambda failure: failure.time)


def _main(
    work: Callable[..., int], arguments: tuple[Any, ...], environment: Mapping[str, str], report: Connection
) -> NoReturn:
    os.environ.update(environment)
    for number in ENDINGS:  # they reach the whole group: the launching process, or later StopRequest, decides
        signal.signal(number, note_request if number in (signal.SIGTERM, signal.SIGUSR1) else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    die_with_parent()
    launching_process = multiprocessing.parent_process()
    assert launching_process is not None
    die_with_pipe(launching_process.sentinel)  # the parent that the system knows is the fork server
    code = work(*arguments, report.send)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or DONE)  # gloo's threads abort about one interpreter exit in ten (torch 2.13)


class _Signals:
    """Collects what asks the run to stop, while the ranks run; then puts the handlers back."""

    def __enter__(self) -> _Signals:
        self.received: list[int] = []
        wanted = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
        self._previous = {number: signal.signal(number, self._receive) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        self.received.append(number if number == signal.SIGINT else signal.SIGTERM)

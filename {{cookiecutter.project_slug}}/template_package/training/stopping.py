"""Lets all ranks stop after the same step when one of them is asked to (SIGTERM, Ctrl-C).

Nothing is added to a step but the comparison of two integers: a thread watches the store. When a request appears there,
each rank holds before its next step (or batch of an evaluation), says how many it has begun, and goes on to the
furthest that any has begun: a rank that waited for the others inside a step of theirs would wait for ever.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from ..launching.distributed import RankContext
from ..launching.meeting import UNHEARD
from ..launching.processes import ASKED
from ..launching.starting import ENDINGS, RunEnds, early_requests
from .logs import get_logger

POLL_SECONDS = 0.2


class Interrupted(Exception):  # noqa: N818 - no error
    """The run stops in the middle of an evaluation, which the next start repeats."""


class StopRequest:
    """`allows()` is asked before each step and each batch of an evaluation; `signal_number` tells why it said no."""

    def __init__(self, context: RankContext) -> None:
        self.signal_number: int | None = None
        self._context, self._begun, self._limit = context, 0, sys.maxsize
        self._received: int | None = None
        self._decided, self._closed = threading.Event(), threading.Event()
        # Ranks started here ignore Ctrl-C and a lost terminal, which reach the whole group: their parent decides.
        wanted = [
            n for n in ENDINGS if n in (signal.SIGTERM, signal.SIGUSR1) or signal.getsignal(n) is not signal.SIG_IGN
        ]
        self._previous = {number: signal.signal(number, self._receive) for number in wanted}
        if context.store is not None:
            if early_requests:
                self._received, self._limit = signal.SIGTERM, -1  # no step before all ranks know
            # A connection of its own: one that waits for an answer would hold up the other.
            self._store = context.store.clone()  # type: ignore[attr-defined]
            self._store.set("stop/ready", "1")
            threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Put the former signal handlers back."""
        self._closed.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is RunEnds and self._context.store is None and self._received is not None:
            raise RunEnds(128 + self._received)  # out of memory: the only rank would begin again

    def allows(self) -> bool:
        """False when the run must end before what comes now; the same answer on every rank at the same call."""
        self._begun += 1
        if self._begun > self._limit:
            self._decided.wait()
            if self._begun > self._limit:
                if self._received is None and self._is_asked_here():  # not torchrun, which takes our end for a crash
                    self._store.set(UNHEARD, str(self.signal_number))
                return False
        return True

    def exit_unless(self, is_complete: bool) -> None:
        """RunEnds(128 + signal number) if the run was asked to stop before it was complete."""
        if not is_complete and self.signal_number is not None:
            get_logger().info("saved: the same command continues")
            raise RunEnds(128 + self.signal_number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        number = number if number == signal.SIGINT else signal.SIGTERM
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the step
        self._received = number
        if self._context.store is None:
            print(ASKED, file=sys.stderr)
            self.signal_number, self._limit = number, self._begun
            self._decided.set()

    def _is_asked_here(self) -> bool:
        """Whether it was a rank of this node that was asked: agents ask all ranks of their node, and no others."""
        return self._store.check(["stop/node"]) and int(self._store.get("stop/node")) == self._context.node_rank

    def _watch(self) -> None:
        while not self._store.check(["stop/signal"]):
            if self._received is not None:
                self._store.set("stop/node", str(self._context.node_rank))
                self._store.set("stop/signal", str(self._received))
            elif self._closed.wait(POLL_SECONDS):
                return
        # First the limit, then the reading: whichever comes first, this rank has begun no step that it does not report.
        self._limit = -1
        self._store.set(f"stop/begun/{self._context.rank}", str(self._begun))
        begun = [int(self._store.get(f"stop/begun/{rank}")) for rank in range(self._context.world_size)]
        self.signal_number = int(self._store.get("stop/signal"))
        self._limit = max(begun)
        self._decided.set()

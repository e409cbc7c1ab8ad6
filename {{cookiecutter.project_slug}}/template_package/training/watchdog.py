"""Ends a run that hangs: a rank without progress for launch.timeout_minutes writes down where every rank stands.

Progress is a step, a micro-batch, an evaluation batch, a save: each calls `beat()`. A thread looks at the count now and
then, so a step pays for an addition. If the thread itself does not come to look, because C code holds Python's lock, a
timer of faulthandler's, in C, writes the rank's stacks down, and the other ranks name it and end the run.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ..config import LaunchConfig
from ..launching.distributed import RankContext
from ..launching.nodes import ask

ANSWER_SECONDS = 5.0
"""What ranks have to say how far they are, once one of them has found the hang."""
_num_beats = 0


def beat() -> None:
    """Say that this rank goes on."""
    global _num_beats  # noqa: PLW0603 - one process is one rank
    _num_beats += 1


@contextmanager
def hang_watched(context: RankContext, config: LaunchConfig, directory: Path) -> Iterator[None]:
    """While the body runs, a hang of it writes the stacks of all ranks to their logs and ends this process."""
    watch = _Watch(context, config.timeout_minutes, directory)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class _Watch(threading.Thread):
    def __init__(self, context: RankContext, timeout_minutes: float, directory: Path) -> None:
        super().__init__(daemon=True)
        self._context, self._directory = context, directory
        self._minutes, self._timeout = timeout_minutes, 60 * timeout_minutes
        self._log = (directory / "logs" / f"rank_{context.rank}.log").open("a", encoding="utf-8")
        self._stopped = threading.Event()
        # A connection of its own: one that waits for an answer would hold up the other.
        self._store: dist.Store | None = context.store.clone() if context.store else None  # type: ignore[attr-defined]

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        faulthandler.cancel_dump_traceback_later()
        self._log.close()

    def run(self) -> None:
        interval = min(1.0, self._timeout / 10)
        seen, seconds, looked_at = _num_beats, 0.0, time.monotonic()
        self._set_timer()
        while not self._stopped.wait(interval):
            now = time.monotonic()
            seconds += min(now - looked_at, 2 * interval)  # a run that was halted meanwhile (Ctrl-Z) has not hung
            looked_at = now
            if seen != _num_beats:
                seen, seconds = _num_beats, 0.0
                self._set_timer()
            try:
                is_found = self._store is not None and self._store.check(["hang/found"])
                if self._store is not None and self._store.check(["failures"]):
                    os._exit(1)  # a rank has failed and told why; srun does not end the others, which wait for it
            except dist.DistError:  # the launching process is gone, or a rank's end has taken the store along
                return
            if is_found or seconds > self._timeout:
                self._end()

    def _set_timer(self) -> None:
        faulthandler.dump_traceback_later(self._timeout + 2 * ANSWER_SECONDS, file=self._log)

    def _end(self) -> NoReturn:
        if self._store is not None:
            self._store.set(f"hang/{self._context.rank}", str(_num_beats))
            self._store.set("hang/found", "1")
        ask(self._write_stacks, ANSWER_SECONDS)  # in a thread: it may be the disk that hangs, where the logs are too
        behind = self._ranks_behind() if self._store is not None else ""
        text = (
            f"no progress for launch.timeout_minutes={self._minutes:g}: no step, evaluation batch or save.{behind} "
            f"{self._directory}/logs/rank_*.log hold the stacks of all ranks. Raise the value if one takes longer."
        )
        ask(lambda: self._context.abort(text), ANSWER_SECONDS)
        os._exit(1)

    def _write_stacks(self) -> None:
        # faulthandler has Python's lock while it writes: not to a log that hangs
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            stacks = file.read().decode()
        words = f"no progress for {self._minutes:g} minutes after {_num_beats} beats; the stacks of this rank:"
        self._log.write(f"{words}\n{stacks}")
        self._log.flush()

    def _ranks_behind(self) -> str:
        """Those that have come least far, or do not answer at all."""
        assert self._store is not None
        ranks, deadline = range(self._context.world_size), time.monotonic() + ANSWER_SECONDS
        while not (is_all := self._store.check([f"hang/{rank}" for rank in ranks])) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not is_all:
            silent = [rank for rank in ranks if not self._store.check([f"hang/{rank}"])]
            return f" Without an answer: rank {', '.join(map(str, silent))}."
        counts = [int(self._store.get(f"hang/{rank}")) for rank in ranks]
        if len(set(counts)) == 1:
            return " All ranks have come equally far."
        behind = [rank for rank in ranks if counts[rank] == min(counts)]
        return f" Behind the others: rank {', '.join(map(str, behind))}."

"""Sends words to their places: each rank has a log, and the words of rank 0 also stand on the console.

print() and warnings are caught on rank 0 in Python; on the other ranks the file descriptors are redirected, so that C++
and NCCL write to the log too.
"""

import faulthandler
import io
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ..errors import ConfigError
from ..launching.distributed import RankContext

_console: TextIO | None = None


def console() -> TextIO:
    """The stderr from before rank_logs(): the progress bar is drawn there."""
    return _console or sys.stderr


@contextmanager
def rank_logs(directory: Path, context: RankContext) -> Iterator[None]:
    """Inside this context, the words of this rank go to logs/rank_<r>.log; so does the reason if the body fails."""
    global _console  # noqa: PLW0603 - a process has one stdout and one stderr
    path = directory / "logs" / f"rank_{context.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore of the system, which a killed rank would leave behind
    streams, logger = (sys.stdout, sys.stderr), logging.getLogger(__name__.partition(".")[0])
    former_handlers, logger.propagate = logger.handlers, False
    logger.setLevel(logging.INFO)
    with ExitStack() as undo:
        file = undo.enter_context(_LogFile(path, "a"))
        log = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", write_through=True)
        logger.handlers = [logging.StreamHandler(log)]
        logger.handlers[0].setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        if context.is_main:
            _console = sys.stderr
            logger.addHandler(logging.StreamHandler(_Tee(sys.stdout)))
            sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
        else:
            _console = undo.enter_context(os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1))
            for descriptor in (1, 2):
                former = os.dup(descriptor)
                os.dup2(log.fileno(), descriptor)
                undo.callback(os.close, former)
                undo.callback(os.dup2, former, descriptor)
            sys.stdout = sys.stderr = log
        place = [f"{name}={getattr(context, name)}" for name in ("rank", "local_rank", "world_size", "device")]
        now, host = time.strftime("%Y-%m-%d %H:%M:%S"), f"host={socket.gethostname()}"
        print(now, host, f"pid={os.getpid()}", *place, file=log)
        faulthandler.enable(file=log)
        try:
            yield
        except Exception as error:
            log.write(f"error: {error}\n" if isinstance(error, ConfigError) else traceback.format_exc())
            raise
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdout, sys.stderr = streams
            faulthandler.disable()
            _console, logger.handlers = None, former_handlers


class _LogFile(io.FileIO):
    """A log whose disk may be full, which the next checkpoint reports."""

    def write(self, content: Any) -> int:
        with suppress(OSError):
            super().write(content)
        return len(content)


class _Tee:
    """A text stream that also writes to the log, above the progress bar. Attributes it lacks are the stream's own."""

    def __init__(self, stream: TextIO, log: TextIO | None = None) -> None:
        self._stream, self._log, self._held = stream, log, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._held += text
        self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._held = self._held, ""
        if getattr(tqdm, "_instances", None) and "\r" not in text:  # the bar would be drawn over a part of a line
            self._held = text[text.rfind("\n") + 1 :]
            text = text.removesuffix(self._held)
        with tqdm.external_write_mode(file=console()):
            self._stream.write(text)
            self._stream.flush()
        if self._log is not None:
            self._log.write(text)

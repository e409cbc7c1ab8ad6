"""Where words go: each rank has a log; what rank 0 says also stands on the console, above the progress bar if any.

Python's own words are caught on rank 0 (print, warnings, this logger); on the other ranks the file descriptors, so that
C++ and NCCL write to the log too. Figures are tracking.py's.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ..launching.distributed import RankContext
from ..validation import ConfigError
from .workers import lost_samples_named

_undo = ExitStack()
_console: TextIO | None = None
_bar: tqdm | None = None


def get_logger() -> logging.Logger:
    """The project's logger: rank 0's messages reach the console and its log, the other ranks' their logs."""
    return logging.getLogger(__name__.partition(".")[0])


def console() -> TextIO:
    """What stderr was before start_logs: for the progress bar, and for a last word of any rank."""
    return _console or sys.stderr


@contextmanager
def rank_logs(run_directory: Path, context: RankContext) -> Iterator[None]:
    """The body's words go to logs/rank_<r>.log, and so does the reason if it fails."""
    log = start_logs(run_directory, context)
    try:
        with lost_samples_named():
            yield
    except Exception as error:
        text = f"error: {error}\n" if isinstance(error, ConfigError) else traceback.format_exc()
        with suppress(OSError):  # what the disk does not take stands on the console
            log.write(text)
        raise
    finally:
        stop_logs()


def start_logs(run_directory: Path, context: RankContext) -> TextIO:
    """Open runs/<name>/logs/rank_<r>.log, and send there what this rank says until stop_logs()."""
    global _console  # noqa: PLW0603 - a process has one stdout and one stderr
    path = run_directory / "logs" / f"rank_{context.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    _undo.callback(_close, log)
    _add_handler(log, "%(asctime)s %(message)s")
    if path.stat().st_size > 0:
        log.write("\n")  # after a line that a killed process may have left unfinished
    place = {name: getattr(context, name) for name in ("rank", "local_rank", "world_size", "device")}
    words = {"host": socket.gethostname(), "pid": os.getpid(), **place}
    get_logger().info("%s", " ".join(f"{name}={value}" for name, value in words.items()))
    _undo.callback(_replace_streams, sys.stdout, sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if context.is_main:
        _console = sys.stderr
        _add_handler(_Tee(sys.stdout, None), "%(message)s")
        tees = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
        for tee in tees:
            _undo.callback(tee.end)
        _replace_streams(*tees)
    else:
        _console = _undo.enter_context(os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1))
        _redirect(1, log)
        _redirect(2, log)
        _replace_streams(log, log)
    _undo.callback(_restore_faulthandler, faulthandler.is_enabled())
    faulthandler.enable(file=log)
    return log


def stop_logs() -> None:
    """Put back everything that start_logs has changed."""
    global _console  # noqa: PLW0603
    if _bar is not None:  # the run failed
        _bar.close()
        print_above(None)
    _undo.close()
    _console = None


def print_above(bar: tqdm | None) -> None:
    """From now on rank 0's words stand above this progress bar; None: there is none any more."""
    global _bar  # noqa: PLW0603
    _bar = bar


class _Tee:
    """A text stream that writes to the log too; what it does not define is the stream's own (fileno, isatty, …)."""

    def __init__(self, stream: TextIO, log: TextIO | None) -> None:
        self._stream, self._log = stream, log
        self._held, self._line = "", ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        self._held += text
        if _bar is None:
            self._release(len(self._held))
        elif lines:  # a bar leaves room for whole lines only
            with _bar.get_lock():
                _bar.clear()
                self._release(self._held.rfind("\n") + 1)
                self.flush()
                _bar.refresh()
        if self._log is not None:  # last: its disk may hang
            with suppress(OSError):  # or be full, which a checkpoint will tell
                for line in lines:
                    self._log.write(_last_state(line).rstrip("\r") + "\n")
        self._held, self._line = _last_state(self._held), _last_state(self._line)
        return len(text)

    def flush(self) -> None:
        if _bar is None:
            self._release(len(self._held))
        self._stream.flush()

    def end(self) -> None:
        """Write what still waits for the end of its line."""
        self.flush()
        if self._line and self._log is not None:
            with suppress(OSError):
                self._log.write(self._line + "\n")

    def _release(self, length: int) -> None:
        self._stream.write(self._held[:length])
        self._held = self._held[length:]


def _last_state(line: str) -> str:
    """Of a line that draws itself anew, as a bar does: it may never end."""
    return line[line.rfind("\r", 0, -1) + 1 :]


class _Handler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A traceback, but not of a full disk, which a checkpoint will tell."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _close(log: TextIO) -> None:
    with suppress(OSError):  # a full disk does not take what is left: the reason why the run ends tells more
        log.close()


def _add_handler(stream: Any, layout: str) -> None:
    logger, handler = get_logger(), _Handler(stream)
    handler.setFormatter(logging.Formatter(layout, datefmt="%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    _undo.callback(logger.removeHandler, handler)


def _replace_streams(stdout: Any, stderr: Any) -> None:
    sys.stdout, sys.stderr = stdout, stderr


def _redirect(descriptor: int, log: TextIO) -> None:
    """Let file descriptor 1 or 2 write to the log."""
    former = os.dup(descriptor)
    os.dup2(log.fileno(), descriptor)
    _undo.callback(os.close, former)
    _undo.callback(os.dup2, former, descriptor)


def _restore_faulthandler(was_enabled: bool) -> None:
    faulthandler.disable()
    if was_enabled and sys.__stderr__ is not None:
        faulthandler.enable(file=sys.__stderr__)

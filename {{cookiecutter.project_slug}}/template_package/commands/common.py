"""Starts run.py in processes of their own, as the commands benchmark and sweep do. It is no command."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from ..core.launch import as_stop
from ..core.processes import STOP_SIGNALS, die_with_parent
from ..errors import StopRun
from ..files import RUNS_FOLDER


def start_run(arguments: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start run.py. It saves runs in `folder` and output in `log`. On Linux, it is killed when its parent ends."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[2] / "run.py"), *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | {RUNS_FOLDER: str(folder)},
            start_new_session=True,  # Ctrl-C reaches this process alone, which stops its runs
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no other thread holds a lock
        )  # fmt: skip


def find_reason(log: Path, exit_code: int) -> str:
    """Return the line of a failed run's log that gives the cause: an error message or, failing that, the last line."""
    output = log.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^error: (.*)|^(?:\w+\.)*\w*(?:Error|Exception)\b.*", output, re.MULTILINE)
    return (
        (found[1] or found[0])
        if found
        else output.rstrip().rpartition("\n")[2] or f"exit code {exit_code}"
    )


@contextmanager
def stops_raised() -> Iterator[None]:
    """Inside, a stop signal raises StopRun (exit code 130 or 143)."""

    def stop(number: int, _: object) -> NoReturn:
        raise StopRun(128 + as_stop(number))

    # nohup
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)

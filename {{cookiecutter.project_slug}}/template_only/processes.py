"""Runs one command that may start many processes, and leaves none of them behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ENDINGS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float | None = None,
    held_back: tuple[str, ...] = (),
) -> tuple[int | None, str]:
    """The exit code, None if the time ran out, and the output.

    The output is shown as it comes, but for lines that begin with one of `held_back`. When the time runs out or Ctrl-C
    is pressed, the command and all that it started are ended.
    """
    process = start(command, environment)
    is_late = threading.Event()

    def end_late() -> None:
        is_late.set()
        end_all(process)

    timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, end_late)
    timer.daemon = True
    timer.start()
    lines = []
    try:
        for line in process.stdout or ():
            lines.append(line)
            if not line.startswith(held_back):
                print(line, end="", flush=True)
        code = process.wait()
    except BaseException:  # Ctrl-C, or print() fails since the terminal is closed
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)  # a second one would leave processes behind
        with contextlib.suppress(OSError):
            print("\ninterrupted; ending what was started ...", flush=True)
        end_all(process)
        raise
    finally:
        timer.cancel()
        if is_late.is_set():
            timer.join()  # it still ends what outlives the command
    return None if is_late.is_set() else code, "".join(lines)


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """The command in a session of its own: Ctrl-C reaches this process alone, which then ends the command in order."""
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def end_all(process: subprocess.Popen[str]) -> None:
    """Ends a command and all that it started: SIGTERM, then SIGKILL for those still there after 5 seconds."""
    if os.name == "nt":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], check=False)
        return
    family = descendants(process.pid)
    send(signal.SIGTERM, process.pid, family)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(map(is_running, family)):
        process.poll()
        time.sleep(0.05)
    send(signal.SIGKILL, process.pid, family + descendants(process.pid))
    process.wait()
    deadline = time.monotonic() + 2  # a large process takes a moment to go
    while time.monotonic() < deadline and has_members(process.pid):
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """A process and all that it started, those in sessions of their own too."""
    if Path("/proc/self/stat").exists():
        stats = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                stats.append(path.read_text(encoding="utf-8", errors="replace"))
        parents = {int(stat.split()[0]): int(stat.rpartition(")")[2].split()[1]) for stat in stats}
    else:
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True).stdout
        parents = {int(child): int(parent) for child, parent in map(str.split, table.splitlines())}
    family = [pid]
    for member in family:  # grows while it is read
        family += [child for child, parent in parents.items() if parent == member]
    return family


def send(number: signal.Signals, group: int, family: Iterable[int]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, number)
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def has_members(group: int) -> bool:
    with contextlib.suppress(OSError):
        os.killpg(group, 0)
        return True
    return False


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False

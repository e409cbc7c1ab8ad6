"""Runs one command that may start many processes, and leaves none of them running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float | None = None,
    held_back: tuple[str, ...] = (),
) -> tuple[int | None, str]:
    """Run the command. Return its exit code, or None if it ran out of time, and its output.

    The output is printed line by line, except lines that begin with one of `held_back`. After `seconds`, or on Ctrl-C,
    the command and every process that it started are killed.
    """
    process = start(command, environment)
    has_timed_out = threading.Event()

    def time_out() -> None:
        has_timed_out.set()
        kill_tree(process)

    timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, time_out)
    timer.daemon = True
    timer.start()
    lines = []
    try:
        for line in process.stdout or ():
            lines.append(line)
            if not line.startswith(held_back):
                print(line, end="", flush=True)
        code = process.wait()
    except BaseException:  # Ctrl-C, or print() fails because the terminal was closed
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a second signal would leave processes running
        with contextlib.suppress(OSError):
            print("\ninterrupted; ending all processes ...", flush=True)
        kill_tree(process)
        raise
    finally:
        timer.cancel()
        if has_timed_out.is_set():
            timer.join()  # it may still be killing processes that outlived the command
    return None if has_timed_out.is_set() else code, "".join(lines)


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start the command in a new session, so that Ctrl-C reaches only this process, which then ends the command."""
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


def kill_tree(process: subprocess.Popen[str]) -> None:
    """End a command and every process that it started: by SIGTERM, and after 5 seconds by SIGKILL."""
    if os.name == "nt":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], check=False)
        return
    family = descendants(process.pid)
    send_signal(signal.SIGTERM, process.pid, family)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(map(process_exists, family)):
        process.poll()
        time.sleep(0.05)
    send_signal(signal.SIGKILL, process.pid, family + descendants(process.pid))
    process.wait()
    deadline = time.monotonic() + 2  # the kernel needs a moment to free a large process
    while time.monotonic() < deadline and group_exists(process.pid):
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Return the pids of a process and of all its descendants, including those in other sessions."""
    if Path("/proc/self/stat").exists():
        stats = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                stats.append(path.read_text(encoding="utf-8", errors="replace"))
        parents = {int(stat.split()[0]): int(stat.rpartition(")")[2].split()[1]) for stat in stats}
    else:
        table = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True
        ).stdout
        parents = {int(child): int(parent) for child, parent in map(str.split, table.splitlines())}
    family = [pid]
    for member in family:  # the loop appends to the list that it reads
        family += [child for child, parent in parents.items() if parent == member]
    return family


def send_signal(number: signal.Signals, group: int, family: Iterable[int]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, number)
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def group_exists(group: int) -> bool:
    with contextlib.suppress(OSError):
        os.killpg(group, 0)
        return True
    return False


def process_exists(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False

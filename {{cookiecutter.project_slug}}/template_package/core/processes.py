"""What each process of a run does alike: its console, its stop signals, its end with its parent.

This file imports no torch.
"""

import builtins
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from typing import NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to stop. SIGHUP (the terminal was lost) and SIGUSR1 (SLURM's) are as SIGTERM."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent ends. Exit now if `parent` has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def settle_process() -> None:
    """Make a started command independent of hash seeds and consoles. It may start this process anew."""
    if hasattr(builtins, "__IPYTHON__"):  # it would keep this package's code and signal handlers
        print("error: %run is not supported. Type in the cell: !python run.py", file=sys.stderr)
        sys.exit(2)
    if "PYTHONHASHSEED" not in os.environ and sys.orig_argv[1:2] == sys.argv[:1]:
        os.environ["PYTHONHASHSEED"] = "0"  # a set of names has the same order in every process
        os.execv(sys.executable, sys.orig_argv)
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:  # a closed console would become a file
        os.set_inheritable(spare, True)
    os.close(spare)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # not all are UTF-8
    if len(own := tempfile.gettempdir()) > 70:  # the path of a Unix socket ends at 107 bytes
        tempfile.tempdir = "/tmp"
        get_temp_dir()  # the folder for the sockets of this process and of those that it starts
        tempfile.tempdir = own


def end_process(code: int, *, at_once: bool) -> NoReturn:
    """End this process.

    A rank ends at once: on a normal exit, gloo's threads crash it one time in ten.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if at_once:
        os._exit(code)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would tell of the next line
    for worker in multiprocessing.active_children():  # that reads; it heeds no SIGTERM
        worker.kill()
    sys.exit(code)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise RuntimeError in the body once it takes longer. To wait for a network ends, too."""

    def give_up(*_: object) -> None:
        # No TimeoutError: clients of a server take it for their own, and try again.
        raise RuntimeError(f"no answer for {seconds} seconds")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def start_worker(rank_pid: int, _worker_id: int) -> None:
    """Prepare a process that reads for this rank."""
    die_with_parent(rank_pid)
    for number in STOP_SIGNALS:  # some schedulers signal each process of a run
        signal.signal(number, signal.SIG_IGN)  # the rank decides, and saves first

"""Which signals ask a run to stop, and what ends a process whose parent is gone. No torch here."""

import ctypes
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to stop. SIGHUP (the terminal was lost) and SIGUSR1 (SLURM's) are as SIGTERM."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent ends. Exit now if `parent` has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def start_worker(rank_pid: int, _worker_id: int) -> None:
    """Prepare a process that reads for this rank."""
    die_with_parent(rank_pid)
    for number in STOP_SIGNALS:  # some schedulers signal each process of a run
        signal.signal(number, signal.SIG_IGN)  # the rank decides, and saves first

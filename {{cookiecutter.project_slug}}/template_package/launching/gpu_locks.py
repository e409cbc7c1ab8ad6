"""Locks that hold between all users of a machine and end with the process that holds them, however it ends.

A lock is an abstract Unix socket (Linux): a name that one process at a time can bind. No file, so no umask and nothing
to clean up. Containers with a network of their own have names of their own: there, only NVML's processes tell who
uses a GPU. Elsewhere than on Linux nothing is locked; CUDA's shared servers run Linux.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

PREFIX = "\0ddp-template-gpu/"  # the same in every project, and the \0 makes it abstract


def take_lock(name: str) -> socket.socket | None:
    """A lock, held until it is closed or the process and its forks have ended; None if somebody else holds it.

    name: a GPU's UUID. Without one (Jetson, AMD) the answer is a lock that keeps nobody out.
    """
    lock = socket.socket(socket.AF_UNIX)
    if not name or sys.platform != "linux":
        return lock
    try:
        lock.bind(PREFIX + name)
        lock.listen(4096)  # lock_holder's calls are never answered and stay in this queue
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return lock


class Holder(NamedTuple):
    """The process that holds a lock."""

    pid: int
    uid: int


def lock_holder(name: str) -> Holder | None:
    """Who holds the lock; None if nobody does, or the system does not say."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(PREFIX + name)
            pid, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return Holder(pid, uid)


@contextmanager
def one_chooser(patience_seconds: float = 10.0) -> Iterator[None]:
    """One process of the machine at a time is in the body, so that of two runs that want all GPUs one gets them.

    After patience_seconds it begins anyway: a process that stopped in the body must not stop all others.
    """
    deadline = time.monotonic() + patience_seconds
    while (lock := take_lock("chooser")) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()

"""The machine without its GPUs: name, disk, shared memory, limits, clock. No torch here."""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from .findings import Finding, Surroundings

MIB, GIB = 2**20, 2**30
RUNS = Path("runs")
WRITTEN_MIB, WRITING_SECONDS = 64, 5.0
LITTLE_SPACE, LITTLE_SHARED_MEMORY = 5 * GIB, GIB
SLOW_DISK = 20.0  # MiB/s: a checkpoint of 1 GiB takes a minute
FEW_FILES, TOO_FEW_FILES = 1024, 256  # each loader worker, rank and tracker has dozens open
CLOCK_TOLERANCE_SECONDS = 5.0


def check_hostname(_: Surroundings) -> list[Finding]:
    """Does the host's name lead to an address? torchrun and SLURM let nodes meet by their names."""
    name, started_at = socket.gethostname(), time.monotonic()
    remedy = f'Add the line "127.0.1.1 {name}" (for several nodes: its address there) to /etc/hosts.'
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return [Finding("hostname", "warning", f"{name} has no address ({error.strerror})", remedy)]
    seconds = time.monotonic() - started_at
    detail = f"{name} is {', '.join(addresses)}"
    if seconds > 2:
        return [Finding("hostname", "warning", f"{detail}, which took {seconds:.0f} s to find out", remedy)]
    return [Finding("hostname", "ok", detail)]


def check_disk(_: Surroundings) -> list[Finding]:
    """Free space where runs/ lies, and how fast it is written."""
    remedy = "Make room, or let runs be a link to a folder on another disk: ln -s /PATH/WITH/ROOM runs"
    place = _folder_of_runs()
    try:
        free = os.statvfs(place)
        free_bytes = free.f_bavail * free.f_frsize
        speed = _write_speed(place)
    except OSError as error:
        return [Finding("disk", "broken", f"{place} cannot be written to: {error.strerror}", remedy)]
    detail = f"{place} has {free_bytes / GIB:.1f} GiB free, written at {speed:.0f} MiB/s"
    is_fine = free_bytes >= LITTLE_SPACE and speed >= SLOW_DISK
    return [Finding("disk", "ok", detail) if is_fine else Finding("disk", "warning", detail, remedy)]


def _folder_of_runs() -> Path:
    """runs/, or the folder in which the first run will make it."""
    return RUNS if os.path.lexists(RUNS) else Path.cwd()


def _write_speed(folder: Path) -> float:
    """MiB/s with which 64 MiB reach the disk, or what does in five seconds."""
    chunk, started_at, num_written = os.urandom(8 * MIB), time.monotonic(), 0  # random: some disks compress
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # without a name: nothing stays, whatever happens
        while num_written < WRITTEN_MIB and time.monotonic() - started_at < WRITING_SECONDS:
            num_written += file.write(chunk) // MIB
            os.fsync(file.fileno())
    return num_written / (time.monotonic() - started_at)


def check_shared_memory(_: Surroundings) -> list[Finding]:
    """/dev/shm, through which loader workers hand over batches and NCCL the data of GPUs without a link."""
    if sys.platform != "linux":
        return [Finding("shared memory", "ok", "of no fixed size on this system")]
    remedy = "Remove old files there; in a container: docker run --shm-size=8g or --ipc=host."
    try:
        size = os.statvfs("/dev/shm")
    except OSError as error:
        return [Finding("shared memory", "broken", f"/dev/shm: {error.strerror}", remedy)]
    free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    detail = f"/dev/shm has {free / GIB:.2f} of {total / GIB:.2f} GiB free"
    status = "ok" if free >= LITTLE_SHARED_MEMORY else "warning" if free >= 16 * MIB else "broken"
    return [Finding("shared memory", status, detail, "" if status == "ok" else remedy)]


def check_open_files(_: Surroundings) -> list[Finding]:
    """How many files a process may have open: loader workers hand over each tensor as one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        return [Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")]
    status = "warning" if soft >= TOO_FEW_FILES else "broken"
    is_possible = hard == resource.RLIM_INFINITY or hard >= FEW_FILES
    remedy = "Type: ulimit -n 4096" if is_possible else f"Ask for a higher hard limit than {hard} (limits.conf(5))."
    return [Finding("open files", status, f"at most {soft}", remedy)]


def check_clock(_: Surroundings) -> list[Finding]:
    """The date, and whether the file system of runs/ (perhaps another machine's) agrees."""
    remedy = "Set the clock by a time server: timedatectl set-ntp true"
    now = time.time()
    detail = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC"
    if datetime.fromtimestamp(now, UTC).year < 2024:
        return [Finding("clock", "broken", f"{detail} is long ago", remedy)]
    try:
        with tempfile.TemporaryFile(dir=_folder_of_runs(), buffering=0) as file:
            file.write(b"tick")
            difference = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError:  # the disk's own check says so
        return [Finding("clock", "ok", detail)]
    if abs(difference) > CLOCK_TOLERANCE_SECONDS:
        detail = f"{detail}; the file system of runs/ is {difference:+.0f} s off"
        return [Finding("clock", "warning", detail, remedy + ", here and on the file server.")]
    return [Finding("clock", "ok", detail)]

"""This node's GPUs as NVML sees them: memory, load, users and locks, and which of them CUDA shows.

A lock is an abstract Unix socket (Linux): a name that one process of the machine can bind, and that is free again when
the process ends, however it ends. Containers with a network of their own have names of their own.
"""

import math
import os
import pwd
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
LOCK_PREFIX = "\0ddp-template-gpu/"  # the same in every project; the \0 makes it abstract


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in bytes, infinite where it cannot be read."""

    index: int  # as nvidia-smi shows it, in the order of the PCI bus
    uuid: str = ""
    name: str = "GPU"
    free_memory: float = math.inf
    total_memory: float = math.inf
    utilization: int | None = None  # percent
    users: tuple[str, ...] = ()  # whose processes compute on it

    @property
    def other_users(self) -> tuple[str, ...]:
        return tuple(user for user in self.users if user != user_name(os.geteuid()))


class Gpus(NamedTuple):
    """This node's GPUs."""

    present: list[Gpu]
    visible: list[Gpu]  # visible[i] is cuda:i
    mask: str | None  # CUDA_VISIBLE_DEVICES
    problem: str = ""  # why GPUs are missing, if known


def find_gpus(environment: Mapping[str, str], nvml: Any = None) -> Gpus:
    """The GPUs of this node; none if torch is built for the CPU or the driver does not answer. nvml: for pynvml."""
    import torch

    mask = environment.get("CUDA_VISIBLE_DEVICES")
    if nvml is None:
        if torch.version.cuda is None and torch.version.hip is None:
            return Gpus([], [], mask, f"torch {torch.__version__} is built without CUDA")
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()  # never shut down: without persistence mode, starting again takes seconds
    except nvml.NVMLError as error:  # Jetson, AMD: torch's numbers are the ids, and nothing is known of their memory
        gpus = [Gpu(index) for index in range(torch.cuda.device_count())]
        return Gpus(gpus, gpus, mask, f"NVML: {error}")
    present, problems = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            present.append(_read(nvml, index))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index}: {error}")
    visible = _visible(present, mask)
    if present and not visible:
        problems.append(f"CUDA_VISIBLE_DEVICES={mask} hides every GPU")
    return Gpus(present, visible, mask, "; ".join(problems))


def gpu_table(gpus: Gpus, states: Mapping[Gpu, str]) -> list[str]:
    """A line for each GPU of the machine: id, name, memory, load, users, and its state (`states`: of visible ones)."""
    lines = []
    for gpu in gpus.present:
        cells = [f"GPU {gpu.index}", gpu.name]
        if not math.isinf(gpu.total_memory):
            cells.append(f"{gpu.free_memory / GIB:.1f} of {gpu.total_memory / GIB:.1f} GiB free")
        if gpu.utilization is not None:
            cells.append(f"{gpu.utilization} % busy")
        if gpu.users:
            cells.append(f"used by {', '.join(gpu.users)}")
        lines.append("  ".join([*cells, states.get(gpu, f"hidden by CUDA_VISIBLE_DEVICES={gpus.mask}")]))
    return lines


def user_name(uid: int) -> str:
    """The user's name, or the number of a user without a name (usual in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def take_lock(name: str) -> socket.socket | None:
    """A lock, held until it is closed or the process and its forks have ended; None if another process holds it.

    name: a GPU's UUID. Without one (Jetson, AMD), and elsewhere than on Linux, the lock keeps nobody out.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        if name and sys.platform == "linux":
            lock.bind(LOCK_PREFIX + name)
            lock.listen(4096)  # lock_holder's calls are never answered and stay in this queue
    except OSError:  # EADDRINUSE
        lock.close()
        return None
    return lock


def lock_holder(name: str) -> str:
    """The user and process that hold the lock, in words; empty if nobody does, or the system does not say."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(LOCK_PREFIX + name)
            pid, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return ""
    return f"{user_name(uid)}, process {pid}"


@contextmanager
def chooser_lock(patience_seconds: float = 10.0) -> Iterator[None]:
    """Let one process of the machine at a time into the body: of two runs that want all GPUs, one gets them.

    After patience_seconds the body begins anyway: a process that was halted in it must not halt all others.
    """
    deadline = time.monotonic() + patience_seconds
    while (lock := take_lock("chooser")) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    yield
    if lock is not None:
        lock.close()


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: Callable[..., Any]) -> Any:
        try:
            return function(handle)
        except nvml.NVMLError:  # not every GPU and driver answers every question
            return None

    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    return Gpu(
        index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        free_memory=getattr(memory, "free", math.inf),
        total_memory=getattr(memory, "total", math.inf),
        utilization=getattr(ask(nvml.nvmlDeviceGetUtilizationRates), "gpu", None),
        users=tuple(sorted({_owner(process.pid) for process in processes})),
    )


def _owner(pid: int) -> str:
    try:
        return user_name(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:  # in another container, or hidden by hidepid
        return "a process that cannot be seen"


def _visible(gpus: list[Gpu], mask: str | None) -> list[Gpu]:
    """The GPUs that CUDA shows: it reads the mask up to an entry that names no GPU."""
    if mask is None:
        return gpus
    visible: list[Gpu] = []
    for entry in map(str.strip, mask.split(",")):
        is_uuid = entry.startswith("GPU-")
        named = [gpu for gpu in gpus if str(gpu.index) == entry or (is_uuid and gpu.uuid.startswith(entry))]
        if len(named) != 1:
            break
        visible += named
    return visible

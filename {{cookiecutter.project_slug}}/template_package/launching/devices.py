"""Chooses this node's devices, as `device_ids` in config.yaml specifies, and locks GPUs against other runs.

On Linux, a lock is an abstract Unix socket. Only one process can bind the socket's name, and the name is free again
when that process ends, however it ends. Up to 16 runs that share a GPU hold one of its locks each: while any of them
lives, device_ids=auto leaves that GPU. Containers with separate networks do not see each other's locks.
"""

import math
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import torch

from ..config import LaunchConfig
from ..core.settings import parse_device_ids
from ..errors import ConfigError, one_line

GIB = 2**30
POLL_SECONDS, CHOOSER_SECONDS = 3.0, 10.0
LOCKS_PER_GPU = 16


@dataclass(frozen=True)
class Gpu:
    """Describes one GPU. Memory is in bytes, and is set to infinity if the amount cannot be determined."""

    index: int  # as nvidia-smi shows it, in the order of the PCI bus
    uuid: str = ""
    name: str = "GPU"
    free_memory: float = math.inf
    total_memory: float = math.inf
    users: tuple[str, ...] = ()  # the users whose processes compute on it
    problem: str = ""  # why torch cannot compute on it

    def __str__(self) -> str:
        memory = f"{self.free_memory / GIB:.1f} of {self.total_memory / GIB:.1f} GiB free"
        return (
            f"GPU {self.index}  {self.name}  {memory}  used by {', '.join(self.users) or 'nobody'}"
        )


class Gpus(NamedTuple):
    present: list[Gpu]
    visible: list[Gpu]  # visible[i] is cuda:i
    problem: str = ""  # why GPUs are missing, if known


class Devices(NamedTuple):
    """Lists the devices that this run uses on this node, and holds the locks on them."""

    names: list[str]  # ["cuda:0", "cuda:1"] or ["cpu", "cpu"]
    notes: list[str]  # for the log
    # to be kept as long as the run lives; they end with the process
    locks: tuple[socket.socket, ...] = ()


def take_devices(
    device_ids: Any,
    launch: LaunchConfig,
    environment: Mapping[str, str],
    num_ranks: int = 0,
    nvml: Any = None,
) -> Devices:
    """Choose and lock this node's devices. Raise ConfigError if they are not available within launch.wait_minutes.

    If a launcher has started `num_ranks` ranks here, device_ids=auto takes that many devices. `nvml` replaces pynvml.
    """
    wanted = parse_device_ids(device_ids)
    if "cpu" in wanted or "mps" in wanted:
        return Devices([*map(str, wanted)], [])
    if not isinstance(wanted, str):
        gpus = find_gpus(environment, nvml)
        return _take(gpus, launch, named=_find_named([*map(int, wanted)], gpus))[0]
    number = num_ranks if wanted == "auto" else int(wanted.removeprefix("auto:"))
    num_needed = number or 1  # `auto` takes all that are free
    rule = f"device_ids={wanted}: must find {num_needed} GPUs that can be taken"
    deadline, is_waiting = time.monotonic() + 60 * launch.wait_minutes, False
    while True:
        gpus = find_gpus(environment, nvml)
        devices, num_free = _take(gpus, launch, number)
        if devices.names:
            return devices
        if time.monotonic() > deadline or len(gpus.visible) < num_needed:
            break
        if not is_waiting:
            print("\n".join([f"{rule}: waiting", *devices.notes]), file=sys.stderr, flush=True)
            is_waiting = True
        time.sleep(POLL_SECONDS)
    if wanted == "auto" and not num_free and not is_waiting:
        if num_needed == 1 and torch.backends.mps.is_available():  # a Mac's GPU
            return Devices(["mps"], [])
        return Devices(
            ["cpu"] * num_needed, ["no GPU can be taken: computing on the CPU", *devices.notes]
        )
    remedy = "Ask for fewer, wait (launch.wait_minutes=30), share (launch.share_gpus=true), or set device_ids=cpu,cpu."
    raise ConfigError(
        "\n".join(
            [f"{rule}, and found {num_free} of {len(gpus.visible)}. {remedy}", *devices.notes]
        )
    )


def _find_named(wanted: list[int], gpus: Gpus) -> list[Gpu]:
    """Return the GPUs with these ids. Raise ConfigError if a GPU is missing, or if torch cannot compute on it."""
    visible = {gpu.index: gpu for gpu in gpus.visible}
    reason = gpus.problem and f" ({gpus.problem})"
    missing = f"does not exist; driver and CUDA_VISIBLE_DEVICES show {[*visible] or 'none'}{reason}"
    for index in wanted:
        if problem := visible[index].problem if index in visible else missing:
            raise ConfigError(
                f"device_ids={one_line(wanted)}: GPU {index} {problem}. Set device_ids=cpu,cpu or auto."
            )
    return [visible[index] for index in wanted]


def _take(
    gpus: Gpus, launch: LaunchConfig, number: int = 0, named: Sequence[Gpu] = ()
) -> tuple[Devices, int]:
    """Lock the `named` GPUs. If none are named, try to lock `number` free GPUs, or every free GPU if it is 0."""
    deadline = time.monotonic() + CHOOSER_SECONDS
    # one process at a time: of two that want all GPUs, one gets them
    while (chooser := take_lock("chooser")) is None:
        if time.monotonic() > deadline:  # it takes milliseconds
            problem = f"another run has been choosing for {CHOOSER_SECONDS:g} s: is it suspended (Ctrl-Z)?"
            raise ConfigError(
                f"device_ids: {problem} End it; `ps -eo pid,stat,user,args` shows it with STAT T."
            )
        time.sleep(0.01)
    with chooser:
        locks = {gpu: _take_locks(gpu) for gpu in gpus.visible}
        is_used = {gpu: len(locks[gpu]) < LOCKS_PER_GPU for gpu in gpus.visible}
        states = {gpu: _state(gpu, launch, is_used[gpu]) for gpu in gpus.visible}
        free = [gpu for gpu in gpus.visible if states[gpu] == "free"]
        best = sorted(free, key=lambda gpu: -gpu.free_memory)[: number or None]
        chosen = named or [gpu for gpu in free if gpu in best and len(best) >= number]
        for gpu in gpus.visible:
            for lock in locks[gpu][1 if gpu in chosen else 0 :]:
                lock.close()
        held = [lock for gpu in dict.fromkeys(chosen) for lock in locks[gpu][:1]]
    names = {gpu: f"cuda:{gpus.visible.index(gpu)}" for gpu in chosen}
    states |= {
        gpu: f"-> {name}{', another run uses it too' if is_used[gpu] else ''}"
        for gpu, name in names.items()
    }
    table = [f"{gpu}  {states.get(gpu, 'hidden by CUDA_VISIBLE_DEVICES')}" for gpu in gpus.present]
    notes = [*filter(None, [gpus.problem]), *table]
    return Devices([names[gpu] for gpu in chosen], notes, tuple(held)), len(free)


def _take_locks(gpu: Gpu) -> list[socket.socket]:
    """Take all locks of the GPU that no other run holds."""
    others = [gpu.uuid and f"{gpu.uuid}/{number}" for number in range(1, LOCKS_PER_GPU)]
    locks = [take_lock(name) for name in (gpu.uuid, *others)]
    return [lock for lock in locks if lock is not None]


def _state(gpu: Gpu, launch: LaunchConfig, is_used: bool) -> str:
    """Return "free", or the reason why device_ids=auto does not take this GPU."""
    if gpu.problem:
        return gpu.problem
    if gpu.free_memory < launch.min_free_memory_gib * GIB:
        return f"below launch.min_free_memory_gib={launch.min_free_memory_gib:g}"
    if launch.share_gpus:
        return "free"
    if is_used:
        return "another run uses it"
    return "another user computes there" if {*gpu.users} - {owner(os.getpid())} else "free"


def find_gpus(environment: Mapping[str, str], nvml: Any = None) -> Gpus:
    """Find GPUs with NVML or, if that fails, with torch. Raise ConfigError if the driver is too old for this torch."""
    mask = environment.get("CUDA_VISIBLE_DEVICES")
    if nvml is None and torch.version.cuda is None and torch.version.hip is None:
        return Gpus([], [], f"torch {torch.__version__} is built without CUDA")
    nvml = nvml or pynvml
    try:
        nvml.nvmlInit()  # never shut down: without persistence mode, starting again takes seconds
        driver = nvml.nvmlSystemGetCudaDriverVersion_v2() // 1000
    # Jetson, AMD: torch's numbers are the ids, and nothing is known of their memory
    except nvml.NVMLError as error:
        gpus = [Gpu(index) for index in range(torch.cuda.device_count())]
        return Gpus(gpus, gpus, f"NVML: {error}")
    if driver < int((built := torch.version.cuda or "0").partition(".")[0]):
        problem = f"torch {torch.__version__} is built for CUDA {built}, and this driver ends at CUDA {driver}"
        wheel = f"torch=={torch.__version__.partition('+')[0]} --index-url https://download.pytorch.org/whl/cu126"
        raise ConfigError(
            f"{problem}. Update it, or for CUDA 12: python -m pip install --force-reinstall {wheel}"
        )
    present, problems = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            present.append(_read(nvml, index))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index}: {error}")
    return Gpus(present, present if mask is None else _visible(present, mask), "; ".join(problems))


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    gpu = Gpu(index, uuid=nvml.nvmlDeviceGetUUID(handle), name=nvml.nvmlDeviceGetName(handle))
    # not every GPU and driver answers every question: the rest stays unknown
    with suppress(nvml.NVMLError):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        # `sm_75 sm_80 …`; CUDA is not started
        generations = getattr(torch._C, "_cuda_getArchFlags", str)() or ""
        oldest = min((int(arch) for arch in re.findall(r"sm_(\d+)", generations)), default=0)
        if 10 * major + minor < oldest:
            gpu = replace(
                gpu,
                problem=f"has compute capability {major}.{minor}, for which this torch has no kernels",
            )
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpu = replace(gpu, free_memory=memory.free, total_memory=memory.total)
        users = {
            owner(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        }
        gpu = replace(gpu, users=tuple(sorted(users)))
    return gpu


def owner(pid: int) -> str:
    process = Path(f"/proc/{pid}")
    with suppress(OSError):  # in another container, or hidden by hidepid
        try:
            return process.owner()
        except KeyError:  # a user without a name, usual in containers
            return f"uid {process.stat().st_uid}"
    return "a process that cannot be seen"


def _visible(gpus: list[Gpu], mask: str) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES=`mask` leaves visible. Like CUDA, stop at the first invalid entry."""
    visible: list[Gpu] = []
    for entry in map(str.strip, mask.split(",")):
        if entry.startswith("MIG-"):  # a part of a GPU: CUDA shows one, as cuda:0
            return [Gpu(0, uuid=entry, name="MIG device")]
        named = [
            gpu
            for gpu in gpus
            if str(gpu.index) == entry or (entry[:4] == "GPU-" and gpu.uuid.startswith(entry))
        ]
        if len(named) != 1:
            break
        visible += named
    return visible


def take_lock(name: str) -> socket.socket | None:
    """Return a lock on `name`, or None if it is locked already. The lock lasts until this process and its forks end."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        # otherwise (a GPU without UUID: Jetson, AMD) it keeps nobody out
        if name and sys.platform == "linux":
            # the same in every project; the \0 makes it abstract
            lock.bind(f"\0ddp-template-gpu/{name}")
    except OSError:  # EADDRINUSE
        lock.close()
        return None
    return lock

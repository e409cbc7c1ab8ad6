"""The devices of this node's ranks: `device_ids` of config.yaml, checked against the GPUs that NVML and CUDA show.

A GPU's lock is an abstract Unix socket (Linux): a name that one process of the machine can bind, and that is free again
when the process ends, however it ends. Containers with a network of their own have names of their own.
"""

import math
import os
import pwd
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import torch

from ..config import LaunchConfig, parse_device_ids
from ..errors import ConfigError, one_line

GIB = 2**30
LOCK_PREFIX = "\0ddp-template-gpu/"  # the same in every project; the \0 makes it abstract
POLL_SECONDS = 3.0


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in bytes, infinite where it cannot be read."""

    index: int  # as nvidia-smi shows it, in the order of the PCI bus
    uuid: str = ""
    name: str = "GPU"
    free_memory: float = math.inf
    total_memory: float = math.inf
    users: tuple[str, ...] = ()  # the users whose processes compute on it
    problem: str = ""  # why torch cannot compute on it


class Gpus(NamedTuple):
    present: list[Gpu]
    visible: list[Gpu]  # visible[i] is cuda:i
    mask: str | None  # CUDA_VISIBLE_DEVICES
    problem: str = ""  # why GPUs are missing, if known


class Devices(NamedTuple):
    """The devices taken for this run on this node, with their locks."""

    names: list[str]  # ["cuda:0", "cuda:1"] or ["cpu", "cpu"]
    notes: list[str]  # for the log
    locks: tuple[socket.socket, ...] = ()  # to be kept as long as the run lives; they end with the process


def take_devices(
    device_ids: Any, launch: LaunchConfig, environment: Mapping[str, str], num_ranks: int = 0, nvml: Any = None
) -> Devices:
    """Take the devices of this node, after at most launch.wait_minutes. ConfigError if they cannot be had.

    num_ranks: the ranks that a launcher has started here; `auto` takes that many devices. nvml: see find_gpus.
    """
    wanted = parse_device_ids(device_ids)
    if "mps" in wanted and not torch.backends.mps.is_available():
        raise ConfigError("device_ids=mps: only a Mac has it, with a torch that is built for it. Set device_ids=auto.")
    if "cpu" in wanted or "mps" in wanted:
        return Devices([*map(str, wanted)], [])
    if not isinstance(wanted, str):
        return _take_named([int(index) for index in wanted], find_gpus(environment, nvml))
    num_needed = (num_ranks or 1) if wanted == "auto" else int(wanted.removeprefix("auto:"))
    deadline, is_waiting = time.monotonic() + 60 * launch.wait_minutes, False
    while True:
        gpus = find_gpus(environment, nvml)
        devices, num_free = _take_free(num_needed, wanted == "auto" and not num_ranks, launch, gpus)
        if devices.names:
            return devices
        if time.monotonic() > deadline or len(gpus.visible) < num_needed:
            break
        if not is_waiting:
            words = f"device_ids={wanted}: waiting for {num_needed} GPUs (launch.wait_minutes={launch.wait_minutes:g})"
            print("\n".join([words, *devices.notes]), file=sys.stderr, flush=True)
            is_waiting = True
        time.sleep(POLL_SECONDS)
    if wanted == "auto" and not num_free and not is_waiting:
        if num_needed == 1 and torch.backends.mps.is_available():  # a Mac's GPU
            return Devices(["mps"], [])
        return Devices(["cpu"] * num_needed, ["no GPU can be taken: computing on the CPU", *devices.notes])
    rule = f"must find {num_needed} GPUs that can be taken, and found {num_free} of {len(gpus.visible)}"
    remedy = "Ask for fewer, wait (launch.wait_minutes=30), share (launch.share_gpus=true), or set device_ids=cpu,cpu."
    raise ConfigError(("\n" if gpus.present else " ").join([f"device_ids={wanted}: {rule}. {remedy}", *devices.notes]))


def _take_named(wanted: list[int], gpus: Gpus) -> Devices:
    visible = {gpu.index: gpu for gpu in gpus.visible}
    if missing := [index for index in wanted if index not in visible]:
        there = "this machine has" if gpus.mask is None else f"CUDA_VISIBLE_DEVICES={gpus.mask} leaves"
        reason = f" ({gpus.problem})" if gpus.problem else ""
        problem = f"GPU {missing[0]} does not exist; {there} {[*visible] or 'none'}{reason}"
        remedy = "Use device_ids=auto or some of those." if visible else "Set device_ids=cpu, or cpu,cpu for two ranks."
        raise ConfigError(f"device_ids={one_line(wanted)}: {problem}. {remedy}")
    chosen = [visible[index] for index in wanted]
    if problems := [f"GPU {gpu.index}: {gpu.problem}" for gpu in chosen if gpu.problem]:
        raise ConfigError(f"device_ids={one_line(wanted)}: {problems[0]}. Leave it out, or install an older torch.")
    with chooser_lock():
        locks = {gpu: take_lock(gpu.uuid) for gpu in dict.fromkeys(chosen)}
    return _devices(gpus, chosen, locks, dict.fromkeys(gpus.visible, "not asked for"))


def _take_free(number: int, takes_all: bool, launch: LaunchConfig, gpus: Gpus) -> tuple[Devices, int]:
    """Lock the `number` free GPUs with the most memory, or all, or none if they are too few; tell how many are free."""
    with chooser_lock():
        locks = {gpu: take_lock(gpu.uuid) for gpu in gpus.visible}
        states = {gpu: _state(gpu, launch, is_locked=lock is None) for gpu, lock in locks.items()}
        free = sorted((gpu for gpu in gpus.visible if states[gpu] == "free"), key=lambda gpu: -gpu.free_memory)
        chosen = [] if len(free) < number else free if takes_all else free[:number]
        for gpu in set(locks).difference(chosen):
            if (lock := locks.pop(gpu)) is not None:
                lock.close()
    return _devices(gpus, sorted(chosen, key=gpus.visible.index), locks, states), len(free)


def _state(gpu: Gpu, launch: LaunchConfig, is_locked: bool) -> str:
    """Return "free", or the reason why `auto` leaves the GPU out."""
    if gpu.problem:
        return gpu.problem
    if gpu.free_memory < launch.min_free_memory_gib * GIB:
        return f"below launch.min_free_memory_gib={launch.min_free_memory_gib:g}"
    if launch.share_gpus:
        return "free"
    if is_locked:
        return "another run uses it"
    return "another user computes there" if {*gpu.users} - {owner(os.getpid())} else "free"


def _devices(
    gpus: Gpus, chosen: list[Gpu], locks: Mapping[Gpu, socket.socket | None], states: Mapping[Gpu, str]
) -> Devices:
    names = {gpu: f"cuda:{gpus.visible.index(gpu)}" for gpu in chosen}
    taken = {gpu: f"-> {name}{'' if locks[gpu] else ', another run uses it too'}" for gpu, name in names.items()}
    table = gpu_table(gpus, {**states, **taken})
    held = tuple(lock for lock in locks.values() if lock is not None)
    return Devices([names[gpu] for gpu in chosen], [*filter(None, [gpus.problem]), *table], held)


def find_gpus(environment: Mapping[str, str], nvml: Any = None) -> Gpus:
    """Find the GPUs of this node: none if torch is built for the CPU or the driver is silent. nvml: for pynvml."""
    mask = environment.get("CUDA_VISIBLE_DEVICES")
    if nvml is None and torch.version.cuda is None and torch.version.hip is None:
        return Gpus([], [], mask, f"torch {torch.__version__} is built without CUDA")
    nvml = nvml or pynvml
    try:
        nvml.nvmlInit()  # never shut down: without persistence mode, starting again takes seconds
    except nvml.NVMLError as error:  # Jetson, AMD: torch's numbers are the ids, and nothing is known of their memory
        gpus = [Gpu(index) for index in range(torch.cuda.device_count())]
        return Gpus(gpus, gpus, mask, f"NVML: {error}")
    built, driver = torch.version.cuda or "", nvml.nvmlSystemGetCudaDriverVersion_v2() // 1000
    if built and driver < int(built.partition(".")[0]):
        problem = f"torch {torch.__version__} is built for CUDA {built}, and this driver ends at CUDA {driver}"
        wheel = f"torch=={torch.__version__.partition('+')[0]} --index-url https://download.pytorch.org/whl/cu126"
        remedy = f"for CUDA 12, type: python -m pip install --force-reinstall {wheel}"
        raise ConfigError(f"{problem}. Install a newer driver, set device_ids=cpu, or, {remedy}")
    present, problems = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            present.append(_read(nvml, index))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index}: {error}")
    visible = present if mask is None else _visible(present, mask)
    if present and not visible:
        problems.append(f"CUDA_VISIBLE_DEVICES={mask} hides every GPU")
    return Gpus(present, visible, mask, "; ".join(problems))


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    gpu = Gpu(index, uuid=nvml.nvmlDeviceGetUUID(handle), name=nvml.nvmlDeviceGetName(handle))
    with suppress(nvml.NVMLError):  # not every GPU and driver answers every question: the rest stays unknown
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        generations = getattr(torch._C, "_cuda_getArchFlags", str)() or ""  # `sm_75 sm_80 …`; CUDA is not started
        oldest = min((int(arch) for arch in re.findall(r"sm_(\d+)", generations)), default=0)
        if 10 * major + minor < oldest:
            gpu = replace(gpu, problem=f"compute capability {major}.{minor}, for which this torch has no kernels")
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpu = replace(gpu, free_memory=memory.free, total_memory=memory.total)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        gpu = replace(gpu, users=tuple(sorted({owner(process.pid) for process in processes})))
    return gpu


def owner(pid: int) -> str:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:  # in another container, or hidden by hidepid
        return "a process that cannot be seen"
    with suppress(KeyError):  # a user without a name, usual in containers
        return pwd.getpwuid(uid).pw_name
    return f"uid {uid}"


def _visible(gpus: list[Gpu], mask: str) -> list[Gpu]:
    """Return the GPUs that CUDA shows: it reads the mask up to an entry that names no GPU."""
    visible: list[Gpu] = []
    for entry in map(str.strip, mask.split(",")):
        if entry.startswith("MIG-"):  # a part of a GPU: CUDA shows one, as cuda:0
            return [Gpu(0, uuid=entry, name="MIG device")]
        named = [gpu for gpu in gpus if str(gpu.index) == entry or (entry[:4] == "GPU-" and gpu.uuid.startswith(entry))]
        if len(named) != 1:
            break
        visible += named
    return visible


def gpu_table(gpus: Gpus, states: Mapping[Gpu, str]) -> list[str]:
    """Return a line for each GPU of the machine: id, name, memory, users, and its state (`states`: of visible ones)."""
    hidden = f"hidden by CUDA_VISIBLE_DEVICES={gpus.mask}"
    return [
        f"GPU {gpu.index}  {gpu.name}  {gpu.free_memory / GIB:.1f} of {gpu.total_memory / GIB:.1f} GiB free  "
        f"used by {', '.join(gpu.users) or 'nobody'}  {states.get(gpu, hidden)}"
        for gpu in gpus.present
    ]


def take_lock(name: str) -> socket.socket | None:
    """Take a lock, held until it is closed or the process and its forks have ended. None if another has it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        if name and sys.platform == "linux":  # otherwise (a GPU without UUID: Jetson, AMD) it keeps nobody out
            lock.bind(LOCK_PREFIX + name)
    except OSError:  # EADDRINUSE
        lock.close()
        return None
    return lock


@contextmanager
def chooser_lock() -> Iterator[None]:
    """Let one process of the machine at a time into the body: of two runs that want all GPUs, one gets them."""
    while (lock := take_lock("chooser")) is None:
        time.sleep(0.01)
    with lock:
        yield

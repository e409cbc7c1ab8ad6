"""This node's GPUs, as NVML sees them: memory, load, whose processes compute there, and which of them CUDA shows.

A GPU's id is the one nvidia-smi shows (PCI bus order; launcher.py sets CUDA_DEVICE_ORDER), `cuda:i` its place among
those that CUDA_VISIBLE_DEVICES leaves. CUDA itself would take memory on every GPU that it looks at.
"""

from __future__ import annotations

import math
import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
UNSEEN = "a process that cannot be seen"


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in bytes; infinite where it cannot be read."""

    index: int
    uuid: str = ""
    name: str = "GPU"
    free_memory: float = math.inf
    total_memory: float = math.inf
    utilization: int | None = None  # percent
    users: tuple[str, ...] = ()
    """Whose processes compute on it; UNSEEN where the system does not say (another container, hidepid)."""
    is_partitioned: bool = False  # cut into MIG instances

    @property
    def other_users(self) -> tuple[str, ...]:
        """`users` without the one who asks."""
        return tuple(user for user in self.users if user != user_name(os.geteuid()))


class Gpus(NamedTuple):
    """This node's GPUs. visible[i] is cuda:i; mask: CUDA_VISIBLE_DEVICES; problem: why GPUs are missing, if known."""

    present: list[Gpu]
    visible: list[Gpu]
    mask: str | None
    problem: str = ""


def find_gpus(environment: Mapping[str, str], nvml: Any = None) -> Gpus:
    """The GPUs of this node; none if torch is built for the CPU or the driver does not answer.

    nvml: a module with pynvml's functions, instead of the machine's own.
    """
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


def gpu_table(gpus: Gpus, fates: Mapping[Gpu, str]) -> list[str]:
    """An aligned line for each GPU: id, name, memory, load, whose processes, and its fate (that of a visible one)."""
    rows = []
    for gpu in gpus.present:
        memory = f"{gpu.free_memory / GIB:5.1f} of {gpu.total_memory / GIB:.1f} GiB free"
        rows.append(
            (
                f"GPU {gpu.index}",
                gpu.name,
                "" if math.isinf(gpu.total_memory) else memory,
                "" if gpu.utilization is None else f"{gpu.utilization:3} % busy",
                f"used by {', '.join(gpu.users)}" if gpu.users else "",
                fates.get(gpu, f"hidden by CUDA_VISIBLE_DEVICES={gpus.mask}"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=True) if width] for row in rows]
    return ["  ".join(cells).rstrip() for cells in lines]


def user_name(uid: int) -> str:
    """The user's name, or the number of one without a name (usual in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


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
        is_partitioned=(ask(nvml.nvmlDeviceGetMigMode) or [0])[0] == 1,
    )


def _owner(pid: int) -> str:
    try:
        return user_name(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:
        return UNSEEN


def _visible(gpus: list[Gpu], mask: str | None) -> list[Gpu]:
    """What CUDA sees: it reads the mask up to an entry that names no GPU, and none at all if one stands twice."""
    if mask is None:
        return gpus
    visible: list[Gpu] = []
    has_uuids = mask.strip().startswith("GPU-")
    for entry in map(str.strip, mask.split(",")):
        number = re.match(r"\+?([0-9]+)", entry)  # CUDA reads "1x" as 1
        named = [gpu for gpu in gpus if number and gpu.index == int(number[1])]
        named += [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if len(named) != 1 or entry.startswith("GPU-") != has_uuids:  # torch reads no mixture
            break
        if named[0] in visible:
            return []
        visible += named
    return visible

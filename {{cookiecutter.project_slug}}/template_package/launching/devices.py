"""Which devices this node's ranks compute on: `device_ids` of config.yaml, checked against the GPUs that are there.

A GPU's id is the one nvidia-smi shows (PCI bus order; launcher.py sets CUDA_DEVICE_ORDER), `cuda:i` its place among
those that CUDA_VISIBLE_DEVICES leaves. GPUs are read through NVML: CUDA itself would take memory on every one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..config import LaunchConfig
from ..validation import ConfigError, one_line, parse_device_ids

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it. Memory in bytes; infinite where it cannot be read."""

    index: int
    uuid: str = ""
    name: str = "GPU"
    free_memory: float = math.inf
    total_memory: float = math.inf
    utilization: int | None = None  # percent
    is_partitioned: bool = False  # cut into MIG instances

    def __str__(self) -> str:
        busy = "" if self.utilization is None else f", {self.utilization} % busy"
        return f"{self.name}, {self.free_memory / GIB:.1f} of {self.total_memory / GIB:.1f} GiB free{busy}"


class Gpus(NamedTuple):
    """This node's GPUs. visible[i] is cuda:i; mask: CUDA_VISIBLE_DEVICES; problem: why GPUs are missing, if known."""

    present: list[Gpu]
    visible: list[Gpu]
    mask: str | None
    problem: str = ""


def choose_devices(
    device_ids: Any, launch: LaunchConfig, environment: Mapping[str, str], nvml: Any = None
) -> list[str]:
    """One device for each rank of this node: ["cuda:0", "cuda:1"] or ["cpu", "cpu"]. ConfigError if that cannot be had.

    device_ids: see parse_device_ids. nvml: a module with pynvml's functions, instead of the machine's own.
    """
    wanted = parse_device_ids(device_ids)
    if isinstance(wanted, list) and "cpu" in wanted:
        return ["cpu"] * len(wanted)
    gpus = find_gpus(environment, nvml)
    _refuse_partitions(wanted, gpus)
    if isinstance(wanted, str):
        chosen = _choose_free(wanted, gpus, launch)
    else:
        chosen = [_find(int(index), wanted, gpus) for index in wanted]
    return [f"cuda:{gpus.visible.index(gpu)}" for gpu in chosen] or ["cpu"]


def describe_devices(
    device_ids: Any, devices: list[str], launch: LaunchConfig, environment: Mapping[str, str], nvml: Any = None
) -> list[str]:
    """Lines for the log: which GPU became which of `devices` (choose_devices' answer), and why the others did not."""
    wanted = parse_device_ids(device_ids)
    if isinstance(wanted, list) and "cpu" in wanted:
        return []
    lines = ["device_ids=auto: no GPU can be taken, one rank on the CPU"] if devices == ["cpu"] else []
    return lines + _describe(wanted, devices, launch, find_gpus(environment, nvml))


def find_gpus(environment: Mapping[str, str], nvml: Any = None) -> Gpus:
    """The GPUs of this node; none if torch is built for the CPU or the driver does not answer."""
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


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: Callable[..., Any]) -> Any:
        try:
            return function(handle)
        except nvml.NVMLError:  # not every GPU and driver answers every question
            return None

    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    return Gpu(
        index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        free_memory=getattr(memory, "free", math.inf),
        total_memory=getattr(memory, "total", math.inf),
        utilization=getattr(ask(nvml.nvmlDeviceGetUtilizationRates), "gpu", None),
        is_partitioned=(ask(nvml.nvmlDeviceGetMigMode) or [0])[0] == 1,
    )


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


def _refuse_partitions(wanted: object, gpus: Gpus) -> None:
    """CUDA shows a process one MIG partition at most, and then no whole GPU beside it."""
    if any(gpu.is_partitioned for gpu in gpus.visible) or (gpus.mask or "").strip().startswith("MIG-"):
        whole = ",".join(str(gpu.index) for gpu in gpus.present if not gpu.is_partitioned)
        remedy = f"Set CUDA_VISIBLE_DEVICES={whole} or device_ids=cpu." if whole else "Set device_ids=cpu."
        raise ConfigError(
            f"device_ids={one_line(wanted)}: a GPU cut by MIG is visible, ranks take whole ones. {remedy}"
        )


def _choose_free(wanted: str, gpus: Gpus, launch: LaunchConfig) -> list[Gpu]:
    """For "auto" all GPUs that may be taken, perhaps none; for "auto:N" the N with the most free memory."""
    free = [gpu for gpu in gpus.visible if not _obstacle(gpu, launch)]
    if wanted == "auto":
        return free
    if len(free) < (num_wanted := int(wanted.removeprefix("auto:"))):
        problem = f"device_ids={wanted}: GPUs that can be taken: {len(free)}."
        remedy = f"Use device_ids=auto:{len(free)}." if free else "Use device_ids=cpu."
        raise ConfigError("\n".join([f"{problem} {remedy}", *_describe(wanted, [], launch, gpus)]))
    return sorted(sorted(free, key=lambda gpu: -gpu.free_memory)[:num_wanted], key=gpus.visible.index)


def _obstacle(gpu: Gpu, launch: LaunchConfig) -> str:
    """What keeps `auto` from taking this GPU; empty if nothing does."""
    is_short = gpu.free_memory < launch.min_free_memory_gib * GIB
    return f"below launch.min_free_memory_gib={launch.min_free_memory_gib:g}" if is_short else ""


def _find(index: int, wanted: list[Any], gpus: Gpus) -> Gpu:
    """The visible GPU with this id; ConfigError with the ids that there are."""
    visible = {gpu.index: gpu for gpu in gpus.visible}
    if index in visible:
        return visible[index]
    ids, remedy = [*visible], "device_ids=auto or some of those"
    if not ids:
        problem, remedy = f"there is no GPU to use ({gpus.problem or 'NVML finds none'})", "device_ids=cpu"
    elif gpus.mask and max(wanted) < len(ids):
        problem = f"GPU {index} is hidden by CUDA_VISIBLE_DEVICES={gpus.mask}. Renumbered ids? nvidia-smi's count here"
        remedy = "device_ids=" + ",".join(str(ids[place]) for place in wanted)
    elif index in [gpu.index for gpu in gpus.present]:
        problem = f"GPU {index} is hidden by CUDA_VISIBLE_DEVICES={gpus.mask}, which leaves {ids}"
    else:
        problem = f"GPU {index} does not exist; this machine has {ids}"
    raise ConfigError(f"device_ids={one_line(wanted)}: {problem}. Use {remedy}.")


def _describe(wanted: object, devices: list[str], launch: LaunchConfig, gpus: Gpus) -> list[str]:
    lines = [gpus.problem] if gpus.problem else []
    for gpu in gpus.present:
        if gpu not in gpus.visible:
            fate = f"hidden by CUDA_VISIBLE_DEVICES={gpus.mask}"
        elif (device := f"cuda:{gpus.visible.index(gpu)}") in devices:
            fate = f"-> {device}"
        else:
            fate = (_obstacle(gpu, launch) if isinstance(wanted, str) else "") or "not taken"
        lines.append(f"GPU {gpu.index} {fate}: {gpu}")
    return lines

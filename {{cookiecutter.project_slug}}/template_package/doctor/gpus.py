"""Driver, GPUs, and the devices that the config chooses: does torch see them, and do they reach each other?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ..launching.gpus import GIB, find_gpus
from ..validation import ConfigError
from .findings import Finding, Surroundings
from .links import FAREWELL_SECONDS, NOT_TRIED, measure_pairs

if TYPE_CHECKING:  # these import model.py and dataset.py, which may be what is broken
    from ..config import Config
    from ..launching.devices import Devices

DRIVER_REMEDY = "Does nvidia-smi answer? If not, reboot, or install the driver again."
CUDA_TORCH = (
    "Type: python -m pip install --force-reinstall torch, with the --index-url that pytorch.org/get-started names for "
    "this driver."
)


def check_driver(around: Surroundings) -> list[Finding]:
    """The driver, and whether torch sees the GPUs that it knows."""
    import pynvml

    try:
        pynvml.nvmlInit()
        driver = f"NVIDIA driver {pynvml.nvmlSystemGetDriverVersion()}"
    except pynvml.NVMLError as error:
        return [_without_nvml(str(error))]
    torch, gpus = around.torch.result(), find_gpus(around.environment, pynvml)
    words = f"{driver}, GPUs: {', '.join(str(gpu.index) for gpu in gpus.present) or 'none'}"
    if problem := "; ".join(part for part in gpus.problem.split("; ") if part.startswith("GPU ")):
        return [Finding("driver", "broken", f"{words}; {problem}", DRIVER_REMEDY)]
    if gpus.present and torch.version.cuda is None:
        return [Finding("driver", "broken", f"{words}, but torch {torch.__version__} has no CUDA", CUDA_TORCH)]
    if gpus.present and not gpus.visible:
        return [Finding("driver", "warning", f"{words}; {gpus.problem}", "Unset CUDA_VISIBLE_DEVICES to use them.")]
    if problem := _cuda_problem(torch, len(gpus.visible)):
        return [Finding("driver", "broken", f"{words}; {problem}", DRIVER_REMEDY)]
    return [Finding("driver", "ok", f"{words}; torch sees {len(gpus.visible)}")]


def check_memory(around: Surroundings) -> list[Finding]:
    """The free memory of each GPU, against what auto asks for."""
    import pynvml

    around.torch.result()
    config = around.find_config()
    minimum = config.launch.min_free_memory_gib if config else 0.0
    remedy = "Wait for it, choose others by device_ids, or lower launch.min_free_memory_gib."
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # the driver's check says so
        return []
    findings = []
    for gpu in (gpu for gpu in find_gpus(around.environment, pynvml).present if gpu.free_memory < math.inf):
        name, users = f"memory of GPU {gpu.index}", f", used by {', '.join(gpu.users)}" if gpu.users else ""
        detail = f"{gpu.name}, {gpu.free_memory / GIB:.1f} of {gpu.total_memory / GIB:.1f} GiB free{users}"
        is_fine = gpu.free_memory >= minimum * GIB
        findings.append(Finding(name, "ok", detail) if is_fine else Finding(name, "warning", detail, remedy))
    return findings


def check_devices(around: Surroundings) -> Iterator[Finding]:
    """The devices that a run would take now, and each two of them in a real all-reduce."""
    config = around.find_config(timeout=None)
    if config is None:  # the config's own check says so
        return
    from ..launching.devices import take_devices

    try:
        devices = take_devices(config.device_ids, replace(config.launch, wait_minutes=0), around.environment)
    except ConfigError as error:
        detail, _, remedy = str(error).splitlines()[0].rpartition(". ")
        yield Finding("devices", "broken", detail, remedy)
        return
    if devices.names[0] == "cpu":
        yield _cpu(devices, around)
        return
    gpus = find_gpus(around.environment)
    names = [f"GPU {gpus.visible[int(name.removeprefix('cuda:'))].index}" for name in devices.names]
    detail = ", ".join(f"{gpu} is {device}" for gpu, device in zip(names, devices.names, strict=True))
    if warnings := [note for note in devices.notes if note.startswith("warning: ")]:
        yield Finding("devices", "warning", "; ".join([detail, *warnings]), "Use device_ids=auto to leave those out.")
    else:
        yield Finding("devices", "ok", detail)
    yield from _check_pairs(devices.names, names, config, around.deadline)


def _cpu(devices: Devices, around: Surroundings) -> Finding:
    gpus = find_gpus(around.environment) if devices.notes else None  # there are notes only if GPUs were looked at
    if gpus is None or not gpus.present:
        return Finding("devices", "ok", ", ".join(devices.names))
    detail = "; ".join(" ".join(note.split()) for note in devices.notes)
    remedy = "Wait, or see launch.share_gpus, launch.wait_minutes and launch.min_free_memory_gib."
    return Finding("devices", "warning", detail, remedy)


def _check_pairs(devices: list[str], names: list[str], config: Config, deadline: float) -> Iterator[Finding]:
    """One finding for each two GPUs. CPU ranks are all alike: the check `gloo` tries two."""
    launch = config.launch
    backend = "nccl" if launch.backend == "auto" else launch.backend
    deadline -= FAREWELL_SECONDS
    results = measure_pairs(devices, backend, launch.network_interface, launch.master_addr, deadline)
    remedy = (
        "Try NCCL_P2P_DISABLE=1 python run.py doctor: if that helps, the way between the two is at fault (ACS or IOMMU "
        "in the BIOS), and runs need it too. NCCL_DEBUG=INFO says more. Or leave one of them out of device_ids."
    )
    for (first, second), result in sorted(results.items()):
        check = f"{names[first]} and {names[second]}"
        if isinstance(result, float):
            yield Finding(check, "ok", f"all-reduce by {backend} at {result:.1f} GiB/s")
        else:
            status = "warning" if result == NOT_TRIED else "broken"
            yield Finding(check, status, f"all-reduce by {backend}: {result}", remedy)


def _cuda_problem(torch: ModuleType, num_visible: int) -> str:
    """Why CUDA shows torch less than the driver has; empty if it does not."""
    if num_visible == 0:
        return ""
    try:
        torch.cuda.init()  # raises what device_count() passes over, such as a driver too old for this torch
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    num_seen = torch.cuda.device_count()
    return "" if num_seen == num_visible else f"torch sees {num_seen} of {num_visible}"


def _without_nvml(problem: str) -> Finding:
    if Path("/proc/driver/nvidia/version").exists():
        return Finding("driver", "broken", f"the driver is loaded, but NVML says: {problem}", DRIVER_REMEDY)
    for device in Path("/sys/bus/pci/devices").glob("*"):
        vendor, kind = ((device / name).read_text(encoding="utf-8") for name in ("vendor", "class"))
        if vendor.startswith("0x10de") and kind.startswith("0x03"):  # NVIDIA, a display or 3D controller
            remedy = "Install NVIDIA's driver; in a container: docker run --gpus all."
            return Finding("driver", "warning", f"an NVIDIA GPU without a driver ({problem})", remedy)
    return Finding("driver", "ok", f"no NVIDIA GPU ({problem})")

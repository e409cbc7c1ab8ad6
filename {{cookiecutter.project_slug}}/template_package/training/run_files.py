"""Writes the files that describe a run: config.yaml, environment.json and summary.json."""

import logging
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml

from ..config import Config
from ..core.checkpoint import export_weights
from ..core.config import to_dict
from ..core.ranks import gather_objects
from ..files import template_facts, write_json, write_whole
from ..launching.distributed import RankContext
from ..strategies.base import Strategy
from .sharded import Checkpoints, read_whole

LIBRARIES = (
    "torch",
    "numpy",
    "pydantic",
    "torchmetrics",
    "safetensors",
    "accelerate",
    "deepspeed",
    "horovod",
)
logger = logging.getLogger(__name__)


def log_devices(directory: Path, context: RankContext) -> list[str]:
    """Log all ranks' devices. Return them on rank 0, and an empty list on other ranks. All ranks must call this."""
    own = [
        f"{d}: {torch.cuda.get_device_name(d) if d.type == 'cuda' else platform.machine()}"
        for d in context.devices
    ]
    devices = [*chain(*(gather_objects(own) or []))]
    for note in context.device_notes:  # each node logs its own notes
        logger.info("%s", note)
    if context.is_main:
        logger.info("%s: world_size %d, %s", directory, context.world_size, "; ".join(devices))
    return devices


def write_environment(
    directory: Path, config: Config, context: RankContext, devices: list[str]
) -> None:
    """On rank 0, write config.yaml and environment.json, and delete any summary.json from an earlier launch."""
    if not context.is_main:
        return
    text = yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False)
    write_whole(directory / "config.yaml", lambda beside: beside.write_text(text, encoding="utf-8"))
    facts: dict[str, Any] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "devices": devices,
    }
    facts |= {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "world_size": context.world_size,
    }
    facts |= {"command": sys.argv, "template": template_facts()}
    facts["libraries"] = {
        name: str(sys.modules[name].__version__) for name in LIBRARIES if name in sys.modules
    }
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        facts["git_commit"] = subprocess.check_output(
            command, text=True, timeout=10, stderr=subprocess.DEVNULL
        ).strip()
    write_json(directory / "environment.json", facts)
    (directory / "summary.json").unlink(missing_ok=True)


def write_summary(
    directory: Path,
    summary: dict[str, Any],
    config: Config,
    strategy: Strategy,
    checkpoints: Checkpoints,
) -> dict[str, Any]:
    """Add entries to `summary` and return it. On rank 0, write it and the best weights. All ranks must call this."""
    context = strategy.rank
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 2**10
    )
    own = [
        torch.cuda.max_memory_allocated(d) if d.type == "cuda" else resident
        for d in context.devices
    ]
    peaks = [round(peak / 2**20, 1) for peak in chain(*(gather_objects(own) or []))]
    summary |= {
        "world_size": context.world_size,
        "num_devices": len(peaks),
        "device_ids": config.device_ids,
    }
    summary |= {"strategy": config.strategy, "precision": config.training.precision}
    summary |= {"global_batch_size": config.training.global_batch_size, "peak_memory_mib": peaks}
    if not context.is_main:
        return summary
    if paths := sorted(checkpoints.newest_first(), key=lambda path: path != checkpoints.best):
        state = read_whole(checkpoints.load_first(paths) | {"optimizer": {}})
        # best.pt may come from steps that a crash lost and that were repeated
        summary["best"] = state["best"]
        export_weights(
            state.get("average", state["model"]), strategy.module, directory / "model.safetensors"
        )
    write_json(directory / "summary.json", summary)
    return summary


def start_profiler(directory: Path, rank: int, steps: list[int] | None, steps_done: int) -> Any:
    """Start a profiler for steps[0] to steps[1]. Return None if `steps` is None or those steps are already done."""
    if steps is None or steps_done >= steps[1]:
        return None
    from torch.profiler import profile, schedule

    path, skipped = directory / "profile" / f"rank_{rank}.json", max(0, steps[0] - 1 - steps_done)
    path.parent.mkdir(exist_ok=True)
    active = schedule(
        wait=0, warmup=0, active=steps[1] - skipped - steps_done, repeat=1, skip_first=skipped
    )
    profiler = profile(
        schedule=active, on_trace_ready=lambda done: done.export_chrome_trace(str(path))
    )
    profiler.start()
    return profiler

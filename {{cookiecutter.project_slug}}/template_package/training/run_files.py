"""What a run leaves beside logs and checkpoints: config.yaml, environment.json, summary.json, model.safetensors."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml

from .. import model as user_model
from ..config import Config, to_dict
from ..launching.distributed import RankContext, from_main, gather_objects
from ..launching.environment import RUNS_FOLDER
from ..strategies.base import Strategy
from ..validation import ConfigError
from .checkpoint import CheckpointFolder, claim_text, claimed_folders, load_checkpoint, write_whole
from .logs import get_logger
from .report import report_stem, show_report
from .weights import export_weights

LIBRARIES = ("torch", "numpy", "omegaconf", "torchmetrics", "safetensors", "accelerate", "deepspeed", "horovod")


def run_directory(config: Config) -> Path:
    """runs/<name>, in the folder where the command is typed."""
    return Path(os.environ.get(RUNS_FOLDER, "runs")) / config.name


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """In the body no other process trains this run: ConfigError on every rank if one does already. All ranks call it.

    The system lets go of the claim when rank 0's process dies. What a killed one left half written is removed.
    """
    held: list[TextIO] = []
    from_main(lambda: held.append(_claim(directory)))
    try:
        yield
    finally:
        claimed_folders.discard(directory)
        for file in held:
            with suppress(OSError):  # a disk without locks
                fcntl.flock(file, fcntl.LOCK_UN)  # closing it would not do: the loader's workers have it too
            file.close()


def is_described(directory: Path) -> bool:
    """Whether summary.json says that the run is complete; the same on every rank."""

    def read() -> bool:
        try:
            return bool(json.loads((directory / "summary.json").read_text(encoding="utf-8"))["status"] == "complete")
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):  # none, or not as we wrote it
            return False

    is_complete: bool = from_main(read)
    return is_complete


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Numbers that JSON does not know become the strings "NaN", "Infinity", "-Infinity", which Python's float() and
    JavaScript's Number() read back.
    """

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [known(entry) for entry in value]
        return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(known(content), indent=indent, ensure_ascii=False)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`content` as readable JSON, whole or not at all."""
    text = to_json(content, indent=2) + "\n"
    # A name on the command line may be no text; JSON can hold half a character as \udcff.
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8", errors="backslashreplace"))


def announce_start(directory: Path, context: RankContext) -> list[str]:
    """Say on which devices the run is; returns those of all ranks, on rank 0. All ranks call it."""
    devices = _flat(gather_objects([_device_name(device) for device in context.devices]))
    for note in context.device_notes:  # of its node: not only rank 0's is of interest
        get_logger().info("%s", note)
    if context.is_main:
        get_logger().info("%s: world_size %d, %s", directory, context.world_size, "; ".join(devices))
    return devices


def describe_start(directory: Path, config: Config, context: RankContext, devices: list[str]) -> None:
    """Rank 0 writes config.yaml (resolved) and environment.json.

    summary.json is removed: until this start has ended, an earlier end is not the run's.
    """
    if not context.is_main:
        return
    text = yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False)
    write_whole(directory / "config.yaml", lambda beside: beside.write_text(text, encoding="utf-8"))
    libraries = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            libraries[name] = version(name)
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "libraries": libraries,
        "cuda": torch.version.cuda,
        "world_size": context.world_size,
        "devices": devices,
        "git_commit": _git_commit(),
        "command": sys.argv,
    }
    write_json(directory / "environment.json", environment)
    (directory / "summary.json").unlink(missing_ok=True)


def describe_end(directory: Path, summary: dict[str, Any], config: Config, strategy: Strategy) -> dict[str, Any] | None:
    """Write summary.json and the best weights; all ranks call it, rank 0 writes. Returns what it says is the best."""
    context = strategy.context
    peaks = gather_objects([_peak_memory_mib(device) for device in context.devices])
    best: dict[str, Any] | None = summary["best"]
    if not context.is_main:
        return best
    summary |= {
        "world_size": context.world_size,
        "num_devices": strategy.num_devices,
        "device_ids": config.device_ids,
        "strategy": config.strategy,
        "precision": strategy.precision,
        "peak_memory_mib": _flat(peaks),
    }
    if strategy.precision == "fp16":
        summary["skipped_steps"] = int(strategy.num_skipped_steps)
    if (state := _best_state(CheckpointFolder(directory / "checkpoints", keep_last=None))) is not None:
        # Steps that were lost with a rank, and came out otherwise the second time, may have left the best.
        best = summary["best"] = state["best"]
        model = user_model.build_model(config.model)
        model.load_state_dict(state["model"])
        export_weights(model, directory / "model.safetensors")
    write_json(directory / "summary.json", summary)
    report = report_stem(directory, "validation", "best")
    if summary["status"] == "complete" and Path(f"{report}.json").exists():
        get_logger().info("\n%s\n", show_report(report))
    return best


def _best_state(checkpoints: CheckpointFolder) -> dict[str, Any] | None:
    """That of best.pt; without one, or if it is damaged, of the last checkpoint that is whole."""
    for path in sorted(checkpoints.newest_first(), key=lambda path: path != checkpoints.best):
        try:
            return load_checkpoint(path)
        except ConfigError as error:
            get_logger().warning("%s model.safetensors is made from another.", error)
    return None


def _claim(directory: Path) -> TextIO:
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(
            f"name={directory.name}: {file.read()} trains this run already. Wait for its end, or choose another name=…."
        ) from None
    except OSError as error:  # some network disks
        words = "%s: this disk has no locks (%s): do not start the run %s twice at a time"
        get_logger().warning(words, directory, error.strerror, directory.name)
    else:
        for left in (*directory.glob("**/.*.tmp"), *directory.glob(".tmp??????")):  # the last are safetensors' own
            left.unlink(missing_ok=True)
    file.truncate(0)
    file.write(claim_text())
    file.flush()
    claimed_folders.add(directory)
    return file


def _flat(of_ranks: list[list[Any]] | None) -> list[Any]:
    """One entry a device, in the order of ranks."""
    return [entry for of_rank in of_ranks or [] for entry in of_rank]


def _device_name(device: torch.device) -> str:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device}: {kind}"


def _peak_memory_mib(device: torch.device) -> float:
    """Of the GPU's memory that tensors took, or of this process's resident memory on the CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)  # bytes on macOS, KiB elsewhere


def _git_commit() -> str | None:
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

"""Which devices this node's ranks compute on: `device_ids` of config.yaml, checked against the GPUs that are there.

gpus.py reads the GPUs, gpu_locks.py keeps two runs from taking the same one. Here stands which may be taken, the wait
for those that others use, and what the user is told.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..config import LaunchConfig
from ..validation import ConfigError, one_line, parse_device_ids
from .gpu_locks import lock_holder, one_chooser, take_lock
from .gpus import GIB, Gpu, Gpus, find_gpus, gpu_table, user_name

POLL_SECONDS = 3.0
LOCKED = "another run uses it"


class Devices(NamedTuple):
    """One device for each rank of this node: ["cuda:0", "cuda:1"] or ["cpu", "cpu"].

    notes: for the log, which GPU became which cuda:i, and why others were left out.
    locks: to be kept as long as the run lives; they end with the process.
    """

    names: list[str]
    notes: list[str]
    locks: tuple[socket.socket, ...] = ()


class _Look(NamedTuple):
    """The GPUs at one moment. obstacles: what keeps `auto` from each visible one, "" if nothing does.

    chosen: those that this run has taken, in the order of cuda:i; none if there are too few. locks: theirs.
    """

    gpus: Gpus
    obstacles: dict[Gpu, str]
    chosen: list[Gpu]
    locks: dict[Gpu, socket.socket | None]

    @property
    def num_free(self) -> int:
        return [*self.obstacles.values()].count("")


def take_devices(
    device_ids: Any,
    launch: LaunchConfig,
    environment: Mapping[str, str],
    *,
    is_cpu_enough: bool = False,
    nvml: Any = None,
) -> Devices:
    """The devices of this node, after a wait if `launch` says so. ConfigError if they cannot be had.

    device_ids: see parse_device_ids. is_cpu_enough: auto:N, like auto, gives ["cpu"] where no GPU at all can be taken.
    (Who waits wants a GPU: after a wait in vain there is an error.) nvml: see find_gpus.
    """
    wanted = parse_device_ids(device_ids)
    if isinstance(wanted, str):
        return _take_free(wanted, launch, lambda: find_gpus(environment, nvml), is_cpu_enough or wanted == "auto")
    if "cpu" in wanted:
        return Devices(["cpu"] * len(wanted), [])
    return _take_named([int(index) for index in wanted], launch, find_gpus(environment, nvml))


def _take_named(wanted: list[int], launch: LaunchConfig, gpus: Gpus) -> Devices:
    _refuse_partitions(wanted, gpus)
    chosen = [_find(index, wanted, gpus) for index in wanted]
    with one_chooser():
        locks = {gpu: take_lock(gpu.uuid) for gpu in dict.fromkeys(chosen)}
    held = [gpu for gpu, lock in locks.items() if lock is None and not launch.share_gpus]
    warnings = [f"warning: GPU {gpu.index}: {LOCKED} too{_holder(gpu)}" for gpu in held]
    return _devices(_Look(gpus, dict.fromkeys(gpus.visible, "not asked for"), chosen, locks), warnings)


def _take_free(wanted: str, launch: LaunchConfig, read: Callable[[], Gpus], is_cpu_enough: bool) -> Devices:
    started, is_waiting = time.monotonic(), False
    num_needed = 1 if wanted == "auto" else int(wanted.removeprefix("auto:"))
    while not (look := _look(wanted, num_needed, read(), launch)).chosen:
        seconds_left = started + 60 * launch.wait_minutes - time.monotonic()
        if seconds_left <= 0 or not _can_be_had_later(num_needed, look.gpus, launch):
            break
        if not is_waiting:
            limit = f"launch.wait_minutes={launch.wait_minutes:g}"
            words = f"waiting for {_count(num_needed)} that can be taken ({limit}), found {look.num_free}:"
            _say(wanted, "\n".join([words, *_report(look)]))
            is_waiting = True
        time.sleep(min(POLL_SECONDS, seconds_left))
    if look.chosen:
        if is_waiting:
            _say(wanted, f"going on after {(time.monotonic() - started) / 60:.1f} minutes")
        return _devices(look, [])
    if is_cpu_enough and not look.num_free and not is_waiting:
        return _devices(look, ["no GPU can be taken: computing on the CPU"])
    raise ConfigError("\n".join([_too_few(wanted, num_needed, look, launch, is_waiting), *_report(look)]))


def _look(wanted: str, num_needed: int, gpus: Gpus, launch: LaunchConfig) -> _Look:
    """Takes for "auto" all GPUs that may be taken; for "auto:N" the N with the most free memory, or none."""
    _refuse_partitions(wanted, gpus)
    with one_chooser():
        locks = {gpu: take_lock(gpu.uuid) for gpu in gpus.visible}
        obstacles = {gpu: _obstacle(gpu, launch, is_locked=lock is None) for gpu, lock in locks.items()}
        free = sorted((gpu for gpu in gpus.visible if not obstacles[gpu]), key=lambda gpu: -gpu.free_memory)
        taken = [] if len(free) < num_needed else free if wanted == "auto" else free[:num_needed]
        for gpu, lock in locks.items():
            if lock is not None and gpu not in taken:
                lock.close()
    return _Look(gpus, obstacles, sorted(taken, key=gpus.visible.index), {gpu: locks[gpu] for gpu in taken})


def _obstacle(gpu: Gpu, launch: LaunchConfig, is_locked: bool) -> str:
    if gpu.free_memory < launch.min_free_memory_gib * GIB:
        return f"below launch.min_free_memory_gib={launch.min_free_memory_gib:g}"
    if launch.share_gpus:
        return ""
    if is_locked:
        return LOCKED
    return "another user computes there" if gpu.other_users else ""


def _can_be_had_later(number: int, gpus: Gpus, launch: LaunchConfig) -> bool:
    return sum(gpu.total_memory >= launch.min_free_memory_gib * GIB for gpu in gpus.visible) >= number


def _devices(look: _Look, notes: list[str]) -> Devices:
    names = [f"cuda:{look.gpus.visible.index(gpu)}" for gpu in look.chosen] or ["cpu"]
    problem = [look.gpus.problem] if look.gpus.problem else []
    locks = tuple(lock for lock in look.locks.values() if lock is not None)
    return Devices(names, [*notes, *problem, *_report(look)], locks)


def _find(index: int, wanted: list[int], gpus: Gpus) -> Gpu:
    """The visible GPU with this id; ConfigError with the ids that there are."""
    visible = {gpu.index: gpu for gpu in gpus.visible}
    if index in visible:
        return visible[index]
    ids, remedy = [*visible], "Use device_ids=auto or some of those."
    if not ids:
        problem, remedy = f"there is no GPU to use ({gpus.problem or 'NVML finds none'})", "Use device_ids=cpu."
    elif gpus.mask is None:
        problem = f"GPU {index} does not exist; this machine has {ids}"
    else:
        fate = "is hidden" if index in [gpu.index for gpu in gpus.present] else "does not exist"
        problem = f"GPU {index} {fate}; CUDA_VISIBLE_DEVICES={gpus.mask} leaves {ids}"
        # Perhaps counted as torch counts them or, in a scheduler's job, as the machine does outside of it.
        places = wanted if max(wanted) < len(ids) else [*range(len(wanted))]
        if max(places) < len(ids):
            remedy = f"Renumbered ids? Write device_ids={','.join(str(ids[place]) for place in places)}."
    raise ConfigError(f"device_ids={one_line(wanted)}: {problem}. {remedy}")


def _refuse_partitions(wanted: object, gpus: Gpus) -> None:
    """CUDA shows a process one MIG partition at most, and then no whole GPU beside it."""
    if any(gpu.is_partitioned for gpu in gpus.visible) or (gpus.mask or "").strip().startswith("MIG-"):
        whole = ",".join(str(gpu.index) for gpu in gpus.present if not gpu.is_partitioned)
        remedy = f"Set CUDA_VISIBLE_DEVICES={whole} or device_ids=cpu." if whole else "Set device_ids=cpu."
        raise ConfigError(
            f"device_ids={one_line(wanted)}: a GPU cut by MIG is visible, ranks take whole ones. {remedy}"
        )


def _too_few(wanted: str, num_needed: int, look: _Look, launch: LaunchConfig, has_waited: bool) -> str:
    gpus, enough_memory = look.gpus, launch.min_free_memory_gib * GIB
    remedies = [f"device_ids=auto:{look.num_free}"] if look.num_free else []
    if sum(gpu.free_memory >= enough_memory for gpu in gpus.visible) >= num_needed:
        remedies.append("launch.share_gpus=true")
    remedies = remedies or ["device_ids=cpu"]
    if not has_waited and _can_be_had_later(num_needed, gpus, launch):
        remedies.append("launch.wait_minutes=30")
    found = f"found {look.num_free} of {len(gpus.visible)}"
    found += f" after {launch.wait_minutes:g} minutes" if has_waited else ""
    found += f" ({gpus.problem})" if gpus.problem else ""
    rule = f"must find {_count(num_needed)} that can be taken, and {found}"
    return f"device_ids={wanted}: {rule}. Set {' or '.join(remedies)}."


def _report(look: _Look) -> list[str]:
    """A line for each GPU of the machine, with what became of it."""
    fates = {gpu: obstacle or "free" for gpu, obstacle in look.obstacles.items()}
    fates |= {gpu: LOCKED + _holder(gpu) for gpu, fate in fates.items() if fate == LOCKED}
    return gpu_table(look.gpus, fates | {gpu: f"-> cuda:{look.gpus.visible.index(gpu)}" for gpu in look.chosen})


def _holder(gpu: Gpu) -> str:
    holder = lock_holder(gpu.uuid)
    return f" ({user_name(holder.uid)}, process {holder.pid})" if holder else ""


def _say(wanted: str, text: str) -> None:
    print(f"device_ids={wanted}: {text}", file=sys.stderr, flush=True)


def _count(number: int) -> str:
    return f"{number} GPU{'s' * (number > 1)}"

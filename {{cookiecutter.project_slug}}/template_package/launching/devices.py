"""The devices of this node's ranks: `device_ids` of config.yaml, checked against the GPUs that are there."""

import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..config import LaunchConfig, parse_device_ids
from ..errors import ConfigError, one_line
from .gpus import GIB, Gpu, Gpus, chooser_lock, find_gpus, gpu_table, lock_holder, take_lock

POLL_SECONDS = 3.0
Locks = dict[Gpu, socket.socket | None]


class Devices(NamedTuple):
    """The devices of this node."""

    names: list[str]  # ["cuda:0", "cuda:1"] or ["cpu", "cpu"]
    notes: list[str]  # for the log
    locks: tuple[socket.socket, ...] = ()  # to be kept as long as the run lives; they end with the process


def take_devices(
    device_ids: Any,
    launch: LaunchConfig,
    environment: Mapping[str, str],
    *,
    is_cpu_enough: bool = False,
    nvml: Any = None,
) -> Devices:
    """The devices of this node, after a wait if `launch` says so. ConfigError if they cannot be had.

    is_cpu_enough: auto:N, as auto alone does, takes the CPU where no GPU at all can be taken. nvml: see find_gpus.
    """
    wanted = parse_device_ids(device_ids)
    if not isinstance(wanted, str):
        if "cpu" in wanted:
            return Devices(["cpu"] * len(wanted), [])
        return _take_named([int(index) for index in wanted], launch, find_gpus(environment, nvml))
    num_needed = 1 if wanted == "auto" else int(wanted.removeprefix("auto:"))
    deadline, is_waiting = time.monotonic() + 60 * launch.wait_minutes, False
    while True:
        gpus = find_gpus(environment, nvml)
        chosen, locks, states = _lock_free(wanted, num_needed, gpus, launch)
        table = gpu_table(gpus, states)
        if chosen or time.monotonic() > deadline or len(gpus.visible) < num_needed:
            break
        if not is_waiting:
            words = f"device_ids={wanted}: waiting for {num_needed} GPUs (launch.wait_minutes={launch.wait_minutes:g})"
            print("\n".join([words, *table]), file=sys.stderr, flush=True)
            is_waiting = True
        time.sleep(POLL_SECONDS)
    if chosen:
        return _devices(gpus, chosen, locks, states)
    num_free, notes = [*states.values()].count("free"), [*filter(None, [gpus.problem]), *table]
    if (is_cpu_enough or wanted == "auto") and not num_free and not is_waiting:
        return Devices(["cpu"] * num_needed, ["no GPU can be taken: computing on the CPU", *notes])
    remedies = [f"device_ids=auto:{num_free}"] if num_free else ["device_ids=cpu"]
    if len(gpus.visible) >= num_needed:
        remedies += ["launch.share_gpus=true", "launch.wait_minutes=30"]
    rule = f"must find {num_needed} GPUs that can be taken, and found {num_free} of {len(gpus.visible)}"
    raise ConfigError("\n".join([f"device_ids={wanted}: {rule}. Set {' or '.join(remedies)}.", *notes]))


def _take_named(wanted: list[int], launch: LaunchConfig, gpus: Gpus) -> Devices:
    visible = {gpu.index: gpu for gpu in gpus.visible}
    if missing := [index for index in wanted if index not in visible]:
        there = "this machine has" if gpus.mask is None else f"CUDA_VISIBLE_DEVICES={gpus.mask} leaves"
        reason = f" ({gpus.problem})" if gpus.problem else ""
        raise ConfigError(
            f"device_ids={one_line(wanted)}: GPU {missing[0]} does not exist; {there} {[*visible]}{reason}. "
            "Use device_ids=auto or some of those."
        )
    chosen = [visible[index] for index in wanted]
    with chooser_lock():
        locks = {gpu: take_lock(gpu.uuid) for gpu in dict.fromkeys(chosen)}
    held = [gpu for gpu, lock in locks.items() if lock is None and not launch.share_gpus]
    warnings = [f"warning: GPU {gpu.index}: another run uses it too ({lock_holder(gpu.uuid)})" for gpu in held]
    devices = _devices(gpus, chosen, locks, dict.fromkeys(gpus.visible, "not asked for"))
    return devices._replace(notes=warnings + devices.notes)


def _lock_free(
    wanted: str, num_needed: int, gpus: Gpus, launch: LaunchConfig
) -> tuple[list[Gpu], Locks, dict[Gpu, str]]:
    """The GPUs locked for this run, their locks, and the state of each visible GPU in words.

    "auto" takes all that are free, "auto:N" the N with the most free memory, or none if there are fewer.
    """
    with chooser_lock():
        locks = {gpu: take_lock(gpu.uuid) for gpu in gpus.visible}
        states = {gpu: _obstacle(gpu, launch, is_locked=lock is None) or "free" for gpu, lock in locks.items()}
        free = sorted((gpu for gpu in gpus.visible if states[gpu] == "free"), key=lambda gpu: -gpu.free_memory)
        chosen = [] if len(free) < num_needed else free if wanted == "auto" else free[:num_needed]
        for gpu in set(locks).difference(chosen):
            if (lock := locks.pop(gpu)) is not None:
                lock.close()
    return sorted(chosen, key=gpus.visible.index), locks, states


def _obstacle(gpu: Gpu, launch: LaunchConfig, is_locked: bool) -> str:
    """The reason why `auto` leaves the GPU out; empty if it does not."""
    if gpu.free_memory < launch.min_free_memory_gib * GIB:
        return f"below launch.min_free_memory_gib={launch.min_free_memory_gib:g}"
    if launch.share_gpus:
        return ""
    if is_locked:
        return f"another run uses it ({lock_holder(gpu.uuid)})"
    return "another user computes there" if gpu.other_users else ""


def _devices(gpus: Gpus, chosen: list[Gpu], locks: Locks, states: Mapping[Gpu, str]) -> Devices:
    names = {gpu: f"cuda:{gpus.visible.index(gpu)}" for gpu in chosen}
    table = gpu_table(gpus, {**states, **{gpu: f"-> {name}" for gpu, name in names.items()}})
    held = tuple(lock for lock in locks.values() if lock is not None)
    return Devices([names[gpu] for gpu in chosen], [*filter(None, [gpus.problem]), *table], held)

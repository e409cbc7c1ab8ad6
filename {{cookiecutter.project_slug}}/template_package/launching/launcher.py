"""Runs one function once per rank: in this process, in processes started here, or joined to torchrun and its like.

Started here or by torchrun, a rank sees the same: a place (RankContext), a process group, its own device. The
environment is read in this file alone.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..config import Config
from ..validation import ConfigError
from .devices import choose_devices, describe_devices
from .distributed import RankContext, join_group, leave_group, set_context
from .processes import OUT_OF_MEMORY, STOPPED, Failure, num_usable_cores, process_started_at, run_processes

RunFunction = Callable[[int, int, Config], None]
Report = Callable[[Failure], None]

MAX_TEXT = 15_000
"""Characters of a failure's text: a pipe holds 64 KiB, and the launching process reads after the rank has ended."""

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def find_devices(config: Config, environment: Mapping[str, str] = os.environ) -> list[str]:
    """This node's devices, one a local rank. ConfigError for what is not there, or not what the launcher started."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # ids as nvidia-smi shows them; CUDA has not started yet
    devices = choose_devices(config.device_ids, config.launch, environment)
    if not _is_launched(environment):
        return devices
    if missing := [name for name in LAUNCHER_VARIABLES if name not in environment]:
        raise ConfigError(
            f"the environment is half set: {', '.join(missing)} missing beside RANK or WORLD_SIZE. "
            "Unset those and type `python run.py`, or start with torchrun, which sets all."
        )
    num_local_ranks = int(environment["LOCAL_WORLD_SIZE"])
    if config.device_ids == "auto" and devices == ["cpu"]:
        devices = ["cpu"] * num_local_ranks
    if len(devices) != num_local_ranks:
        raise ConfigError(
            f"device_ids={config.device_ids} names {len(devices)} devices, but the launcher started "
            f"{num_local_ranks} ranks on this node. Use --nproc-per-node={len(devices)}, or name {num_local_ranks} "
            "devices."
        )
    return devices


def find_world_size(devices: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks: one a device; under a launcher what it says, which is the sum over its nodes."""
    return int(environment["WORLD_SIZE"]) if _is_launched(environment) else len(devices)


def launch(run_fn: RunFunction, config: Config, devices: list[str], world_size: int) -> int:
    """The exit code of run_fn(rank, world_size, config), run once per rank: 0, 1, 2, 130 or 143."""
    if _is_launched(os.environ):
        return _run_launched_rank(run_fn, config, devices, world_size)
    attempt = _run_here if world_size == 1 else _start_ranks
    while (code := attempt(run_fn, config, devices)) == OUT_OF_MEMORY:
        config = _go_on(config)
        print("out of memory: starting again from the last checkpoint, with smaller micro-batches", file=sys.stderr)
    return code


def _run_here(run_fn: RunFunction, config: Config, devices: list[str]) -> int:
    context = RankContext(device=torch.device(devices[0]), **_origin(config, devices))
    return _run_rank(run_fn, config, context, partial(_print_failure, device=devices[0]))


def _is_launched(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment or "WORLD_SIZE" in environment


def _start_ranks(run_fn: RunFunction, config: Config, devices: list[str]) -> int:
    # The system chooses the port, and this store holds it until the last rank has ended: no two runs can collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def ask_to_stop(number: int) -> bool:
        if not store.check(["stop/ready"]):
            return False
        store.set("stop/signal", str(int(number)))
        return True

    place = RankContext(world_size=len(devices), local_world_size=len(devices), **_origin(config, devices))
    environment = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **({"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "INFO"} if config.launch.debug else {}),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if sys.platform == "linux" else "lo0"),
    }
    code, failure = run_processes(
        _run_started_rank,
        [
            (run_fn, config, replace(place, rank=rank, local_rank=rank, device=torch.device(device)), store.port)
            for rank, device in enumerate(devices)
        ],
        start_method=config.launch.start_method,
        environment=environment,
        ask_to_stop=ask_to_stop,
    )
    if failure is not None and code != OUT_OF_MEMORY:
        _print_failure(failure, devices[failure.rank])
    return code


def _run_started_rank(run_fn: RunFunction, config: Config, place: RankContext, port: int, report: Report) -> int:
    return _run_rank(run_fn, config, replace(place, store=dist.TCPStore("127.0.0.1", port, is_master=False)), report)


def _run_launched_rank(run_fn: RunFunction, config: Config, devices: list[str], world_size: int) -> int:
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # torchrun's agent serves the store itself; other launchers leave that to rank 0.
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0 and not is_served
    )
    # After a restart torchrun hands on the same store: without a prefix the new ranks read the dead ones' addresses.
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        config = _go_on(config)
    context = RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=len(devices),
        node_rank=int(os.environ.get("GROUP_RANK", "0")),
        device=torch.device(devices[local_rank]),
        **_origin(config, devices),
        store=store if world_size > 1 else None,
    )

    def report(failure: Failure) -> None:
        if store.add("failures", 1) == 1:  # the others' lost connections follow from the first
            _print_failure(failure, devices[local_rank])

    code = _run_rank(run_fn, config, context, report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads abort about one interpreter exit in ten (torch 2.13)


def _run_rank(run_fn: RunFunction, config: Config, context: RankContext, report: Report) -> int:
    """What every rank does, however it was started: join, run, leave."""
    torch.set_num_threads(_num_threads(context.local_world_size))
    set_context(context)
    code = 0
    try:
        join_group(context, config.launch.backend, timedelta(minutes=config.launch.timeout_minutes))
        run_fn(context.rank, context.world_size, config)
    except ConfigError as error:
        report(Failure(context.rank, 2, str(error)[:MAX_TEXT], time.time()))
        return 2
    except KeyboardInterrupt:
        return STOPPED[0]
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        report(Failure(context.rank, 1, traceback.format_exc()[-MAX_TEXT:], time.time()))
        return 1
    if code in (0, *STOPPED):  # otherwise the other ranks may sit in a collective, and leaving would wait for them
        leave_group()
    return code


def _go_on(config: Config) -> Config:
    """For another attempt at the same run: resume=never was said of what lay there before the first."""
    if config.checkpoint.resume != "never":
        return config
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto"))


def _origin(config: Config, devices: list[str]) -> dict[str, Any]:
    notes = describe_devices(config.device_ids, devices, config.launch, os.environ)
    return {"started_at": process_started_at(), "device_notes": tuple(notes)}


def _num_threads(num_local_ranks: int) -> int:
    # Idle OpenMP threads spin: two ranks with a thread for each core run 15 times slower than with their share.
    return max(1, num_usable_cores() // num_local_ranks)


def _print_failure(failure: Failure, device: str) -> None:
    if failure.exit_code == 2:
        print(f"error: {failure.text}", file=sys.stderr)
    else:
        print(
            f"rank {failure.rank} ({socket.gethostname()}, {device}) failed:\n{failure.text}",
            file=sys.stderr,
            flush=True,
        )

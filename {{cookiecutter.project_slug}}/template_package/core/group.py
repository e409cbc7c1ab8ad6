"""Joins the group of all ranks, asks it to stop, and leaves it."""

import faulthandler
import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .config import Config, LaunchConfig, to_dict, values_of
from .launch import (
    DEVICES,
    LISTENER,
    MASK,
    PARENT,
    Devices,
    as_stop,
    choose_devices,
    number_of,
)
from .processes import STOP_SIGNALS
from .ranks import Rank, all_reduce, from_main, gather_objects, num_usable_cores
from .settings import CommandLine

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def join(line: CommandLine, launch: LaunchConfig, devices: Devices | None) -> Rank:
    """Return this process's rank. If there are several, join their process group.

    `devices` are those of this process alone. Without them, a launcher has started it.
    """
    if devices is not None:
        set_visible(devices)
        rank = Rank(devices=tuple(map(torch.device, devices.names)))
    else:
        rank = _join_launched(line, launch)
    if rank.device.type == "cuda":
        if not torch.cuda.is_available():
            problem = (
                f"torch {torch.__version__} cannot use it: is it built for this driver's CUDA?"
            )
            remedy = "Set device_ids=cpu, or for a driver of CUDA 12 type: python -m pip install "
            remedy += "--force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
            raise ConfigError(f"device_ids: {problem} {remedy}")
        torch.cuda.set_device(rank.device)  # NCCL's collectives use the current one
    if rank.world_size > 1:
        store, own = rank.store, f"{rank.device.type} with torch {torch.__version__}"
        store.set(f"kind/{rank.rank}", own)
        if rank.is_main:
            kinds = {store.get(f"kind/{other}").decode() for other in range(rank.world_size)}
            store.set("kinds", " and ".join(sorted(kinds)))
        if (found := store.get("kinds").decode()) != own:  # they would wait for each other in vain
            raise ConfigError(f"device_ids: ranks compute on {found}. Make all alike.")
        is_nccl = launch.backend == "nccl"
        is_nccl |= launch.backend == "auto" and rank.device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_nccl else "gloo",  # gloo carries objects and the stop
            store=dist.PrefixStore("group", store),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(minutes=2 * launch.timeout_minutes),  # a hang is told before
            device_id=rank.device if is_nccl else None,
        )
    return rank


def set_visible(devices: Devices) -> None:
    """Hide the other GPUs from this process. Call this before CUDA starts."""
    if devices.visible:
        os.environ[MASK] = devices.visible


def _join_launched(line: CommandLine, launch: LaunchConfig) -> Rank:
    numbers = [os.environ.get(name, "") for name in NUMBERS]
    if not all(number.isdecimal() for number in numbers):
        problem = "the environment is half set. Unset them and type `python run.py`, or start with torchrun."
        raise ConfigError(f"{', '.join(NUMBERS)}: {problem}")
    rank, world_size, local_rank, local_size, port = map(int, numbers)
    node_rank = int(os.environ.get("GROUP_RANK") or rank // local_size)
    address, attempt = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if world_size == local_size:  # one machine, whose name may lead anywhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    own_threads = os.environ.get("OMP_NUM_THREADS")
    if own_threads is None or (own_threads == "1" and PARENT not in os.environ):  # torchrun's 1
        # Idle OpenMP threads spin: two ranks with a thread for each core run 15 times slower.
        torch.set_num_threads(max(1, num_usable_cores() // local_size))
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    served: Any = {}
    if listener := os.environ.get(LISTENER):
        served = {"master_listen_fd": int(listener)} if rank == 0 else {}
    store = dist.PrefixStore(
        # after a restart, torchrun's store still holds the dead ranks' keys; another one is new
        f"attempt_{attempt if is_served else 0}",
        dist.TCPStore(
            address,
            port,
            is_master=rank == 0 and not is_served,
            wait_for_workers=False,
            timeout=timedelta(
                minutes=launch.timeout_minutes + number_of(line, "launch.wait_minutes", 0.0)
            ),
            **served,
        ),
    )
    if names := os.environ.get(DEVICES):  # of start_ranks(), which has set CUDA_VISIBLE_DEVICES
        devices = Devices(json.loads(names))
    else:
        key = f"devices/{node_rank}"
        if local_rank == 0:
            devices = choose_devices(line, local_size)
            if len(devices.names) != local_size:
                problem = (
                    f"names {len(devices.names)} devices, but torchrun started {local_size} ranks"
                )
                raise ConfigError(f"device_ids: {problem} on this node. Make both numbers equal.")
            store.set(key, json.dumps(devices))
        devices = Devices(*json.loads(store.get(key)))
        set_visible(devices)
    own = (torch.device(devices.names[local_rank]),)
    return Rank(rank, world_size, local_rank, local_size, node_rank, own, store)


class StopRequest:
    """Receives stop signals. All ranks stop before the same step or evaluation batch.

    A signal sets a number, and an all-reduce of it starts with each call of code(). The next call
    reads the result, so that no step waits for it.
    """

    def __init__(self, rank: Rank, timeout_minutes: float, stacks: Any) -> None:
        self.received, self._is_alone = 0, rank.world_size == 1
        self._sent = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None
        self._timeout, self._stacks, self._armed_at = 60 * timeout_minutes, stacks, -math.inf
        self._pid = os.getpid()
        if not self._is_alone:
            os.register_at_fork(before=self._settle)

    def listen(self) -> None:
        """From now on, a stop signal ends the run after a step. Before, it ends the process."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, and ranks of start_ranks()
                signal.signal(number, self._receive)

    def _receive(self, number: int, _: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the step
        self.received = 128 + as_stop(number)
        if self._is_alone:
            with suppress(OSError):  # the terminal is lost
                print(
                    "\nasked to stop: saving within a step (Ctrl-C again: at once)",
                    file=sys.__stderr__,
                )

    def code(self) -> int:
        """Return 0, or the exit code to stop with: the same on all ranks, which call this alike."""
        self.beat()
        if self._is_alone:
            return self.received
        if self._work is not None:
            self._work.wait()
        code = int(self._sent)
        # The same tensor again, on the CPU: gloo carries it, and no thread of gloo's frees it.
        self._sent.fill_(self.received)
        self._work = dist.all_reduce(self._sent, dist.ReduceOp.MAX, async_op=True)
        return code

    def _settle(self) -> None:
        """Before this process forks a loader's worker, let gloo's threads end what they do.

        One that asks for Python's lock meanwhile makes the worker hang: 1 of some 2,000 (Python 3.11).
        """
        if os.getpid() != self._pid:  # a worker has none of these threads
            return
        if self._work is not None:
            with suppress(RuntimeError):  # a rank is gone, as the next collective tells
                self._work.wait()
        time.sleep(0.002)

    def beat(self) -> None:
        """Report progress. If none comes for the time-out, faulthandler ends this rank, with its stacks."""
        if (now := time.monotonic()) > self._armed_at + min(1.0, self._timeout / 10):
            self._armed_at = now
            faulthandler.dump_traceback_later(self._timeout, exit=True, file=self._stacks)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._work is not None:
            self._work.wait()


def check_alike(config: Config) -> None:
    """Raise ConfigError on all ranks if the settings or the source files of their nodes differ."""
    package = Path(__file__).parents[1]
    own = values_of(to_dict(config), type(config))
    own = {key: own[key] for key in own if not key.startswith(("launch.", "device_ids"))}
    for path in package.rglob("*.py"):
        own[str(path.relative_to(package))] = crc32(path.read_bytes())
    parts = gather_objects(own)

    def compare() -> None:
        for number, other in enumerate(parts or []):
            if names := [name for name in own | other if own.get(name) != other.get(name)]:
                lines = [f"{name}: {own.get(name)} -> {other.get(name)}" for name in names[:5]]
                problem = f"{'; '.join(lines)}. Make both alike."
                raise ConfigError(f"rank {number} would not train what rank 0 does: {problem}")

    from_main(compare)


def leave() -> None:
    """Wait until all ranks have come here, since rank 0 may serve their store.

    The process group is not destroyed: os._exit() follows, and to end DDP and the loaders' workers
    in order would take seconds.
    """
    all_reduce(torch.zeros(1))

"""Reads and sets what ranks learn from environment variables: their launcher, and the network interface they use.

A launcher is torchrun and its like (deepspeed, accelerate launch) or SLURM's srun; otherwise run.py starts the ranks.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError

if TYPE_CHECKING:  # run.py asks launcher_of() before anything slow is imported
    from ..config import LaunchConfig

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below Linux's ephemeral ports (32768 on), which any process may be given
SIOCGIFADDR = 0x8915  # Linux: the address of an interface, see netdevice(7)


class Launched(NamedTuple):
    """The place that a launcher gave this process, and where its ranks meet."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    attempt: int = 0  # restarts before this start
    is_store_served: bool = False  # by the launcher, as torchrun's agent does; otherwise rank 0 serves it


def launcher_of(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several ranks; None if this process starts them itself."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return "torchrun"
    if environment.get(SRUN[1], "1") != "1":  # one task alone is a shell on a node (srun --pty)
        return "srun"
    return "horovodrun" if environment.get("HOROVOD_SIZE", "1") != "1" else None


def find_launcher(environment: Mapping[str, str], launch: LaunchConfig) -> Launched | None:
    """The place that a launcher gave this process, or None. ConfigError if the environment is half set."""
    launcher, launched = launcher_of(environment), None
    if launcher == "torchrun":
        launched = _torchrun(environment)
    elif launcher == "srun":
        launched = _srun(environment, launch)
    elif launcher == "horovodrun":
        launched = import_module(".horovodrun", __package__).find(environment, launch)  # comes with Horovod
    return launched


def _torchrun(environment: Mapping[str, str]) -> Launched:
    launcher = "torchrun"
    if "LOCAL_SIZE" in environment and "LOCAL_WORLD_SIZE" not in environment:  # the same under another name
        launcher, environment = "deepspeed", {**environment, "LOCAL_WORLD_SIZE": environment["LOCAL_SIZE"]}
    rank, world_size, local_rank, local_world_size, port = read_numbers(environment, TORCHRUN)
    node_rank = int(environment.get("GROUP_RANK") or environment.get("CROSS_RANK") or rank // local_world_size)
    attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    is_served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = rank, world_size, local_rank, local_world_size, node_rank
    return Launched(launcher, *place, environment.get("MASTER_ADDR", "127.0.0.1"), port, attempt, is_served)


def _srun(environment: Mapping[str, str], launch: LaunchConfig) -> Launched:
    rank, world_size, local_rank, node_rank = read_numbers(environment, SRUN)
    tasks: list[int] = []  # of each node, from "2(x3),1"
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        tasks += [int(count)] * int(times or 1)
    address = launch.master_addr
    if len(tasks) > 1 and is_loopback(address):
        address = _address_of_first(environment.get("SLURM_STEP_NODELIST", ""))
    port = launch.master_port or port_for(f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}")
    attempt = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return Launched("srun", rank, world_size, local_rank, tasks[node_rank], node_rank, address, port, attempt)


def read_numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    """These variables as numbers. ConfigError if one is missing or no number."""
    wrong = [name for name in names if not re.fullmatch("[0-9]+", environment.get(name, ""))]
    if wrong:
        there = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
        raise ConfigError(
            f"the environment is half set: {there}, but no number in {', '.join(wrong)}. "
            "Unset those and type `python run.py`, or start with torchrun, which sets all."
        )
    return [int(environment[name]) for name in names]


def port_for(job: str | None) -> int:
    """A port that is the same on every rank of a job and most likely another one for other jobs."""
    return FIRST_PORT + zlib.crc32(str(job).encode()) % NUM_PORTS


def is_loopback(address: str) -> bool:
    """Whether the address reaches this machine only."""
    return address in ("localhost", "::1") or address.startswith("127.")


def _address_of_first(node_list: str) -> str:
    """The address that SLURM has for the first of its nodes, whose name need not be the name of a host."""
    nodes = subprocess.check_output(["scontrol", "show", "node", node_list], text=True, timeout=30)
    addresses: list[str] = re.findall(r"NodeAddr=(\S+)", nodes)
    return addresses[0]


def choose_interface(wanted: str | None, address: str) -> None:
    """Let gloo, and NCCL if `wanted` is named, use that network interface; otherwise gloo the one towards `address`.

    gloo's own choice is the interface of the host's name, often the loopback. What the environment already says stays.
    """
    names = [name for _, name in socket.if_nameindex()]
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(
                f"launch.network_interface={wanted}: this host ({socket.gethostname()}) has {', '.join(names)}. "
                "Name one of these, or null to take the one that leads to launch.master_addr."
            )
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = wanted
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (found := _interface_towards(address, names)):
        os.environ["GLOO_SOCKET_IFNAME"] = found


def _interface_towards(address: str, names: list[str]) -> str | None:
    if sys.platform != "linux":
        return "lo0" if address == "127.0.0.1" else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # no way there: gloo will say so
        probe.connect((address, 9))  # sends nothing: the system only chooses the way
        own = socket.inet_aton(probe.getsockname()[0])
        for name in names:
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == own:
                    return name
    return None

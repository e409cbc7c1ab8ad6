"""Finds out from environment variables which launcher started this rank, and picks the rank's network interface.

The launcher can be torchrun, deepspeed, accelerate, horovodrun or SLURM's srun. Without one, run.py starts the ranks.
"""

import os
import re
import socket
import subprocess
import sys
import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError

if TYPE_CHECKING:  # run.py asks launcher_of() before anything slow is imported
    from ..config import LaunchConfig

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")


class Launched(NamedTuple):
    """Holds the rank numbers that a launcher gave this process, and the address where the ranks meet."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    attempt: int = 0  # restarts before this start
    # by the launcher, as torchrun's agent does; otherwise rank 0 serves it
    is_store_served: bool = False


def launcher_of(environment: Mapping[str, str]) -> str | None:
    """Return "torchrun" (also for deepspeed and accelerate), "srun", "horovodrun", or None if no launcher was used."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return "torchrun"
    # one task alone, or the first of several with a terminal, is a shell on a node (srun --pty)
    if environment.get(SRUN[1], "1") != "1" and "SLURM_PTY_PORT" not in environment:
        return "srun"
    return "horovodrun" if environment.get("HOROVOD_SIZE", "1") != "1" else None


def find_launcher(environment: Mapping[str, str], launch: "LaunchConfig") -> Launched | None:
    """Return the launcher's rank numbers, or None if there is no launcher. Raise ConfigError if a number is missing."""
    launcher = launcher_of(environment)
    if launcher == "torchrun":
        if "LOCAL_SIZE" in environment:  # the launcher `deepspeed`
            environment = {"LOCAL_WORLD_SIZE": environment["LOCAL_SIZE"], **environment}
        rank, world_size, local_rank, num_tasks, port = read_numbers(environment, TORCHRUN)
        node_rank = int(
            environment.get("GROUP_RANK") or environment.get("CROSS_RANK") or rank // num_tasks
        )
        address, attempt = (
            environment.get("MASTER_ADDR", "127.0.0.1"),
            environment.get("TORCHELASTIC_RESTART_COUNT", 0),
        )
        fields = rank, world_size, local_rank, num_tasks, node_rank, address, port
        return Launched(
            launcher,
            *fields,
            int(attempt),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    if launcher == "srun":
        rank, world_size, local_rank, node_rank = read_numbers(environment, SRUN)
        # "2(x3),1"
        counts = re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        # of each node
        tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
        address = launch.master_addr
        # the first node's name need not be the name of a host
        if len(tasks) > 1 and is_loopback(address):
            command = ["scontrol", "show", "node", environment.get("SLURM_STEP_NODELIST", "")]
            address = re.findall(
                r"NodeAddr=(\S+)", subprocess.check_output(command, text=True, timeout=30)
            )[0]
        port = launch.master_port or port_for(
            f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
        )
        fields = rank, world_size, local_rank, tasks[node_rank], node_rank, address, port
        return Launched(launcher, *fields, int(environment.get("SLURM_RESTART_COUNT", 0)))
    return import_module(".horovodrun", __package__).find(environment, launch) if launcher else None


def read_numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    """Read these environment variables as numbers. Raise ConfigError if one of them is missing or is not a number."""
    if wrong := [name for name in names if not environment.get(name, "").isdecimal()]:
        remedy = f"Unset {', '.join(names)} and type `python run.py`, or start with torchrun, which sets all."
        raise ConfigError(f"the environment is half set: no number in {', '.join(wrong)}. {remedy}")
    return [int(environment[name]) for name in names]


def port_for(job: str) -> int:
    """Return a port that is the same on every rank of a job and probably differs from the ports of other jobs."""
    # below the ports that Linux hands out itself, from 32768 on
    return 20_000 + zlib.crc32(job.encode()) % 12_000


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def choose_interface(wanted: str | None, address: str, *, is_one_machine: bool = False) -> None:
    """Make gloo and NCCL use the network interface `wanted`. If it is None, choose an interface for gloo.

    Prefer the one in GLOO_SOCKET_IFNAME, then loopback on a single machine, then one that reaches `address`.
    """
    if wanted is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = wanted
    if is_one_machine or is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    try:
        target = int.from_bytes(socket.inet_aton(socket.gethostbyname(address)), sys.byteorder)
    except OSError:  # IPv6 alone: gloo chooses
        return
    routes = [
        line.split()
        for line in Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]
    ]
    masks = [
        (int(row[7], 16), row[0]) for row in routes if target & int(row[7], 16) == int(row[1], 16)
    ]
    # On node 0 Debian's /etc/hosts gives its own name a loopback address, to which no route but the default one leads.
    os.environ["GLOO_SOCKET_IFNAME"] = (
        max(masks, key=lambda way: way[0].bit_count())[1] if masks else routes[0][0]
    )

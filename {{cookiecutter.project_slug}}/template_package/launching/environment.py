"""Who starts the ranks, as the environment tells it: we do, torchrun and its like (deepspeed, accelerate launch),
SLURM's srun, Open MPI's mpirun, or horovodrun.

No other file reads a launcher's variables. What is half set is refused before anything starts.
"""

from __future__ import annotations

import re
import subprocess
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..validation import ConfigError, is_loopback

if TYPE_CHECKING:  # run.py asks launcher_of() before anything slow is imported
    from ..config import LaunchConfig

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
MPIRUN = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HOROVODRUN = tuple(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"))
HOROVODRUN_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Below Linux's ephemeral ports (32768 on), which any process may be given."""

RUNS_FOLDER = "DDP_RUNS_FOLDER"
"""Ours: names another folder than runs/."""


class Launched(NamedTuple):
    """This process's place, given by the launcher that started it, and where the ranks meet."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    attempt: int = 0
    """Restarts before this one."""
    is_store_served: bool = False
    """The launcher holds the store itself (torchrun's agent); otherwise rank 0 does."""


def launcher_of(environment: Mapping[str, str]) -> str | None:
    """Who has started this process as one of several ranks; None if it is to start the ranks itself."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return "torchrun"
    sizes = {
        "mpirun": "OMPI_COMM_WORLD_SIZE",  # before srun, with which it starts its daemons: its ranks have both
        "srun": "SLURM_STEP_NUM_TASKS",  # one task alone is a shell on a node (srun --pty): ranks start as anywhere
        "horovodrun": "HOROVOD_SIZE",
        "another mpirun": "PMI_SIZE",
    }
    return next((launcher for launcher, size in sizes.items() if environment.get(size, "1") != "1"), None)


def find_launcher(environment: Mapping[str, str], launch: LaunchConfig) -> Launched | None:
    """The place that a launcher has given this process, or None. ConfigError if the environment is half set."""
    match launcher_of(environment):
        case None:
            return None
        case "torchrun":
            return _torchrun(environment)
        case "mpirun":
            return _mpirun(environment, launch)
        case "srun":
            return _srun(environment, launch)
        case "horovodrun":
            return _horovodrun(environment, launch)
    raise ConfigError(
        f"PMI_SIZE={environment['PMI_SIZE']}: this mpirun's variables are not known here, Open MPI's are. "
        "Use Open MPI, srun or torchrun, or type `python run.py`, which starts the ranks itself."
    )


def _torchrun(environment: Mapping[str, str]) -> Launched:
    launcher = "torchrun"
    if "LOCAL_SIZE" in environment and "LOCAL_WORLD_SIZE" not in environment:  # the same under another name
        launcher, environment = "deepspeed", {**environment, "LOCAL_WORLD_SIZE": environment["LOCAL_SIZE"]}
    rank, world_size, local_rank, local_world_size, port = _numbers(environment, TORCHRUN, text=("MASTER_ADDR",))
    if rank >= world_size or local_rank >= local_world_size:
        raise ConfigError(
            f"RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} of {local_world_size}: numbers "
            "count from 0. Unset them and type `python run.py`, or start with torchrun."
        )
    return Launched(
        launcher,
        rank,
        world_size,
        local_rank,
        local_world_size,
        node_rank=int(environment.get("GROUP_RANK") or environment.get("CROSS_RANK") or rank // local_world_size),
        master_addr=environment["MASTER_ADDR"],
        master_port=port,
        attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        is_store_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _srun(environment: Mapping[str, str], launch: LaunchConfig) -> Launched:
    rank, world_size, local_rank, node_rank = _numbers(environment, SRUN, text=("SLURM_STEP_TASKS_PER_NODE",))
    tasks = _repeated(environment["SLURM_STEP_TASKS_PER_NODE"])
    job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    address = launch.master_addr
    if len(tasks) > 1 and is_loopback(address):
        address = _address_of_first(environment.get("SLURM_STEP_NODELIST", ""))
    port = launch.master_port or _port_for(job)
    attempt = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return Launched("srun", rank, world_size, local_rank, tasks[node_rank], node_rank, address, port, attempt)


def _mpirun(environment: Mapping[str, str], launch: LaunchConfig) -> Launched:
    rank, world_size, local_rank, local_world_size = _numbers(environment, MPIRUN)
    if world_size > local_world_size and (is_loopback(launch.master_addr) or launch.master_port == 0):
        raise ConfigError(
            f"launch.master_addr={launch.master_addr} launch.master_port={launch.master_port}: mpirun on several nodes "
            "does not say where they meet. Add launch.master_addr=HOST launch.master_port=29500, HOST being rank 0's."
        )
    port = launch.master_port or _port_for(environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_orte_hnp_uri")))
    place = rank, world_size, local_rank, local_world_size
    return Launched("mpirun", *place, rank // local_world_size, launch.master_addr, port)


def _horovodrun(environment: Mapping[str, str], launch: LaunchConfig) -> Launched:
    names = *HOROVODRUN, *HOROVODRUN_SERVER
    rank, world_size, local_rank, local_world_size, node_rank, server = _numbers(
        environment, names, text=HOROVODRUN_SERVER[:1]
    )
    place = rank, world_size, local_rank, local_world_size, node_rank
    address = launch.master_addr
    if is_loopback(address):  # that of the host where horovodrun was typed, which is mostly rank 0's
        address = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    return Launched("horovodrun", *place, address, launch.master_port or _port_for(f"horovodrun {server}"))


def _numbers(environment: Mapping[str, str], names: tuple[str, ...], text: tuple[str, ...] = ()) -> list[int]:
    """The variables that are not in `text`, as numbers, once all are there."""
    if missing := [name for name in names if name not in environment]:
        there = " and ".join(name for name in names if name in environment)
        raise ConfigError(
            f"the environment is half set: {there} without {', '.join(missing)}. "
            "Unset those and type `python run.py`, or start with torchrun, which sets all."
        )
    for name in (name for name in names if name not in text):
        if not re.fullmatch("[0-9]+", environment[name]):
            raise ConfigError(f"{name}={environment[name]}: must be a number. Unset it, or start with torchrun.")
    return [int(environment[name]) for name in names if name not in text]


def _repeated(text: str) -> list[int]:
    """SLURM's "2(x3),1" as [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _port_for(job: str | None) -> int:
    """The same port on every rank of a job, another for other jobs."""
    return FIRST_PORT + zlib.crc32(str(job).encode()) % NUM_PORTS


def _address_of_first(node_list: str) -> str:
    """The address that SLURM has for the first of its nodes, whose name need not be a host's."""
    try:
        names = _scontrol("hostnames", node_list).split()
        match = re.search(r"NodeAddr=(\S+)", _scontrol("node", names[0]))
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={node_list}: scontrol does not say where the first node is ({error}). "
            "Add launch.master_addr=HOST, HOST being the first node's."
        ) from None
    return match[1] if match else names[0]


def _scontrol(what: str, name: str) -> str:
    command = ["scontrol", "show", what, name]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

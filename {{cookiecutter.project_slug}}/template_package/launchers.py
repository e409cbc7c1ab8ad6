"""Takes over ranks that SLURM's srun, horovodrun or deepspeed has started, and starts torchrun for several nodes.

Each of them sets variables of its own. adopt() turns them into torchrun's, which are all that core/group.py knows.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .core.launch import DEVICES, PARENT, find_gpus, number_of
from .core.settings import CommandLine
from .errors import ConfigError

if TYPE_CHECKING:
    from .core.ranks import Rank

SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
LOOPBACK = "127.0.0.1"


def adopt(line: CommandLine) -> bool:
    """Return whether a launcher has started this process. Set torchrun's variables, and the network interface.

    Raise ConfigError if a launcher's number is missing.
    """
    environment = os.environ
    if interface := line.get("launch.network_interface", ""):
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = interface
    if "RANK" in environment or "WORLD_SIZE" in environment:
        renamed = {"LOCAL_SIZE": "LOCAL_WORLD_SIZE", "CROSS_RANK": "GROUP_RANK"}  # of deepspeed
        for theirs, ours in renamed.items():
            if theirs in environment:
                environment.setdefault(ours, environment[theirs])
    # one task alone, or the first of several with a terminal, is a shell on a node (srun --pty)
    elif environment.get(SRUN[1], "1") != "1" and "SLURM_PTY_PORT" not in environment:
        _adopt_srun(line)
    elif environment.get("HOROVOD_SIZE", "1") != "1":
        import_module(".horovodrun", __package__).adopt(line)
    else:
        return False
    environment.setdefault("MASTER_ADDR", LOOPBACK)
    if environment.get("WORLD_SIZE") != environment.get("LOCAL_WORLD_SIZE"):
        choose_interface(environment["MASTER_ADDR"])
    if PARENT not in environment and line.get("strategy", "") == "data_parallel":
        problem = "one process drives all devices. Type `python run.py`, no launcher"
        raise ConfigError(f"strategy=data_parallel: {problem}.")
    return True


def _adopt_srun(line: CommandLine) -> None:
    environment = os.environ
    rank, world_size, local_rank, node_rank = read_numbers(SRUN)
    # "2(x3),1"
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    # of each node
    tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
    address = line.get("launch.master_addr", LOOPBACK)
    if len(tasks) > 1 and is_loopback(address):  # the first node's name need not be that of a host
        command = ["scontrol", "show", "node", environment.get("SLURM_STEP_NODELIST", "")]
        told = subprocess.check_output(command, text=True, timeout=30)
        address = re.findall(r"NodeAddr=(\S+)", told)[0]
    job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    place = rank, world_size, local_rank, tasks[node_rank], node_rank
    set_place(place, address, line, job, environment.get("SLURM_RESTART_COUNT", "0"))
    if line.get("device_ids", "auto") == "auto" and len(find_gpus(environment)) == 1:
        # each rank its own: --gpus-per-task=1, --gpu-bind
        environment[DEVICES] = json.dumps(["cuda:0"] * tasks[node_rank])


def set_place(
    place: Sequence[int], address: str, line: CommandLine, job: str, attempt: str = "0"
) -> None:
    """Set torchrun's variables: rank, world size, local rank, local world size and node rank, and where ranks meet.

    Without launch.master_port, the port is the same on every rank of a job, and probably another one than other jobs'.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    os.environ |= dict(zip(names, map(str, place), strict=True))
    # below the ports that Linux hands out itself, from 32768 on
    port = (
        int(number_of(line, "launch.master_port", 0)) or 20_000 + zlib.crc32(job.encode()) % 12_000
    )
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt


def read_numbers(names: Sequence[str]) -> list[int]:
    """Read these environment variables as numbers. Raise ConfigError if one of them is missing or is not a number."""
    if wrong := [name for name in names if not os.environ.get(name, "").isdecimal()]:
        remedy = f"Unset {', '.join(names)} and type `python run.py`, or start with torchrun, which sets all."
        raise ConfigError(f"the environment is half set: no number in {', '.join(wrong)}. {remedy}")
    return [int(os.environ[name]) for name in names]


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def choose_interface(address: str) -> None:
    """Make gloo use the network interface that reaches `address`, unless GLOO_SOCKET_IFNAME names one."""
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    if is_loopback(address):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return
    try:
        target = int.from_bytes(socket.inet_aton(socket.gethostbyname(address)), sys.byteorder)
    except OSError:  # IPv6 alone: gloo chooses
        return
    lines = Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]
    routes = [line.split() for line in lines]
    masks = [
        (int(row[7], 16), row[0]) for row in routes if target & int(row[7], 16) == int(row[1], 16)
    ]
    # On node 0 Debian's /etc/hosts gives its own name a loopback address, to which no route but the default one leads.
    best = max(masks, key=lambda way: way[0].bit_count())[1] if masks else routes[0][0]
    os.environ["GLOO_SOCKET_IFNAME"] = best


def watch_others(place: "Rank") -> None:
    """End this process soon after another rank has failed, if no agent does it: srun and horovodrun have none."""
    is_watched = PARENT in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if place.world_size == 1 or is_watched:
        return
    store = place.store.clone()  # another connection: a thread that waits blocks one

    def watch() -> None:
        with suppress(RuntimeError):  # rank 0, which serves the store, has ended
            while not store.check(["failure"]):
                time.sleep(1.0)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def become_torchrun(line: CommandLine) -> NoReturn:
    """Replace this process with scripts/multi_node.sh, which starts torchrun on this node."""
    num_nodes = line.get("launch.nodes", "1")
    address, port = line.get("launch.master_addr", LOOPBACK), line.get("launch.master_port", "0")
    node_rank = line.get("launch.node_rank", "0")
    if is_loopback(address) or port == "0":
        remedy = "Add launch.master_addr=ADDRESS launch.master_port=29500, ADDRESS of node 0, not the loopback."
        problem = "needs an address and a port that all nodes reach"
        raise ConfigError(f"launch.nodes={num_nodes}: {problem}. {remedy}")
    meeting = {"NNODES": num_nodes, "NODE_RANK": node_rank, "PYTHON": sys.executable}
    meeting |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    script = str(Path(__file__).parents[1] / "scripts" / "multi_node.sh")
    os.execvpe("bash", ["bash", script, *sys.argv[1:]], os.environ | meeting)

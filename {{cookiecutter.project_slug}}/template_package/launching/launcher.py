"""Runs one function once per rank: in this process, in processes started here, or joined to torchrun and its like.

However it was started, a rank sees the same: a place (RankContext), a process group, its own device (ranks.py). Who
starts the processes is asked in environment.py, which devices they have in devices.py.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from ..config import Config
from ..validation import ConfigError, one_line
from .devices import Devices, take_devices
from .distributed import RankContext
from .environment import Launched, find_launcher
from .meeting import arrival_timeout, fingerprint, missing, open_store, serve_local_store
from .network import choose_interface
from .nodes import Nodes, ask
from .processes import OUT_OF_MEMORY, STOPPED, run_processes
from .ranks import RunFunction, go_on, print_failure, run_launched_rank, run_rank_here, run_started_rank
from .starting import PARENT_AT_START, die_with_parent, process_started_at, raise_if_interrupted


@dataclass(frozen=True)
class Node:
    """This node's part of a run: its devices, one a local rank, and how its ranks come to be."""

    devices: Devices
    num_ranks: list[int]
    """Of each node: one a device. A launcher tells their sum alone: one number."""
    launched: Launched | None = None
    """This process's place, if a launcher has started it."""
    store: dist.Store | None = None
    """Where the launcher's ranks meet."""
    nodes: Nodes | None = None
    """The other nodes, if they were started by hand."""
    started_at: float = field(default_factory=process_started_at)

    @property
    def num_local_ranks(self) -> int:
        """One a device; one in all where a single process drives them."""
        return len(self.devices.names) if self.launched or self.nodes else self.num_ranks[0]


def find_node(config: Config, environment: Mapping[str, str] = os.environ) -> Node:
    """The devices and ranks of this node, agreed with the other nodes. ConfigError for what is not there."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # ids as nvidia-smi shows them; CUDA has not started yet
    launched = find_launcher(environment, config.launch)
    if launched is not None:
        return _join(config, launched, environment)
    devices = take_devices(config.device_ids, config.launch, environment)
    if config.launch.nodes == 1:
        return Node(devices, [1 if config.strategy == "data_parallel" else len(devices.names)])
    choose_interface(config.launch.network_interface, config.launch.master_addr)
    nodes = Nodes(config.launch, len(devices.names), fingerprint(config))
    return Node(devices, nodes.num_devices, nodes=nodes)


def launch(run_fn: RunFunction, config: Config, node: Node, world_size: int) -> int:
    """The exit code of run_fn(rank, world_size, config), run once per rank: 0, 1, 2, 130 or 143."""
    raise_if_interrupted()
    places = [_place(node, local_rank, world_size) for local_rank in range(node.num_local_ranks)]
    if node.launched is not None:
        return run_launched_rank(run_fn, config, places[node.launched.local_rank], node.launched)
    while (code := _attempt(run_fn, config, node, places)) == OUT_OF_MEMORY:
        config = go_on(config)
        gc.collect()  # the only rank has run here: its model may be part of a cycle, and still on the GPU
        print("out of memory: starting again from the last checkpoint, with smaller micro-batches", file=sys.stderr)
    if node.nodes is not None:
        node.nodes.leave(is_failure=code not in (0, *STOPPED))
        atexit._run_exitfuncs()  # the fork server's folder is removed there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread of its store's may be inside a call now, where Python's own exit would abort
    return code


def _attempt(run_fn: RunFunction, config: Config, node: Node, places: list[RankContext]) -> int:
    """The exit code of one start of this node's ranks."""
    if places[0].world_size == 1:
        return run_rank_here(run_fn, config, places[0])
    if node.nodes is None:
        own = serve_local_store()
        address = "127.0.0.1", own.port, "run"
        store: dist.Store = dist.PrefixStore("run", own)
        choose_interface(config.launch.network_interface, "127.0.0.1")
    else:
        store, prefix = node.nodes.begin_attempt()
        address = config.launch.master_addr, config.launch.master_port, prefix

    def ask_to_stop(number: int) -> bool:
        if not ask(lambda: store.check(["stop/ready"]), seconds=5):
            return False
        store.set("stop/signal", str(int(number)))
        return True

    code, failure = run_processes(
        run_started_rank,
        [(run_fn, config, place, address) for place in places],
        start_method=config.launch.start_method,
        environment={name: os.environ[name] for name in PASSED_ON if name in os.environ},
        ask_to_stop=ask_to_stop,
        peers=node.nodes,
    )
    if node.nodes is not None and (ended := node.nodes.ended_elsewhere()) is not None:
        other, code = ended
        print(f"node {other} ended first, with exit code {code}: it says why", file=sys.stderr)
    elif failure is not None and code != OUT_OF_MEMORY:
        print_failure(failure, places[failure.local_rank])
    return code


PASSED_ON = ("CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What this process sets: a fork server's children have the environment of the server's start."""


def _place(node: Node, local_rank: int, world_size: int) -> RankContext:
    launched, nodes = node.launched, node.nodes
    if launched is not None:
        rank, node_rank = launched.rank, launched.node_rank
    else:
        rank, node_rank = (nodes.first_rank + local_rank, nodes.node_rank) if nodes else (local_rank, 0)
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=node.num_local_ranks,
        node_rank=node_rank,
        device=torch.device(node.devices.names[local_rank]),
        devices=tuple(map(torch.device, node.devices.names[local_rank :: node.num_local_ranks])),
        device_notes=tuple(node.devices.notes),
        started_at=node.started_at,
        store=node.store,
    )


def _join(config: Config, launched: Launched, environment: Mapping[str, str]) -> Node:
    """The node as its launcher has cut it. Local rank 0 takes the devices for its neighbours."""
    if config.launch.nodes != 1:
        raise ConfigError(
            f"launch.nodes={config.launch.nodes}: {launched.launcher} has started this process, and says itself how "
            "many nodes there are. Leave launch.nodes at 1."
        )
    if config.strategy == "data_parallel":
        raise ConfigError(
            f"strategy={config.strategy}: one process drives all devices, and {launched.launcher} has started one for "
            "each. Type `python run.py`, or set strategy=ddp."
        )
    die_with_parent(PARENT_AT_START)  # torchrun's agent, when killed, leaves its ranks behind
    choose_interface(config.launch.network_interface, launched.master_addr)
    timeout = arrival_timeout(config.launch)
    store, launched = open_store(launched, timeout)
    # mpirun says nothing of its nodes, and may deal its ranks out to them in any order.
    key = f"devices/{socket.gethostname() if launched.launcher == 'mpirun' else launched.node_rank}"
    if launched.local_rank == 0:
        try:
            is_plain = config.device_ids == "auto"
            wanted = f"auto:{launched.local_world_size}" if is_plain else config.device_ids
            # After a restart the killed ranks' memory and locks may take a moment to be free.
            patience = max(config.launch.wait_minutes, 0.5) if launched.attempt else config.launch.wait_minutes
            options = replace(config.launch, wait_minutes=patience)
            devices = take_devices(wanted, options, environment, is_cpu_enough=is_plain)
        except ConfigError as error:
            store.set(key, f"error: {error}")
            raise
        store.set(key, " ".join(devices.names))
    else:
        try:
            store.wait([key], timeout)
        except dist.DistError as error:
            raise missing("local rank 0, which chooses devices,", launched.local_world_size, timeout, error) from None
        answer = store.get(key).decode()
        if answer.startswith("error: "):
            raise ConfigError(answer.removeprefix("error: "))
        devices = Devices(answer.split(), [])
    return Node(_matched(config, devices, launched), [launched.world_size], launched, store)


def _matched(config: Config, devices: Devices, launched: Launched) -> Devices:
    """One device for each rank that the launcher has started on this node, or a ConfigError with both numbers."""
    names, num_ranks = devices.names, launched.local_world_size
    if names == ["cpu"] and config.device_ids == "auto":
        return devices._replace(names=["cpu"] * num_ranks)
    if len(names) == num_ranks:
        return devices
    options = {"torchrun": "--nproc-per-node=", "deepspeed": "--num_gpus=", "srun": "--ntasks-per-node="}
    how = f"{options.get(launched.launcher, '-np ')}{len(names)}"
    raise ConfigError(
        f"device_ids={one_line(config.device_ids)}: names {len(names)} devices, but {launched.launcher} started "
        f"{num_ranks} ranks on this node. Use {how}, or name {num_ranks} devices."
    )

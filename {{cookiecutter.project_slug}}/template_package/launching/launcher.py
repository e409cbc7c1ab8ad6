"""Runs a function once per rank: in this process, in new processes, or in processes that torchrun or srun started.

In all three cases, each rank gets a RankContext, its own device and, if there are several ranks, a process group.
"""

import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import synchronize

from ..config import Config
from ..core.config import to_dict, values_of
from ..core.processes import end_process
from ..core.ranks import num_usable_cores
from ..errors import ConfigError, StopRun, one_line
from ..files import run_directory
from . import distributed, processes
from .devices import Devices, find_gpus, take_devices
from .distributed import RankContext, join_group
from .environment import Launched, choose_interface, find_launcher, is_loopback

RunFunction = Callable[[int, int, Config], None]


class Node(NamedTuple):
    """Describes this node's part of a run: the devices of its ranks, and the launcher (such as torchrun), if any."""

    devices: Devices
    # over all nodes: one per device; 1 if a single rank drives them all (data_parallel)
    num_ranks: int
    launched: Launched | None = None  # where a launcher has put this process, if one has started it
    store: dist.Store | None = None  # where the launcher's ranks meet


def find_node(config: Config, environment: Mapping[str, str] = os.environ) -> Node:
    """Choose this node's devices, waiting for free ones if necessary. Raise ConfigError if it cannot get them."""
    if (launched := find_launcher(environment, config.launch)) is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # a handler in Python would wait for the store's answer
            signal.signal(number, signal.SIG_DFL)
        return _join(config, launched, environment)
    if config.launch.nodes > 1:
        _become_torchrun(config)
    devices = take_devices(config.device_ids, config.launch, environment)
    num_ranks = 1 if config.strategy == "data_parallel" else len(devices.names)
    if num_ranks == 1 and len(set(devices.names)) < len(devices.names):
        raise ConfigError(
            "strategy=data_parallel: drives one CPU, or GPUs named once. Set device_ids=cpu."
        )
    return Node(devices, num_ranks)


def launch(run_fn: RunFunction, config: Config, node: Node, world_size: int) -> int:
    """Run run_fn(rank, world_size, config) once per rank, and return the exit code for run.py (0 for success)."""
    devices, launched = tuple(map(torch.device, node.devices.names)), node.launched
    num_ranks = launched.local_world_size if launched else world_size  # on this node
    contexts = [
        RankContext(
            rank,
            world_size,
            rank,
            num_ranks,
            devices=devices[rank::num_ranks],
            device_notes=tuple(node.devices.notes),
            started_at=processes.STARTED_AT,
        )
        for rank in range(num_ranks)
    ]
    if launched is not None:
        context = replace(
            contexts[launched.local_rank], rank=launched.rank, node_rank=launched.node_rank
        )
        context = replace(context, attempt=launched.attempt, store=node.store)
        # A copy of stderr: the other ranks' stderr is their log while they train.
        console = os.fdopen(
            os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1
        )
        end_process(_run_rank(run_fn, config, context, console), at_once=True)
    while (code := _start_ranks(run_fn, config, contexts)) == processes.OUT_OF_MEMORY:
        contexts = [replace(context, attempt=context.attempt + 1) for context in contexts]
        gc.collect()  # a single rank has run here: its model may be part of a cycle, and still on the GPU
        print(
            "out of memory: starting again from the last checkpoint, with smaller micro-batches",
            file=sys.stderr,
        )
    return code


def serve_local_store() -> dist.TCPStore:
    # A socket of ours: torch would listen on every interface, and ask the name service for the name of each client.
    listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _start_ranks(run_fn: RunFunction, config: Config, contexts: list[RankContext]) -> int:
    if len(contexts) == 1:
        with processes.stop_signals_call(processes.raise_stop):
            return _run_rank(
                run_fn, config, replace(contexts[0], store=dist.HashStore()), sys.stderr
            )
    store = serve_local_store()
    arguments = [(run_fn, config, context, None, store.port) for context in contexts]
    code, failure = processes.run_processes(_run_rank, arguments, store, config.launch.start_method)
    if failure is not None and code != processes.OUT_OF_MEMORY:
        text, log = failure.text, run_directory(config.name) / "logs" / f"rank_{failure.rank}.log"
        if failure.is_silent:  # NCCL and CUDA write their reasons into the log before they abort
            # The part after the last " host=", which each start writes, without the stacks of faulthandler and C++.
            written = (
                log.read_text("utf-8", "replace").rpartition(" host=")[2] if log.exists() else ""
            )
            lines = written.partition("Fatal Python error")[0].splitlines()[1:]
            frames = ("frame #", "Exception raised from")
            tail = "\n".join(
                [line for line in lines if line.strip() and not line.startswith(frames)][-15:]
            )
            text = f"{contexts[failure.rank]} failed:\n{text}; see {log}" + (
                tail and f", which ends with:\n{tail}"
            )
        print(text, file=sys.stderr, flush=True)
    return code


def _run_rank(
    run_fn: RunFunction, config: Config, context: RankContext, console: TextIO | None, port: int = 0
) -> int:
    """Run one rank and return its exit code. If `console` is None, the launching process reports any error."""
    # Twice the time-out: training/stopping.py finds a hang before, and tells it from a run that was halted.
    timeout = timedelta(minutes=2 * config.launch.timeout_minutes + config.launch.wait_minutes)
    if console is None:
        choose_interface(config.launch.network_interface, "127.0.0.1", is_one_machine=True)
        context = replace(
            context, store=dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        )
    # Idle OpenMP threads spin: two ranks with a thread for each core run 15 times slower than with their share.
    # one rank has all cores by itself, and MKL is slower once it is told a number
    own_threads = os.environ.get("OMP_NUM_THREADS")
    is_own = own_threads is not None and (own_threads != "1" or console is None)  # torchrun's 1
    if context.local_world_size > 1 and not is_own:
        torch.set_num_threads(max(1, num_usable_cores() // context.local_world_size))
    # A second connection, opened now: another thread may block the first, and to look for a lost store takes minutes.
    store = context.store.clone()

    def fail(text: str, code: int) -> int:
        """Report why this rank failed, unless another rank failed first and so broke this rank's connection."""
        text = f"error: {text}" if code == 2 else f"{context} failed:\n{text}"
        own = first = json.dumps(processes.Failure(context.rank, code, text)).encode()
        with suppress(dist.DistError):  # rank 0, or its launcher, is gone
            first = store.compare_set(processes.FAILURE, "", own.decode())
        if console is not None and first == own:
            print(text, file=console, flush=True)
        return code

    # A child that the user forks, of a Pool for example, ends by SIGTERM, as Pool.terminate() expects.
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    code = 0
    try:
        distributed.current = replace(context, report_failure=fail)
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)  # NCCL's collectives use the current one
        if config.launch.debug:
            # Not DETAIL, under which DistributedDataParallel on gloo dies of SIGSEGV (torch 2.13).
            os.environ.update(TORCH_DISTRIBUTED_DEBUG="INFO", NCCL_DEBUG="INFO")
            dist.set_debug_level_from_env()  # torch has read the environment when it was imported
        if context.world_size > 1:
            if console is not None:  # started by a launcher, perhaps on several nodes
                _check_alike(config, context)
            join_group(context, config.launch.backend, timeout)
        run_fn(context.rank, context.world_size, config)
    except ConfigError as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return processes.STOPPED[0]
    except StopRun as stop:
        code = stop.code
        # under a launcher
        if code == processes.OUT_OF_MEMORY and console is not None and context.world_size > 1:
            return fail(
                "out of memory: the same command continues, with smaller micro-batches", code
            )
    except BaseException:  # SystemExit too: a rank that leaves by itself leaves the others waiting
        return fail(traceback.format_exc(), 1)
    # after it, other ranks may be in a collective: leaving would wait for them
    if code != processes.OUT_OF_MEMORY:
        gc.collect()  # gloo hangs if DDP outlives the group
        if dist.is_initialized():
            dist.destroy_process_group()
    return code


def _check_alike(config: Config, context: RankContext) -> None:
    """Raise ConfigError on all ranks if the ranks differ in device type, torch version, config or source files."""
    package = Path(__file__).parents[1]
    own: dict[str, Any] = {"device": context.device.type, "torch": torch.__version__}
    for key, value in values_of(to_dict(config), Config).items():
        if not key.startswith(("device_ids", "launch.")):
            own[f"config.{key}"] = value
    for path in package.rglob("*.py"):
        own[f"sources.{path.relative_to(package)}"] = crc32(path.read_bytes())
    # No collective: CPU and GPU ranks share no backend. Rank 0, whose process may hold the store, returns last.
    timeout = context.store.timeout.total_seconds()
    texts = synchronize(
        context.store, json.dumps(own).encode(), context.rank, context.world_size, "alike/", timeout
    )
    first, *others = map(json.loads, texts)
    for rank, other in enumerate(others, start=1):
        names = [name for name in first | other if first.get(name) != other.get(name)]
        if names:
            lines = [f"{name}: {first.get(name)} -> {other.get(name)}" for name in names[:5]]
            problem = f"rank {rank} would not train what rank 0 does: {'; '.join(lines)}"
            raise ConfigError(f"{problem}. Make both alike.")


def _become_torchrun(config: Config) -> None:
    """Replace this process with scripts/multi_node.sh, which starts torchrun on this node."""
    launch, script = config.launch, Path(__file__).parents[2] / "scripts" / "multi_node.sh"
    if is_loopback(launch.master_addr) or not launch.master_port:
        remedy = "Add launch.master_addr=ADDRESS launch.master_port=29500, ADDRESS of node 0, not the loopback."
        raise ConfigError(
            f"launch.nodes={launch.nodes}: needs an address and a port that all nodes reach. {remedy}"
        )
    meeting: dict[str, object] = {
        "NNODES": launch.nodes,
        "NODE_RANK": launch.node_rank,
        "PYTHON": sys.executable,
    }
    meeting |= {"MASTER_ADDR": launch.master_addr, "MASTER_PORT": launch.master_port}
    os.execvpe(
        "bash",
        ["bash", str(script), *sys.argv[1:]],
        os.environ | {k: str(v) for k, v in meeting.items()},
    )


def _join(config: Config, launched: Launched, environment: Mapping[str, str]) -> Node:
    """Connect to the store that all ranks share, and return this node. Its local rank 0 chooses the devices."""
    if config.strategy == "data_parallel":
        raise ConfigError(
            "strategy=data_parallel: one process drives all devices. Type `python run.py`, no launcher."
        )
    processes.die_with_parent()  # torchrun's agent, when killed, leaves its ranks behind
    address, options, num_ranks = launched.master_addr, config.launch, launched.local_world_size
    choose_interface(
        options.network_interface, address, is_one_machine=launched.world_size == num_ranks
    )
    timeout = timedelta(minutes=options.timeout_minutes + options.wait_minutes)
    is_server = launched.rank == 0 and not launched.is_store_served
    server = dist.TCPStore(
        address, launched.master_port, is_master=is_server, wait_for_workers=False, timeout=timeout
    )
    # After a restart torchrun hands on its store: without a prefix the new ranks read the dead ones' addresses.
    # A store of rank 0's is new each time, and a node that has come later counts fewer restarts.
    attempt = launched.attempt if launched.is_store_served else 0
    store, key = dist.PrefixStore(f"attempt_{attempt}", server), f"devices/{launched.node_rank}"
    if (
        launched.launcher == "srun"
        and config.device_ids == "auto"
        and len(find_gpus(environment).visible) == 1
    ):
        # each rank its own: --gpus-per-task=1, --gpu-bind
        devices = take_devices("auto:1", options, environment)
        return Node(
            devices._replace(names=devices.names * num_ranks), launched.world_size, launched, store
        )
    if launched.local_rank > 0:
        return Node(Devices(json.loads(store.get(key)), []), launched.world_size, launched, store)
    devices = take_devices(config.device_ids, options, environment, num_ranks)
    if (number := len(devices.names)) != num_ranks:
        problem = f"names {number} devices, but {launched.launcher} started {num_ranks} ranks on this node"
        raise ConfigError(
            f"device_ids={one_line(config.device_ids)}: {problem}. Make both numbers equal."
        )
    store.set(key, json.dumps(devices.names))
    return Node(devices, launched.world_size, launched, store)

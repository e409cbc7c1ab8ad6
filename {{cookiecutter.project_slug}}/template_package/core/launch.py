"""Chooses this node's devices, and starts one process per device with torchrun's variables.

A rank reads RANK, WORLD_SIZE and LOCAL_RANK, whoever started it: start_ranks() below, or torchrun.
This file does not import torch, so that the ranks import it at once, each in its own process.

A lock on a GPU is an abstract Unix socket: one process alone can bind its name, and the name is
free again when that process ends, however it ends.
"""

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, NamedTuple

from ..errors import ConfigError, one_line
from ..files import run_directory
from .processes import STOP_SIGNALS
from .settings import SETTINGS, CommandLine, parse_device_ids

GIB = 2**30
MASK = "CUDA_VISIBLE_DEVICES"
DONE = 64
"""Exit code of a rank of start_ranks() that has done its work. 0 may be an os._exit(0) in anybody's code."""
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a rank that was asked to stop, and has saved if it had time to."""
OUT_OF_MEMORY = 75
"""That of a rank of size=full whose memory ran out, and which has written down a smaller size."""
ENDED_EARLY = (-signal.SIGTERM, -signal.SIGUSR1)
"""Those of a rank that was asked before it trained."""
PARENT, FAILURES, LISTENER, DEVICES = "DDP_PARENT", "DDP_FAILURES", "DDP_LISTENER", "DDP_DEVICES"
"""Variables for the ranks of start_ranks(), besides torchrun's."""


class Devices(NamedTuple):
    """The devices of this node's ranks. `visible` is CUDA_VISIBLE_DEVICES for them."""

    names: list[str]  # ["cuda:0", "cuda:1"] or ["cpu", "cpu"]
    visible: str = ""


@dataclass(frozen=True)
class Gpu:
    index: int  # as nvidia-smi shows it
    uuid: str = ""
    free_memory: float = math.inf  # bytes; inf if unknown
    users: frozenset[str] = frozenset()  # whose processes compute on it


def choose_devices(line: CommandLine, num_ranks: int = 0) -> Devices:
    """Return this node's devices, one per rank. Lock its GPUs. Raise ConfigError if they are not there.

    If torchrun has started `num_ranks` ranks here, device_ids=auto takes that many devices.
    """
    typed = line.settings.get("device_ids") or "auto"
    try:
        wanted = parse_device_ids(typed)
    except ValueError as error:
        raise ConfigError(f"device_ids={one_line(typed)}: {error}") from None
    if "cpu" in wanted or "mps" in wanted:
        return Devices([str(entry) for entry in wanted])
    gpus = find_gpus(os.environ)
    if isinstance(wanted, list):
        chosen = _named(wanted, gpus)
        if len(set(wanted)) < len(wanted) and line.get("launch.backend", "auto") != "gloo":
            rule = "only gloo runs two ranks on one GPU. Name each once or set launch.backend=gloo"
            raise ConfigError(f"device_ids={one_line(wanted)}: {rule}.")
        for gpu in set(chosen):
            if holder := lock(gpu.uuid):  # another run may hold it: who names a GPU gets it
                holder.detach()
    else:
        number = num_ranks if wanted == "auto" else int(wanted.removeprefix("auto:"))
        needed, seconds = number or 1, 60 * number_of(line, "launch.wait_minutes", 0.0)
        begun, chosen = time.monotonic(), _free(gpus, line, number)
        if seconds and len(chosen) < needed <= len(gpus):
            print(f"device_ids={wanted}: waiting for {needed} of {len(gpus)} GPUs", flush=True)
        while len(chosen) < needed <= len(gpus) and time.monotonic() < begun + seconds:
            time.sleep(min(seconds, 5))
            gpus = find_gpus(os.environ)
            chosen = _free(gpus, line, number)
        found = f"found {len(chosen)} of {len(gpus)} GPUs that others leave free"
        remedy = "Wait, share (launch.share_gpus=true), lower launch.min_free_memory_gib, or set device_ids=cpu,cpu"
        if len(chosen) < needed and (chosen or (seconds and gpus) or wanted != "auto"):
            raise ConfigError(f"device_ids={wanted}: {needed} are needed, and {found}. {remedy}.")
        if not chosen:
            if gpus:
                print(f"{found}: computing on the CPU. {remedy}.", flush=True)
            return Devices(["cpu"] * (number or 1))
    if not gpus[0].uuid:  # torch's own numbers, which follow the mask
        mask = os.environ.get(MASK) or ",".join(str(gpu.index) for gpu in gpus)
        return Devices([f"cuda:{gpu.index}" for gpu in chosen], mask)
    visible = [*dict.fromkeys(chosen)]
    names = [f"cuda:{visible.index(gpu)}" for gpu in chosen]
    for gpu, name in dict(zip(chosen, names, strict=True)).items():
        print(f"GPU {gpu.index} -> {name}", flush=True)
    return Devices(names, ",".join(gpu.uuid for gpu in visible))


def _named(wanted: Sequence[Any], gpus: Sequence[Gpu]) -> list[Gpu]:
    by_index = {gpu.index: gpu for gpu in gpus}
    if missing := [index for index in wanted if index not in by_index]:
        shown = f"driver and CUDA_VISIBLE_DEVICES show {[*by_index] or 'none'}"
        problem = f"GPU {missing[0]} does not exist; {shown}. Set device_ids=cpu,cpu or auto."
        raise ConfigError(f"device_ids={one_line(wanted)}: {problem}")
    return [by_index[index] for index in wanted]


def _free(gpus: Sequence[Gpu], line: CommandLine, number: int) -> list[Gpu]:
    """Lock and return `number` GPUs that nobody uses, those with the most free memory; 0: all.

    If there are fewer, return them without locks.
    """
    least = number_of(line, "launch.min_free_memory_gib", 2.0)
    gpus = [gpu for gpu in gpus if gpu.free_memory >= least * GIB]
    is_shared = line.get("launch.share_gpus", "false").lower() in "true yes on t y 1".split()
    if not is_shared:
        gpus = [gpu for gpu in gpus if gpu.users <= {_owner(os.getpid())}]
    chosen: list[Gpu] = []
    held: list[socket.socket] = []
    # Of two runs that choose at the same time, one gets all that it asks for.
    for _ in range(1000):  # 10 s: one may be halted (Ctrl-Z)
        if chooser := lock("chooser"):
            break
        time.sleep(0.01)
    for gpu in sorted(gpus, key=lambda gpu: -gpu.free_memory):
        if len(chosen) < number or not number:
            holder = lock(gpu.uuid)
            if holder is not None:
                held.append(holder)
            if holder is not None or is_shared:
                chosen.append(gpu)
    for holder in held:
        if len(chosen) < number:
            holder.close()
        else:
            holder.detach()  # never closed: held until this process ends
    if chooser:
        chooser.close()
    return sorted(chosen, key=lambda gpu: gpu.index)


def number_of(line: CommandLine, key: str, default: float) -> float:
    """Return the value of a key, before config.py checks it."""
    try:
        return float(line.get(key, str(default)))
    except ValueError:  # config.py refuses it
        return default


def lock(name: str) -> socket.socket | None:
    """Return a lock that lasts until it is closed, or None if another run holds it."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        if name and sys.platform == "linux":
            holder.bind(f"\0ddp-template-gpu/{name}")  # the \0 makes it abstract
    except OSError:
        holder.close()
        return None
    return holder


def find_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order."""
    import pynvml

    mask, present = environment.get(MASK), list[Gpu]()
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):  # it is lost: others can be used
                present.append(_read(pynvml, index))
    except pynvml.NVMLError:  # no NVIDIA driver; torch may know of others, such as AMD's
        import torch

        return [Gpu(index) for index in range(torch.cuda.device_count())]
    if mask is None:
        return present
    visible: list[Gpu] = []
    for entry in map(str.strip, mask.split(",")):  # as CUDA reads it, up to the first wrong entry
        if entry.startswith("MIG-"):  # a part of a GPU: CUDA shows one
            return [Gpu(0, entry)]
        by_uuid = [gpu for gpu in present if entry[:4] == "GPU-" and gpu.uuid.startswith(entry)]
        named = by_uuid or [gpu for gpu in present if str(gpu.index) == entry]
        if len(named) != 1:
            break
        visible += named
    return visible


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid, free, users = nvml.nvmlDeviceGetUUID(handle), math.inf, frozenset[str]()
    with suppress(nvml.NVMLError):  # not every GPU answers every question
        free = nvml.nvmlDeviceGetMemoryInfo(handle).free
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        users = frozenset(_owner(process.pid) for process in processes)
    return Gpu(index, uuid, free, users)


def _owner(pid: int) -> str:
    with suppress(OSError):  # in another container, or hidden
        return str(Path(f"/proc/{pid}").stat().st_uid)
    return "a process that cannot be seen"


def start_ranks(devices: Devices, line: CommandLine, asked: list[int] | None = None) -> int:
    """Run this command once per device. The first failure ends all ranks. Return the exit code.

    `asked` holds the stop signals of an earlier start, and gets those of this one.
    """
    # Rank 0 takes over this socket for the store, so nobody else can take its port meanwhile.
    listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
    failures, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "WORLD_SIZE": str(len(devices.names)),
        "LOCAL_WORLD_SIZE": str(len(devices.names)),
        PARENT: str(os.getpid()),
        FAILURES: str(sender.fileno()),
        LISTENER: str(listener.fileno()),
        DEVICES: json.dumps(devices.names),
        SETTINGS: json.dumps(line.settings),
        MASK: devices.visible,
    }
    asked = [] if asked is None else asked
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # Ctrl-C and a lost terminal reach all processes, and this one decides: ranks start with them ignored.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ranks = [
        Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            pass_fds=[sender.fileno(), listener.fileno()],
        )
        for rank in range(len(devices.names))
    ]
    for number in heeded:
        signal.signal(number, lambda number, _: asked.append(number))
    listener.close()
    sender.close()
    try:
        _watch(ranks, asked)
        codes = [rank.poll() for rank in ranks]  # None: alive, and killed now
    finally:
        for rank in ranks:
            rank.kill()  # a rank inside a collective answers to nothing else
        for rank in ranks:
            with suppress(TimeoutExpired):  # one that waits for a dead disk
                rank.wait(30)
    return _judge(codes, asked, failures, line)


def tell_failure(text: str, code: int, rank: Any = None) -> None:
    """Report why this rank (a ranks.Rank, once it has joined) fails, unless another was first."""
    if sender := os.environ.get(FAILURES):  # start_ranks() prints the first one
        with socket.socket(fileno=os.dup(int(sender))) as channel:
            channel.send(json.dumps([int(os.environ["RANK"]), text[-50_000:], code]).encode())
        return
    own = first = str(rank and rank.rank)
    if rank is not None and rank.store is not None:
        first = ""
        with suppress(RuntimeError):  # the store is gone, with the rank that failed first
            first = rank.store.compare_set("failure", "", own).decode()
    if first == own:
        print(text, file=sys.__stderr__, flush=True)


def _watch(ranks: Sequence["Popen[bytes]"], asked: list[int]) -> None:
    """Wait until all ranks have ended, or one has failed. Hand on the first request to stop."""
    is_told = False
    codes: list[int | None] = [None]
    while None in codes:
        codes = [rank.poll() for rank in ranks]
        if not {*codes} <= {None, DONE, *STOPPED, *ENDED_EARLY}:
            time.sleep(0.2)  # ranks that fell together: judge by all
            return
        if signal.SIGINT in asked[1:]:
            return
        if not asked and {*codes} & {*STOPPED, *ENDED_EARLY}:
            asked.append(signal.SIGTERM)  # a rank alone was told, perhaps by a scheduler
        if asked and not is_told and None in codes:
            is_told = True
            with suppress(OSError):  # Ctrl-C has ended `2>&1 | tee log` too
                print(
                    "\nasked to stop: saving within a few steps (Ctrl-C again: at once)", flush=True
                )
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
        time.sleep(0.05)


def _judge(
    codes: Sequence[int | None], asked: Sequence[int], failures: socket.socket, line: CommandLine
) -> int:
    """Print why a rank failed, once. Return the exit code."""
    fine = (DONE, *STOPPED, *ENDED_EARLY, None)
    failed = {rank: code for rank, code in enumerate(codes) if code not in fine}
    if OUT_OF_MEMORY in codes:  # the others' ends follow from it
        return 128 + as_stop(asked[0]) if asked else OUT_OF_MEMORY
    if {*codes} & {*ENDED_EARLY} or (asked and not failed):  # others may have lost a peer by then
        is_late = all(code == DONE for code in codes)
        return 0 if is_late else 128 + as_stop([*asked, signal.SIGTERM][0])
    if not failed:
        return 0
    told: list[Any] = []
    failures.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            told.append(json.loads(failures.recv(2**18)))
    # A rank that ended without a word comes first: the others' messages follow from it.
    logs = run_directory(line.get("name", "baseline")) / "logs"
    silent = failed.keys() - {rank for rank, *_ in told}
    # An abort may be gloo's, which has lost a peer, or the reason for the others' messages.
    aborted = {rank for rank in silent if failed[rank] == -signal.SIGABRT}
    if told and silent == aborted:
        _, text, code = told[0]  # later ones may follow from it
        for rank in sorted(aborted):
            text += f"\nrank {rank} was killed by SIGABRT; see {logs}/rank_{rank}.log"
        print(text, file=sys.stderr, flush=True)
        return int(code)
    rank = min((silent - aborted) or failed)
    code = failed[rank]
    how = "ended without a word, or made no progress for launch.timeout_minutes"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    how = how.replace("SIGKILL", "SIGKILL (out of memory?)")
    print(f"rank {rank} failed: it {how}; see {logs}/rank_{rank}.log", file=sys.stderr, flush=True)
    return 1


def as_stop(number: int) -> int:
    """Return SIGINT for Ctrl-C, and SIGTERM for every other stop signal."""
    return number if number == signal.SIGINT else signal.SIGTERM

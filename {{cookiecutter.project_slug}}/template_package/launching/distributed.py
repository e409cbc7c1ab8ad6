"""One rank's place among the others: joining and leaving the process group, and the few collectives used outside it.

Who starts the processes is launcher.py's business, how gradients are shared is strategies/'. With one rank there is no
process group at all, and every function here does the obvious thing.
"""

from __future__ import annotations

import gc
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankContext:
    """Who this process is: `rank` of `world_size` over all nodes, `local_rank` on its node, and the device it
    computes on.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    devices: tuple[torch.device, ...] = ()
    """All devices of this process, `device` first: it is the only one unless the process drives several
    (data_parallel).
    """
    device_notes: tuple[str, ...] = ()
    """For the log: which GPU of this node became which cuda:i, and why others did not."""
    started_at: float = field(default_factory=time.time)
    """When the command was started, in seconds since 1970."""
    store: dist.Store | None = None
    """What the ranks tell each other without a collective (a TCPStore); None with one rank."""
    abort: Callable[[str], None] = print
    """Tells the launching process why this rank is about to end: for threads, which cannot raise where others wait."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", self.devices or (self.device,))

    @property
    def is_main(self) -> bool:
        """Rank 0 alone prints and writes files."""
        return self.rank == 0

    @contextmanager
    def local_rank_first(self) -> Iterator[None]:
        """Local rank 0 of each node runs the body before its neighbours do, so that a download happens once a node."""
        if self.local_rank > 0:
            try:
                barrier()
            except RuntimeError as error:
                error.add_note(
                    "while local rank 0 built the data sets: launch.timeout_minutes may be too short for that"
                )
                raise
        yield
        if self.local_rank == 0:
            barrier()


_context = RankContext()


def set_context(context: RankContext) -> None:
    """Say who this process is; the launcher does, once, before run_fn."""
    global _context  # noqa: PLW0603 - one process is one rank
    _context = context


def current_context() -> RankContext:
    """Who this process is: rank 0 of 1 on the CPU unless a launcher has said otherwise."""
    return _context


def join_group(context: RankContext, backend: str, timeout: timedelta) -> None:
    """Set this rank's device, then join the process group (NCCL collectives use the current device)."""
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    if context.store is None:  # one rank
        return
    if backend == "auto":
        backend = "nccl" if context.device.type == "cuda" else "gloo"
    if backend == "nccl":  # gloo beside it carries objects, without a detour through GPU memory
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", context.store),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=context.device if "nccl" in backend else None,
    )


def join_alone(context: RankContext) -> None:
    """With one rank: join a group of its own, for libraries that cannot do without."""
    if not dist.is_initialized():
        join_group(replace(context, store=dist.HashStore()), "auto", timedelta(minutes=10))


_farewells: list[Callable[[], None]] = []


def before_leaving(farewell: Callable[[], None]) -> None:
    """Call `farewell` when all ranks leave the process group: for libraries with connections of their own."""
    _farewells.append(farewell)


def leave_group() -> None:
    """Destroy the process group. Model and optimizer must be gone: with DDP as its last owner, gloo would hang."""
    gc.collect()
    while _farewells:
        barrier()
        _farewells.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()


def launch_variables(context: RankContext) -> dict[str, str]:
    """This rank's place as torchrun tells it, for libraries that read it there; they compute on GPU LOCAL_RANK."""
    return {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(context.local_rank if context.device.index is None else context.device.index),
        "LOCAL_WORLD_SIZE": str(context.local_world_size),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),  # read by none: the group is there
        "MASTER_PORT": os.environ.get("MASTER_PORT", "0"),
    }


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """In the body these variables are set, or unset (None)."""
    former = {name: os.environ.get(name) for name in changes}

    def change(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    change(changes)
    try:
        yield
    finally:
        change(former)


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """`tensor`, reduced over all ranks in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor, operation)
    return tensor


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value` on every rank (pickled, through the CPU; tensors by pack() and unpack())."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def pack(state: Any) -> bytes:
    """Plain values and tensors as bytes: torch 2.13's object collectives fail on tensors."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> Any:
    """What pack() was given, on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def from_main(function: Callable[[], Any]) -> Any:
    """What `function` returns on rank 0, on every rank; what it raises there is raised on every rank, so that none
    waits.
    """
    outcome: tuple[Any, Exception | None] = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome = function(), None
        except Exception as error:
            outcome = None, error
    value, problem = broadcast_object(outcome)
    if problem is not None:
        raise problem
    return value


def gather_objects(value: Any) -> list[Any] | None:
    """Every rank's `value` in the order of ranks, on rank 0; None on the others."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values

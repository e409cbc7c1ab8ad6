"""Describes one rank (RankContext), joins the process group, and runs collectives on tensors and plain objects.

If there is no process group, each function here acts as if this rank were the only one.
"""

import io
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankContext:
    """Describes this process: its rank among all ranks, its local rank on its node, and its devices."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    # of this process: several only under data_parallel
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    # for the log: which GPU became which cuda:i, and why others were left out
    device_notes: tuple[str, ...] = ()
    started_at: float = 0.0  # the start of the command, in seconds since 1970
    node_rank: int = 0
    # a torch.distributed.Store: key-value pairs that all ranks reach without a collective
    store: Any = None
    attempt: int = 0  # restarts before this start of the ranks
    # tells why this rank fails: text, exit code
    report_failure: Callable[[str, int], object] = print

    def __str__(self) -> str:
        return f"rank {self.rank} ({socket.gethostname()}, {self.device})"

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def sum_dtype(self) -> torch.dtype:
        # of sums over samples; MPS has no float64
        return torch.float32 if self.device.type == "mps" else torch.float64

    @property
    def is_main(self) -> bool:
        return self.rank == 0  # it alone prints and writes files

    @contextmanager
    def local_rank_first(self, task: str) -> Iterator[None]:
        """Run the `with` block on local rank 0, then on the node's other ranks, so a node downloads data only once."""
        key = f"first/{task}/{self.node_rank}"
        if self.local_rank > 0:
            # no collective: NCCL's watchdog would abort a long download
            self.store.wait([key], timedelta(days=7))
        try:
            yield
        finally:
            if self.local_rank == 0 and self.local_world_size > 1:
                self.store.set(key, "")


current = RankContext()  # the context of this process, which launch() sets before run_fn


def rank_context(rank: int = 0, world_size: int = 1) -> RankContext:
    """Return the RankContext that launch() made for this process. Fail if the arguments contradict that context."""
    assert (rank, world_size) == (current.rank, current.world_size), (
        "run_fn was not started by launch()"
    )
    return current


def join_group(context: RankContext, backend: str, timeout: timedelta) -> None:
    """Join the process group of all ranks, unless this process has already joined it."""
    if dist.is_initialized():
        return
    is_nccl = backend == "nccl" or (backend == "auto" and context.device.type == "cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_nccl else "gloo",  # gloo carries objects, without a detour through GPU memory
        store=dist.PrefixStore("group", context.store), rank=context.rank, world_size=context.world_size,
        timeout=timeout, device_id=context.device if is_nccl else None,
    )  # fmt: skip


def all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` over all ranks in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, operation)
    return tensor


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank. The value is pickled. Use pack() and unpack() to send tensors."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def gather_objects(value: Any) -> list[Any] | None:
    """On rank 0, return a list of the ranks' values, in rank order. On the other ranks, return None."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def from_main(function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0, and return the result on every rank. If it raises an exception, all ranks raise it."""
    value, problem = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            value = function()
        except Exception as error:
            problem = error
    value, problem = broadcast_object((value, problem))
    if problem is not None:
        raise problem
    return value


def pack(state: Any) -> bytes:
    """Convert plain values and tensors to bytes, because torch 2.13's object collectives fail on tensors."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)

"""Says which rank a process is, and runs collectives over all ranks.

If there is one rank, there is no process group, and each function acts as if it had done its work.
"""

import io
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Rank:
    """This process among all ranks, and its devices."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    # of this process: several under strategy=data_parallel alone, which needs size=full
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    store: Any = None  # key-value pairs that all ranks reach without a collective

    def __str__(self) -> str:
        return f"rank {self.rank} ({socket.gethostname()}, {self.device})"

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def is_main(self) -> bool:
        return self.rank == 0  # it alone prints and writes files

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64

    @contextmanager
    def local_rank_first(self, task: str) -> Iterator[None]:
        """Run the body on local rank 0, then on the node's others, so a node downloads data once."""
        key = f"first/{task}/{self.node_rank}"
        if self.local_rank > 0:
            self.store.wait([key], timedelta(days=7))  # NCCL's watchdog would abort a collective
        try:
            yield
        finally:
            if self.local_rank == 0 and self.local_world_size > 1:
                self.store.set(key, "")

    def wait_for_main(self, task: str, beat: Callable[[], object]) -> None:
        """Wait until rank 0 has come here, however long it takes: a collective would give up."""
        key = f"main/{task}"
        if self.is_main and self.store is not None:
            self.store.set(key, "")
        while not (self.is_main or self.store.check([key])):
            beat()
            time.sleep(0.01)


def num_usable_cores() -> int:
    """Return how many cores this process may use: a scheduler or a container may allow a few."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    number = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup of version 2, or no quota ("max")
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("0::/")[2]
        quota, period = Path("/sys/fs/cgroup", group, "cpu.max").read_text().split()
        number = max(1, min(number, int(quota) // int(period)))
    return number


def all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` over all ranks in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, operation)
    return tensor


def gather_objects(value: Any) -> list[Any] | None:
    """On rank 0, return the ranks' values, in rank order. On the others, return None."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def from_main(function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0 and return its result on every rank. What it raises, all raise."""
    values: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            values[0] = function()
        except Exception as error:
            values[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    if values[1] is not None:
        raise values[1]
    return values[0]


def pack(state: Any) -> bytes:
    """Convert plain values and tensors to bytes, since object collectives fail on tensors."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)

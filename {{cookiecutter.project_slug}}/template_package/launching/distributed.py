"""Describes one rank of size=full, and joins the process group."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..core.ranks import Rank


@dataclass(frozen=True)
class RankContext(Rank):
    """This process among all ranks, with what its start has to say."""

    # for the log: which GPU became which cuda:i, and why others were left out
    device_notes: tuple[str, ...] = ()
    started_at: float = 0.0  # the start of the command, in seconds since 1970
    attempt: int = 0  # restarts before this start of the ranks
    # tells why this rank fails: text, exit code
    report_failure: Callable[[str, int], object] = print


current = RankContext()  # the context of this process, which launch() sets before run_fn


def rank_context(rank: int = 0, world_size: int = 1) -> RankContext:
    """Return the RankContext that launch() made for this process. Fail if the arguments contradict that context."""
    if (rank, world_size) != (current.rank, current.world_size):
        raise RuntimeError("run_fn was not started by launch()")
    return current


def join_group(context: Rank, backend: str, timeout: timedelta) -> None:
    """Join the process group of all ranks, unless this process has already joined it."""
    if dist.is_initialized():
        return
    is_nccl = backend == "nccl" or (backend == "auto" and context.device.type == "cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_nccl else "gloo",  # gloo carries objects, without a detour through GPU memory
        store=dist.PrefixStore("group", context.store), rank=context.rank, world_size=context.world_size,
        timeout=timeout, device_id=context.device if is_nccl else None,
    )  # fmt: skip

"""Lets compute_loss() compare samples of all ranks, as contrastive losses do.

With `loss_over = "global_batch"` in model.py, a rank's whole share is one micro-batch. compute_loss()
compares its own n rows with all N rows of the global batch, which gather_rows() returns, and takes
the mean over its own. Why that is the loss and the gradient of one device:

- The mean over all N rows is the sum over ranks of n / N times a rank's mean. core/data.py
  multiplies a rank's loss by n * world_size / N, and averaging the gradients divides by world_size.
- A row is among the columns of every rank's loss, so its gradient is the sum of what all ranks'
  losses give it. gather_rows() adds that up in its backward pass.
- A rank without a sample still runs one, with weight 0. gather_rows() leaves it out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ConfigError

ALONE = -1
_now: list[int | None] = [None]
"""How many samples the global batch has, of which this rank's compute_loss() got a share.

ALONE: it got all of them. 0: model.py does not declare that it compares them. None: nothing runs.
No ContextVar, because a checkpointed forward runs again in one of backward's threads.
"""


@contextmanager
def global_batch(size: int) -> Iterator[None]:
    """Inside, gather_rows() is about a share of so many samples."""
    former, _now[0] = _now[0], size
    try:
        yield
    finally:
        _now[0] = former


def gather_rows(rows: Tensor) -> Tensor:
    """Return all ranks' rows, (N, …) in the global batch's order, for this rank's (n, …).

    A row is what belongs to one sample. Gradients reach the rank that a row comes from. All ranks
    must call this equally often. With one rank, it returns `rows`. Raise ConfigError if there is
    not one row a sample, or without the declaration.
    """
    shares = shares_of_batch()
    if not shares:
        return rows
    own = len(shares[dist.get_rank()])
    if not rows.dim() or len(rows) != max(1, own):
        problem = f"got the shape {tuple(rows.shape)} for {max(1, own)} samples"
        remedy = "Give it one row a sample: two views are two calls, or one more dimension"
        raise ConfigError(f"gather_rows: {problem}. {remedy}.")
    gathered: Tensor = Gather.apply(rows[:own], shares)  # type: ignore[no-untyped-call]
    return gathered


def own_rows(rows: Tensor) -> Tensor:
    """Return where this rank's rows stand in gather_rows(rows): (n,) int64, as labels of InfoNCE.

    A rank without a sample gets the first place; its loss does not count.
    """
    shares, places = shares_of_batch(), torch.arange(len(rows))
    if shares:
        places = shares[dist.get_rank()]
    return (places if len(places) else torch.arange(1)).to(rows.device)


def shares_of_batch() -> Sequence[Tensor]:
    """Return the places of each rank's rows, as core/data.py cuts them, or () if all are here."""
    size = _now[0]
    if size == 0 or (size is None and dist.is_initialized()):
        rule = 'in compute_loss(), training_metrics() and loss_weight(), and with loss_over = "global_batch"'
        raise ConfigError(f"gather_rows(), own_rows(): call them {rule} in model.py.")
    if size is None or size == ALONE or not dist.is_initialized():
        return ()
    return torch.arange(size).tensor_split(dist.get_world_size())


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: Sequence[Tensor]) -> Tensor:
        ctx.places = shares[dist.get_rank()]
        padded = own.new_zeros(len(shares[0]), *own.shape[1:])  # collectives want equal sizes
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in shares]
        # As bytes: gloo sends them whatever the dtype.
        dist.all_gather([as_bytes(part) for part in parts], as_bytes(padded))
        return torch.cat([part[: len(share)] for part, share in zip(parts, shares, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total[ctx.places.to(total.device)], None


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)

"""What a micro-batch's loss weighs when it is no mean over samples: model.py's loss_weight(batch)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import model as user_model
from ..launching.distributed import RankContext, all_reduce
from .fetching import MicroBatch

_loss_weight: Callable[[Any], Tensor | float] | None = getattr(user_model, "loss_weight", None)


def weigh(micro_batches: Iterable[MicroBatch], context: RankContext) -> Iterator[tuple[MicroBatch, float | Tensor]]:
    """Each micro-batch of a step with its weight: its part of the global batch's, times world_size.

    With loss_weight, a step's micro-batches are all read before the first runs, and the ranks add up their weights.
    """
    if _loss_weight is None:
        for micro_batch in micro_batches:
            yield micro_batch, micro_batch.request.weight
        return
    held = list(micro_batches)
    weights = torch.stack([weight_of(micro_batch, context) for micro_batch in held])
    total = all_reduce(weights.sum())
    share = torch.where(total == 0, 0.0, context.world_size / total)  # a global batch may count nothing at all
    yield from zip(held, weights * share, strict=True)


def weight_of(micro_batch: MicroBatch, context: RankContext) -> Tensor:
    """What this micro-batch's mean loss weighs: 0-dim float64; 0 for one that only keeps the ranks in step."""
    request = micro_batch.request
    weight = _loss_weight(micro_batch.batch) if _loss_weight and request.num_samples else request.num_samples
    if isinstance(weight, Tensor):
        return weight.to(context.device, torch.float64)
    return torch.full((), weight, dtype=torch.float64, device=context.device)  # a copy from the host would wait

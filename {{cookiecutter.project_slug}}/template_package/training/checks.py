"""Checks of a run while it goes on: the loss and the weights are finite, and the ranks hold the same model."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import FailureError
from ..launching.distributed import RankContext, all_reduce

_PART = 2**20


class FiniteCheck:
    """Notes the first step whose loss is not finite, on the device, until `raise_if_found` asks."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._first_step = torch.full((), sys.maxsize, device=context.device)

    def note(self, step_loss: Tensor, step: int) -> None:
        """Look at one step's loss. Nothing waits for the device."""
        self._first_step = torch.where(step_loss.isfinite(), self._first_step, self._first_step.clamp(max=step))

    def raise_if_found(self, weights: list[Tensor] | None = None, step: int = 0) -> None:
        """FailureError if a loss was not finite, or a weight is not. All ranks call it, where they wait anyway.

        weights: this rank's, before they are saved: a finite loss may have had a gradient that is not.
        """
        first_step = self._first_step.clone()
        if weights is not None:
            norms = torch.stack(torch._foreach_norm([weight.float() for weight in weights]))
            is_finite = norms.isfinite().all().to(first_step.device)
            first_step = torch.where(is_finite, first_step, first_step.clamp(max=step))
        if (found := int(all_reduce(first_step, dist.ReduceOp.MIN))) != sys.maxsize:
            raise FailureError(
                f"the loss of step {found}, or its gradient, is not finite. Look for a NaN or infinity in the samples, "
                "lower optimizer.learning_rate, or set training.max_gradient_norm=1. The last checkpoint is sound."
            )


def check_replicas(tensors: dict[str, Tensor], step: int, device: torch.device) -> None:
    """RuntimeError, on every rank, that names the first tensor which is not the same to the bit on all of them."""
    if not tensors:
        return
    sums = torch.stack([_checksum(tensor).to(device) for tensor in tensors.values()])
    # Two's complement: the largest of -x is minus the smallest of x, so one MAX compares both ends.
    largest, negated_smallest = all_reduce(torch.stack([sums, -sums]), dist.ReduceOp.MAX)
    for name, is_different in zip(tensors, (largest != -negated_smallest).tolist(), strict=True):
        if is_different:
            raise RuntimeError(
                f"after step {step} {name!r} differs between ranks, which no longer train one model. A parameter: its "
                "gradient was not averaged; compute_loss must call model(...), nothing else may change weights. A "
                "buffer: each rank updates it from its own samples; synchronize it, or use training.sync_batchnorm."
            )


def _checksum(tensor: Tensor) -> Tensor:
    """int64 scalar: the sum of the bytes, each weighted by its place (any one flipped bit changes it)."""
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    places = (
        torch.arange(min(_PART, len(content)), device=content.device) * 2 + 1
    )  # odd: overflow loses no power of two
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for part in torch.split(content, _PART):  # as int64 a large embedding would take eight times its size
        total = total * 31 + (part * places[: len(part)]).sum()
    return total

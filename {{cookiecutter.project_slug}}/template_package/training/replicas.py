"""Proves that the ranks hold the same model: gradients that are not averaged show here after one step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..launching.distributed import all_reduce

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**20


def check_replicas(tensors: dict[str, Tensor], step: int, device: torch.device) -> None:
    """RuntimeError, on every rank, that names the first tensor which is not the same everywhere after `step`."""
    if name := first_difference(tensors, device):
        raise RuntimeError(
            f"after step {step} {name!r} differs between ranks, which no longer train one model. A parameter: its "
            "gradient was not averaged; compute_loss must call model(...), nothing else may change weights. A "
            "buffer: each rank updates it from its own samples; synchronise it, or use training.sync_batchnorm."
        )


def first_difference(tensors: dict[str, Tensor], device: torch.device) -> str | None:
    """The first tensor's name that is not the same, to the bit, on every rank. One collective, on all ranks."""
    if not tensors:
        return None
    sums = torch.stack([_checksum(tensor).to(device) for tensor in tensors.values()])
    # Two's complement: the largest of -x is minus the smallest of x, so one MAX compares both ends.
    bounds = all_reduce(torch.stack([sums, -sums]), dist.ReduceOp.MAX)
    differs = (bounds[0] != -bounds[1]).tolist()
    return next((name for name, is_different in zip(tensors, differs, strict=True) if is_different), None)


def _checksum(tensor: Tensor) -> Tensor:
    """int64 scalar: the sum of the elements' bits, each weighted by its place (any one flipped bit changes it)."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    bits = tensor.detach().contiguous().flatten().view(_INTEGERS[tensor.element_size()])
    places = torch.arange(min(bits.numel(), _PART), device=bits.device) * 2 + 1  # odd: overflow loses no power of two
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _PART):  # in parts: as int64 a large embedding would take 6 times its size
        part = bits[start : start + _PART].to(torch.int64)
        total = total * 31 + (part * places[: len(part)]).sum()
    return total

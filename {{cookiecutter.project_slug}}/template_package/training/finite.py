"""Stops a run whose loss is no number any more, before a checkpoint holds what came of it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .. import model as user_model
from ..launching.distributed import RankContext, all_reduce, from_main, gather_objects
from ..validation import FailureError
from .loader import TrainLoader
from .run_files import write_json
from .workers import MAX_NAMED


class FiniteCheck:
    """Looks at each micro-batch's loss: at once on CPU; on a GPU a flag stays there until `raise_if_found`."""

    def __init__(
        self, context: RankContext, loader: TrainLoader, directory: Path, max_gradient_norm: float | None
    ) -> None:
        self._context, self._loader, self._directory = context, loader, directory
        self._is_clipped = max_gradient_norm is not None
        self._is_cpu = context.device.type == "cpu"
        self._first_step = torch.full((), sys.maxsize, device=context.device)

    def look(self, loss: Tensor, step: int) -> None:
        """Called between forward and backward: a rank that ends here leaves the others without its gradients."""
        if not self._is_cpu:
            self._first_step = torch.where(loss.isfinite(), self._first_step, self._first_step.clamp(max=step))
        elif not math.isfinite(loss.item()):
            self._fail(step, [self._list_samples(step)])

    def check_weights(self, weights: list[Tensor], step: int) -> None:
        """FailureError if a weight is no number: a finite loss may have had a gradient that was none.

        weights: what this rank holds of them; all ranks call it and learn the same.
        """
        norms = torch.stack(torch._foreach_norm([weight.float() for weight in weights]))
        is_finite = norms.isfinite().all().to(self._context.device, torch.int32)
        if not all_reduce(is_finite, dist.ReduceOp.MIN):
            self._fail_together(step, is_seen_here=True)

    def raise_if_found(self) -> None:
        """FailureError if a loss was not finite; called by all ranks, where the run waits for the device anyway."""
        if self._is_cpu:
            return
        step = int(all_reduce(self._first_step.clone(), dist.ReduceOp.MIN))
        if step != sys.maxsize:
            # A rank that has it of a later step has it from the others' gradients: its samples are not to blame.
            self._fail_together(step, is_seen_here=int(self._first_step) == step)

    def _fail_together(self, step: int, *, is_seen_here: bool) -> None:
        listed = gather_objects(self._list_samples(step) if is_seen_here else None)
        self._fail(step, from_main(lambda: [words for words in listed or [] if words]))

    def _fail(self, step: int, listed: list[str]) -> None:
        has_weights = hasattr(user_model, "loss_weight")
        empty = " A micro-batch whose loss_weight is 0 needs a mean of 0, not 0/0." if has_weights else ""
        clip = "" if self._is_clipped else ", or set training.max_gradient_norm=1"
        raise FailureError(
            f"the loss of step {step}, or its gradient, is not finite. {'; '.join(listed)}. "
            f"Look at them, lower optimizer.learning_rate{clip}.{empty}"
        )

    def _list_samples(self, step: int) -> str:
        rank, (indices, bad) = self._context.rank, self._loader.indices_of_step(step)
        path = self._directory / f"non_finite_rank_{rank}.json"
        write_json(path, {"step": step, "rank": rank, "indices": indices, "non_finite_indices": bad})
        return f"{path} lists the samples of rank {rank}{', of which ' * bool(bad)}{name_bad(bad)}"


def name_bad(indices: list[int]) -> str:
    """`17, 20 hold a NaN or infinity`; nothing of none."""
    more = f" and {len(indices) - MAX_NAMED} more" if len(indices) > MAX_NAMED else ""
    return f"{', '.join(map(str, indices[:MAX_NAMED]))}{more} hold a NaN or infinity" if indices else ""

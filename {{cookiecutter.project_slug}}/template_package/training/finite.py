"""Stops a run whose loss is no number any more, before a checkpoint holds what came of it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..launching.distributed import RankContext, all_reduce, from_main, gather_objects
from ..validation import ConfigError
from .loader import TrainLoader
from .run_files import write_json


class NonFiniteError(ConfigError):
    """A failure (exit code 1) that is told in one line: a traceback would lead to where it was seen, not made."""

    exit_code = 1


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
            self._fail(step)

    def check_weights(self, weights: list[Tensor], step: int) -> None:
        """NonFiniteError if a weight is no number: a finite loss may have had a gradient that was none.

        weights: what this rank holds of them; all ranks call it and learn the same.
        """
        norms = torch.stack(torch._foreach_norm([weight.float() for weight in weights]))
        is_finite = norms.isfinite().all().to(self._context.device, torch.int32)
        if not all_reduce(is_finite, dist.ReduceOp.MIN):
            self._fail(step)

    def raise_if_found(self) -> None:
        """NonFiniteError if a loss was not finite; called by all ranks, where the run waits for the device anyway."""
        if self._is_cpu:
            return
        step = int(all_reduce(self._first_step.clone(), dist.ReduceOp.MIN))
        if step == sys.maxsize:
            return
        # A rank that has it of a later step has it from the others' gradients: its samples are not to blame.
        paths = gather_objects(self._list_samples(step) if int(self._first_step) == step else None)
        self._fail(step, from_main(lambda: [path for path in paths or [] if path]))

    def _fail(self, step: int, paths: list[str] | None = None) -> None:
        listed = " ".join(paths or [self._list_samples(step)])
        clip = "" if self._is_clipped else ", or set training.max_gradient_norm=1"
        raise NonFiniteError(
            f"the loss of step {step}, or its gradient, is not finite. {listed} lists the rank's samples. "
            f"Look at them, lower optimizer.learning_rate{clip}."
        )

    def _list_samples(self, step: int) -> str:
        path = self._directory / f"non_finite_rank_{self._context.rank}.json"
        write_json(path, {"step": step, "rank": self._context.rank, "indices": self._loader.indices_of_step(step)})
        return str(path)

"""The losses of a step and an epoch: tensors until a line is due, then reduced over the ranks in one collective."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launching.distributed import RankContext, all_reduce
from .loader import TrainLoader


class StepFigures:
    """Adds up this rank's parts of the losses. Only `read` waits for the device."""

    def __init__(self, context: RankContext, loader: TrainLoader) -> None:
        self._context, self._loader = context, loader
        self._epoch_loss = torch.zeros((), dtype=torch.float64, device=context.device)  # over a million steps
        self._num_steps = 0

    def add(self, step_loss: Tensor) -> None:
        """Count one step of the epoch."""
        self._epoch_loss += step_loss
        self._num_steps += 1

    def read(self, step_loss: Tensor) -> tuple[float, float]:
        """The global batch's mean loss, and the mean since the epoch (or this start) began; all ranks call it."""
        parts = torch.stack([step_loss.double(), self._epoch_loss])
        global_loss, epoch_loss = (all_reduce(parts) / self._context.world_size).tolist()
        return global_loss, self._loader.mean_over_epoch(epoch_loss, self._num_steps, global_loss)

    def begin_epoch(self) -> None:
        """Start again from nothing."""
        self._epoch_loss.zero_()
        self._num_steps = 0

"""A model that writes rank 0's next phase into the file `phase`: s (step), e (evaluation) or w (save)."""

# Tests replace text of this file.
# fmt: off
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

SECONDS = 0.01


@dataclass
class ModelConfig:
    width: int = 512


def mark(letter: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        descriptor = os.open("phase", os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, letter.encode(), 0)
        os.close(descriptor)


def build_model(config: ModelConfig) -> nn.Module:
    width = config.width
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width), nn.Linear(width, 1))
    model.register_state_dict_pre_hook(lambda *_: mark("w"))  # a checkpoint is about to be written
    return model


def compute_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    mark("s" if model.training else "e")
    time.sleep(SECONDS)
    inputs, targets = batch
    outputs = model(inputs)
    return (outputs - targets).square().mean(), outputs


def build_metrics(config: ModelConfig) -> "MetricCollection":
    from torchmetrics import MetricCollection

    return MetricCollection({})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Any) -> None:
    """Do nothing, since this model has no metrics."""

"""Your model and its loss. In this example, a small convolutional network classifies 8x8 images.

Rewrite this file for your own model. The trainer uses `ModelConfig`, `build_model`, `compute_loss`, `build_metrics`
and `update_metrics`. `run.py predict` uses `predict`. You may add these optional functions: `loss_weight`,
`training_metrics`, `evaluate_batch`, `build_optimizer`, `learning_rate`, `on_epoch_begin`, `on_evaluation_end`,
`after_step` and `complete_config`. README.md explains them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from .dataset import NUM_CLASSES, Batch

if TYPE_CHECKING:
    from torchmetrics import MetricCollection


@dataclass
class ModelConfig:
    """The keys under `model:` in config.yaml. Each key's pydantic Field says which values are allowed."""

    num_classes: Annotated[int, Field(ge=NUM_CLASSES)] = NUM_CLASSES
    channels: Annotated[int, Field(multiple_of=4, gt=0)] = 32
    """Number of feature maps in the first two convolutions; the third has twice as many. It must be a multiple of 4."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1


def build_model(config: ModelConfig) -> nn.Module:
    """Build the network, which maps (B, 1, 8, 8) images to (B, num_classes) logits."""
    narrow, wide = config.channels, 2 * config.channels
    return nn.Sequential(
        *convolution(1, narrow),
        *convolution(narrow, narrow),
        nn.MaxPool2d(2),  # (B, narrow, 4, 4)
        *convolution(narrow, wide),
        nn.MaxPool2d(2),  # (B, wide, 2, 2)
        nn.Flatten(),
        nn.Dropout(config.dropout),
        nn.Linear(wide * 2 * 2, config.num_classes),
    )


def convolution(num_inputs: int, num_outputs: int) -> tuple[nn.Module, ...]:
    """Return three layers: a 3x3 convolution that keeps the image size, group normalization, and ReLU."""
    # GroupNorm sees one sample at a time. BatchNorm's statistics would depend on how a batch is cut among devices.
    return nn.Conv2d(num_inputs, num_outputs, 3, padding=1), nn.GroupNorm(4, num_outputs), nn.ReLU()


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of one micro-batch, and the logits.

    `batch.inputs` is (B, 1, 8, 8) float32 in [0, 1], and `batch.targets` is (B,) int64 class ids.
    The loss is a scalar, the mean over this rank's B samples. The logits are (B, num_classes).
    Call `model(...)` exactly once, not one of its methods: DDP needs that call to average the gradients.
    """
    logits = model(batch.inputs)
    return F.cross_entropy(logits, batch.targets), logits


def predict(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return what `run.py predict` writes: a dict from the name of each column to a tensor of shape (B,)."""
    probabilities, digits = model(batch.inputs).float().softmax(1).max(1)
    return {"label": digits, "probability": probabilities}


def build_metrics(config: ModelConfig) -> "MetricCollection":
    """Build the metrics besides the loss. `evaluation.metric` names the one that decides which checkpoint is best."""
    from torchmetrics import MetricCollection  # here, since the import takes a second that training need not wait for
    from torchmetrics.classification import MulticlassAccuracy

    return MetricCollection({"accuracy": MulticlassAccuracy(config.num_classes, average="micro")})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    """Update this rank's metrics with one evaluation micro-batch. The trainer combines the metrics of all ranks."""
    metrics.update(outputs, batch.targets)

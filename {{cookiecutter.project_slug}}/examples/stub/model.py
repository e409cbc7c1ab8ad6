"""Your model and its loss. This short example, which you overwrite, is a regression on two inputs.

Replace everything that is marked REPLACE. The trainer uses `ModelConfig`, `build_model`, `compute_loss`,
`build_metrics` and `update_metrics`. You may add these optional functions: `predict`, `loss_weight`,
`training_metrics`, `evaluate_batch`, `build_optimizer`, `learning_rate`, `on_epoch_begin`, `on_evaluation_end`,
`before_step`, `after_step` and `complete_config`, and declare `loss_over` for a contrastive loss. README.md explains
them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from .dataset import NUM_FEATURES, Batch

if TYPE_CHECKING:
    from torchmetrics import MetricCollection


@dataclass
class ModelConfig:
    """REPLACE. The keys under `model:` in config.yaml. pydantic's Field defines which values are allowed."""

    hidden_size: Annotated[int, Field(ge=1)] = 64


class TwoInputs(nn.Module):
    """REPLACE. Predicts a number from two inputs. Maps (B, 8) and (B, 3) to (B,)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(sum(NUM_FEATURES), hidden_size)
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        features = torch.cat((first, second), dim=1)  # (B, 11)
        prediction: Tensor = self.output(F.gelu(self.hidden(features)))
        # (B, 1) -> (B,), as the targets: else the loss would broadcast to (B, B)
        return prediction.squeeze(1)


def build_model(config: ModelConfig) -> nn.Module:
    """REPLACE. Build your network on the CPU. The trainer moves it to the devices."""
    return TwoInputs(config.hidden_size)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """REPLACE. Return the mean loss of one micro-batch, and the outputs for update_metrics and training_metrics.

    Call `model(...)` exactly once, not one of its methods: DDP needs that call to average the gradients.
    """
    predictions = model(batch.first, batch.second)
    return F.mse_loss(predictions, batch.targets), predictions


def build_metrics(config: ModelConfig) -> "MetricCollection":
    """Build the metrics that evaluation reports. There are none yet: REPLACE {} by {name: torchmetrics metric}.

    For a classifier, write {"accuracy": MulticlassAccuracy(num_classes, average="micro")}, and in config.yaml
    `evaluation.metric: accuracy` and `evaluation.mode: max`.
    """
    # here, since the import takes a second that training need not wait for
    from torchmetrics import (
        MetricCollection,
    )

    return MetricCollection({})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    """Add one evaluated micro-batch of this rank to the metrics. The trainer combines the metrics of all ranks.

    The trainer calls this only if build_metrics() returns a metric.
    """
    metrics.update(outputs, batch.targets)

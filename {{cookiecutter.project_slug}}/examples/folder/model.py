"""Your model and its loss. In this example, a residual network or a pretrained model classifies images.

Rewrite this file for your own model. The trainer uses `ModelConfig`, `build_model`, `compute_loss`, `build_metrics`
and `update_metrics`. `run.py predict` uses `predict`. README.md explains the optional functions.
"""

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from .dataset import Batch, DataConfig, find_splits


@dataclass
class ModelConfig:
    """The keys under `model:` in config.yaml. pydantic's Field defines which values are allowed."""

    pretrained: Annotated[str, Field(pattern="^(torchvision|timm):.")] | None = None
    channels: Annotated[int, Field(multiple_of=8, gt=0)] = 32  # 8 groups of GroupNorm
    num_blocks: list[Annotated[int, Field(ge=1)]] = field(default_factory=lambda: [1, 1, 1])
    stem_stride: Annotated[int, Field(ge=1, le=8)] = 1
    # filled in below; a checkpoint with other classes is refused
    class_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        library = (self.pretrained or "").partition(":")[0]
        if library and find_spec(library) is None:
            command = f"python -m pip install -c constraints.txt torch torchvision{' timm' * (library == 'timm')}"
            raise ValueError(
                f"pretrained={self.pretrained}: {library} is not installed. Run {command}"
            )


def complete_config(model: ModelConfig, data: DataConfig) -> None:
    """Unless class names are given, use the sorted names of the class folders. This runs when the config is read."""
    if not data.class_names:
        data.class_names = sorted(
            {path.name for folders in find_splits(data).values() for path in folders}
        )
    model.class_names = data.class_names


def build_model(config: ModelConfig) -> nn.Module:
    """Build the network, which maps (B, 3, image_size, image_size) images to (B, num_classes) logits."""
    num_classes, (library, _, name) = (
        len(config.class_names),
        (config.pretrained or "").partition(":"),
    )
    if library == "timm":
        network: nn.Module = import_module(library).create_model(
            name, pretrained=True, num_classes=num_classes
        )
    elif library == "torchvision":
        network = import_module("torchvision.models").get_model(name, weights="DEFAULT")
        last, layer = [
            named for named in network.named_modules() if isinstance(named[1], nn.Linear)
        ][-1]
        network.set_submodule(last, nn.Linear(layer.in_features, num_classes))
    else:  # a residual network (He et al. 2016, arXiv:1512.03385): each stage but the first halves height and width
        width, stride = config.channels, config.stem_stride
        layers = [convolution(3, width, 2 * stride + 1, stride), nn.ReLU()]
        for stage, num_blocks in enumerate(config.num_blocks):
            for block in range(num_blocks):
                stride = 2 if stage and not block else 1
                layers.append(Block(width, width * stride, stride))
                width *= stride
        network = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)
        )
    return network


class Block(nn.Module):
    """A residual block with two convolutions: (B, num_inputs, H, W) -> (B, width, H / stride, W / stride)."""

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            convolution(num_inputs, width, 3, stride),
            convolution(width, width, 3, 1),
        )
        self.shortcut = convolution(num_inputs, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))) + self.shortcut(images))


def convolution(num_inputs: int, width: int, size: int, stride: int) -> nn.Module:
    # GroupNorm sees one sample at a time. BatchNorm's statistics would depend on how a batch is cut among devices.
    return nn.Sequential(
        nn.Conv2d(num_inputs, width, size, stride, size // 2, bias=False), nn.GroupNorm(8, width)
    )


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of one micro-batch, weighted by class, and the (B, num_classes) logits."""
    # once, and no part of the model: under DDP this call averages the gradients
    logits = model(batch.inputs)
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum(), logits


def loss_weight(batch: Batch) -> Tensor:
    """Return the sum of the weights in a batch. The trainer needs it to average losses correctly over all ranks."""
    return batch.weights.sum()


def predict(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the columns that `run.py predict` writes, each (B,). The class ids in `label` become class names."""
    probabilities, labels = model(batch.inputs).float().softmax(1).max(1)
    return {"label": labels, "probability": probabilities}


def build_metrics(config: ModelConfig) -> Any:
    """Build the metrics that evaluation reports. The confusion_matrix is written to reports/."""
    # here, since the import takes a second that training need not wait for
    from torchmetrics import (
        MetricCollection,
    )
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    num_classes = len(config.class_names)
    accuracy = MulticlassAccuracy(num_classes, average="micro")
    return MetricCollection(
        {"accuracy": accuracy, "confusion_matrix": MulticlassConfusionMatrix(num_classes)}
    )


def update_metrics(metrics: Any, outputs: Tensor, batch: Batch) -> None:
    """Add one evaluated micro-batch of this rank to the metrics. The trainer combines the metrics of all ranks."""
    metrics.update(outputs, batch.targets)

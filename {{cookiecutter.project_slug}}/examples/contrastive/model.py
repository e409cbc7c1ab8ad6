"""Your model and its loss. In this example, two towers learn which lower half of a digit belongs to an upper half.

The loss is CLIP's (Radford et al. 2021, arXiv:2103.00020): each half is to find its other half among those of the
whole global batch, on whatever rank they are. Rewrite this file for your own towers. The trainer uses `ModelConfig`,
`build_model`, `compute_loss`, `build_metrics` and `update_metrics`. README.md lists the optional functions.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from .core.global_batch import gather_rows, own_rows
from .dataset import Batch

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

loss_over = "global_batch"  # compute_loss() compares samples of all ranks
Pairs = tuple[Tensor, Tensor]
"""Embeddings of upper and lower halves, each (B, embedding_size) float32 of length 1."""


@dataclass
class ModelConfig:
    """The keys under `model:` in config.yaml. Each key's pydantic Field says which values are allowed."""

    width: Annotated[int, Field(gt=0)] = 256
    embedding_size: Annotated[int, Field(gt=0)] = 64
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """How slowly the momentum towers, which evaluation uses, follow the trained ones. 0: they are the same."""


class Towers(nn.Module):
    """A tower for each kind of half, slow copies of both, and the loss's temperature."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.momentum = config.momentum
        self.trained = nn.ModuleDict({name: tower(config) for name in ("upper", "lower")})
        self.slow = deepcopy(self.trained).requires_grad_(False)
        # One over the temperature, as a logarithm. Not a scalar: FSDP takes none.
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        return *embed(self.trained, batch), self.log_scale.exp().clamp(max=100)


def tower(config: ModelConfig) -> nn.Module:
    """Return a network that maps halves, (B, 4, 8), to embeddings, (B, embedding_size)."""
    layers = nn.Linear(32, config.width), nn.GELU(), nn.Linear(config.width, config.embedding_size)
    return nn.Sequential(nn.Flatten(), *layers)


def embed(towers: nn.ModuleDict, batch: Batch) -> Pairs:
    upper, lower = towers["upper"](batch.upper), towers["lower"](batch.lower)
    return F.normalize(upper.float(), dim=1), F.normalize(lower.float(), dim=1)


def build_model(config: ModelConfig) -> nn.Module:
    return Towers(config)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Pairs]:
    """Return the mean InfoNCE loss of this rank's B samples, and their embeddings.

    Each of them is compared with all N samples of the global batch: the logits are (B, N). One of them is right: the
    one at the sample's own place. Call `model(...)` exactly once.
    """
    upper, lower, scale = model(batch)
    labels = own_rows(upper)
    find_lower = F.cross_entropy(scale * upper @ gather_rows(lower).T, labels)
    find_upper = F.cross_entropy(scale * lower @ gather_rows(upper).T, labels)
    return (find_lower + find_upper) / 2, (upper, lower)


def after_step(model: nn.Module, step: int, log: Any) -> None:
    """Let the slow towers follow the trained ones. The trainer calls this after each step, without gradients."""
    module = cast(Towers, model)
    for slow, trained in zip(module.slow.parameters(), module.trained.parameters(), strict=True):
        slow.lerp_(trained, 1 - module.momentum)


def evaluate_batch(model: nn.Module, batch: Batch) -> Pairs:
    """Return the embeddings of the slow towers, for update_metrics()."""
    return embed(cast(Towers, model).slow, batch)


def build_metrics(config: ModelConfig) -> "MetricCollection":
    """Return recall@1 over the whole validation set: how often the nearest lower half is the right one."""
    # here, since the import takes a second that training need not wait for
    from torchmetrics import Metric, MetricCollection

    class Recall(Metric):
        upper: list[Tensor]
        lower: list[Tensor]

        def __init__(self) -> None:
            super().__init__()
            # A list state keeps all samples. The trainer joins those of all ranks before compute().
            for name in ("upper", "lower"):
                self.add_state(name, default=[], dist_reduce_fx="cat")

        def update(self, upper: Tensor, lower: Tensor) -> None:
            self.upper.append(upper)
            self.lower.append(lower)

        def compute(self) -> Tensor:
            upper, lower = torch.cat(self.upper), torch.cat(self.lower)
            nearest = (upper @ lower.T).argmax(1)
            return (nearest == torch.arange(len(upper), device=upper.device)).float().mean()

    return MetricCollection({"recall": Recall()})


def update_metrics(metrics: "MetricCollection", outputs: Pairs, batch: Batch) -> None:
    """Add one evaluated micro-batch of this rank to the metrics. The trainer combines the metrics of all ranks."""
    metrics.update(*outputs)

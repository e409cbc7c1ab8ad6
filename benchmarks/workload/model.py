"""The models that every loop trains. The measured project uses this file as its model.py.

`mlp` has 64-64-10 units: its step is so short that the cost of the loop shows. `transformer` has four layers of width
128. networks.py has larger ones, for a GPU. Each rank of each loop calls build_model(). That function therefore also
limits a rank without a GPU to one thread, and makes each rank write the time at which its first step ends.
"""

# Tests replace text of this file.
# fmt: off
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .networks import NETWORKS

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

NUM_FEATURES, NUM_TOKENS, WIDTH, NUM_CLASSES = 64, 64, 128, 10


@dataclass
class ModelConfig:
    work: str = "mlp"
    size: str = "full"


class TokenClassifier(nn.Module):
    """(B, length) int64 token ids -> (B, NUM_CLASSES): a transformer encoder without dropout, averaged over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(dim=1))
        return logits


def build_model(config: ModelConfig) -> nn.Module:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    _write_when_first_step_ends()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if config.work in NETWORKS:
            return NETWORKS[config.work](config.size)
        if config.work == "transformer":
            return TokenClassifier()
        return nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    outputs = model(inputs)
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten()), outputs


def build_metrics(config: ModelConfig) -> "MetricCollection":
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy

    return MetricCollection({"accuracy": MulticlassAccuracy(num_classes=NUM_CLASSES, average="micro")})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: tuple[Tensor, Tensor]) -> None:
    metrics.update(outputs, batch[1])


@cache
def _write_when_first_step_ends() -> None:
    """Write the time at which this process's first optimizer step ends to a file in the folder $BENCHMARK_OUTPUT.

    A step at learning rate 0 does not count: the generated trainer makes one beforehand to allocate the optimizer's
    memory. Further calls in the same process do nothing (`cache`).
    """
    path = Path(os.environ["BENCHMARK_OUTPUT"]) / f"first_step_{os.getpid()}"

    def write(optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
        if optimizer.param_groups[0]["lr"] == 0:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        path.write_text(repr(time.time()), encoding="utf-8")
        handle.remove()

    handle = register_optimizer_step_post_hook(write)

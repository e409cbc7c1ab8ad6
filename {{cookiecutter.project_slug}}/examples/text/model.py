"""Your model and its loss. In this example, small transformer encoders vote on the class of a sentence.

They are trained from scratch. If `model.pretrained` names a Hugging Face sequence classifier, it is fine-tuned instead.
Rewrite this file for your own model. The trainer uses `ModelConfig`, `build_model`, `compute_loss`, `build_metrics`
and `update_metrics`. `run.py predict` uses `predict`. You may add these optional functions: `loss_weight`,
`training_metrics`, `evaluate_batch`, `build_optimizer`, `learning_rate`, `on_epoch_begin`, `on_evaluation_end`,
`after_step` and `complete_config`. README.md explains them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dataset import PADDING, Batch, DataConfig, require_transformers

if TYPE_CHECKING:
    from torchmetrics import MetricCollection


@dataclass
class ModelConfig:
    """The keys under `model:` in config.yaml. If this class raises a ValueError, the user sees a one-line error."""

    pretrained: str | None = None
    """Name or folder of a Hugging Face sequence classifier. It ignores all keys below except for num_classes."""
    num_members: int = 3
    """Number of encoders. They are trained together and vote (Lakshminarayanan et al. 2017, arXiv:1612.01474).

    With a few thousand sentences, three encoders are about as accurate as one encoder with twice the data.
    """
    hidden_size: int = 64
    num_layers: int = 1
    num_heads: int = 4
    dropout: float = 0.4
    embedding_dropout: float = 0.5
    token_dropout: float = 0.4
    """Probability that a token, or a pair of tokens, is left out of a sentence in training."""
    num_classes: int = 0
    """0 means the number of data.label_names."""
    vocabulary_size: int = 0
    """0 means data.vocabulary_size."""
    max_length: int = 0
    """0 means data.max_length."""

    def __post_init__(self) -> None:
        for name in ("dropout", "embedding_dropout", "token_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be from 0 to below 1. Set 0.1, for example."
                )
        limits = {"num_members": (1, 100), "hidden_size": (1, 16_384), "num_layers": (1, 1000)}
        limits |= {
            "num_classes": (0, 100_000),
            "vocabulary_size": (0, 1_000_000),
            "max_length": (0, 100_000),
        }
        for name, (lowest, highest) in limits.items():
            if not lowest <= getattr(self, name) <= highest:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be from {lowest} to {highest}. Set one of these."
                )
        if self.num_heads < 1 or self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size}: must be a multiple of num_heads={self.num_heads}, which is at least "
                "1. Set hidden_size=64 and num_heads=4, for example."
            )
        require_transformers("pretrained", self.pretrained)


def complete_config(model: ModelConfig, data: DataConfig) -> None:
    """If num_classes, vocabulary_size or max_length is 0, take it from `data`. Set data.tokenizer if it is None."""
    data.tokenizer = data.tokenizer or model.pretrained
    model.num_classes = model.num_classes or len(data.label_names)
    model.vocabulary_size = model.vocabulary_size or data.vocabulary_size
    model.max_length = model.max_length or data.max_length
    for key in ("vocabulary_size", "max_length"):
        if getattr(model, key) < getattr(data, key):
            raise ValueError(
                f"model.{key}={getattr(model, key)}: less than data.{key}={getattr(data, key)}. "
                f"Leave model.{key} out of the config."
            )
    if model.num_classes != len(data.label_names):
        names = f"data.label_names has {len(data.label_names)} names"
        raise ValueError(
            f"model.num_classes={model.num_classes}: {names}. Leave model.num_classes out of the config."
        )


def build_model(config: ModelConfig) -> nn.Module:
    """Build the network, which maps (B, L, 2) ids and a (B, L) mask to (B, num_members, num_classes) logits."""
    return (
        Pretrained(config.pretrained, config.num_classes) if config.pretrained else Ensemble(config)
    )


class Ensemble(nn.Module):
    """Runs several encoders that began with different weights. Returns (B, num_members, num_classes) logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.members = nn.ModuleList(SentenceEncoder(config) for _ in range(config.num_members))

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([member(inputs, mask) for member in self.members], dim=1)


class SentenceEncoder(nn.Module):
    """A transformer encoder. It averages its outputs over the tokens, and returns (B, num_classes) logits.

    Its input is the sum of three embeddings: of the token, of its position, and of its pair with the token before it.
    In languages where a token is a single character, such pairs are often words.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.embedding = nn.Embedding(config.vocabulary_size, size, padding_idx=PADDING)
        self.positions = nn.Parameter(0.02 * torch.randn(config.max_length, size))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size,
                config.num_heads,
                2 * size,
                config.dropout,
                F.gelu,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(config.num_layers)
        )
        self.norm, self.output = nn.LayerNorm(size), nn.Linear(size, config.num_classes)
        self.dropout, self.embedding_dropout = (
            nn.Dropout(config.dropout),
            nn.Dropout(config.embedding_dropout),
        )
        self.token_dropout = config.token_dropout
        nn.init.normal_(self.embedding.weight, std=0.1)
        with torch.no_grad():
            self.embedding.weight[PADDING] = 0

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        if self.training:
            inputs = inputs.masked_fill(
                torch.rand(inputs.shape, device=inputs.device) < self.token_dropout, PADDING
            )
        hidden = self.embedding(inputs).sum(2)  # (B, L, 2, size) -> (B, L, size)
        hidden = self.embedding_dropout(hidden + self.positions[: hidden.shape[1]])
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~mask)
        # (B, L, 1): no mean over what is padded
        weights = mask.unsqueeze(2) / mask.sum(1)[:, None, None]
        logits: Tensor = self.output(self.dropout((self.norm(hidden) * weights).sum(1)))
        return logits


class Pretrained(nn.Module):
    """Wraps a Hugging Face model. Maps (B, L, 1) token ids and a (B, L) mask to (B, 1, num_classes) logits."""

    def __init__(self, name: str, num_classes: int) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=num_classes, ignore_mismatched_sizes=True
        )
        if self.model.config.pad_token_id is None:  # as the tokenizer does
            self.model.config.pad_token_id = self.model.config.eos_token_id

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=inputs.squeeze(2), attention_mask=mask.long()).logits
        return logits.unsqueeze(1)  # one member


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy over one micro-batch and all members, and the (B, num_classes) probabilities.

    Call `model(...)` exactly once, not one of its methods: DDP needs that call to average the gradients.
    """
    logits = model(batch.inputs, batch.mask)
    # (B, num_members): each learns by itself
    targets = batch.targets.unsqueeze(1).expand(-1, logits.shape[1])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), vote(logits)


def vote(logits: Tensor) -> Tensor:
    """Average the members' probabilities: (B, num_members, num_classes) logits -> (B, num_classes) probabilities."""
    return logits.float().softmax(2).mean(1)


def predict(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the columns that `run.py predict` writes, each (B,). The class ids in `label` become class names."""
    probabilities, labels = vote(model(batch.inputs, batch.mask)).max(1)
    return {"label": labels, "probability": probabilities}


def build_metrics(config: ModelConfig) -> "MetricCollection":
    """Build the metrics other than the loss. `evaluation.metric` names the one used to choose the best checkpoint.

    The confusion_matrix is written to reports/, and `run.py report` shows it with the scores of each class.
    """
    # here, since the import takes a second that training need not wait for
    from torchmetrics import (
        MetricCollection,
    )
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    accuracy = MulticlassAccuracy(config.num_classes, average="micro")
    return MetricCollection(
        {"accuracy": accuracy, "confusion_matrix": MulticlassConfusionMatrix(config.num_classes)}
    )


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    """Add one evaluated micro-batch of this rank to the metrics. The trainer combines the metrics of all ranks."""
    metrics.update(outputs, batch.targets)

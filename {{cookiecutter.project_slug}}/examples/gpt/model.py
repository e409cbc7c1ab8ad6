"""Your model and its loss. In this example, a small GPT (Radford et al. 2019) learns to continue a text.

Rewrite this file for your own model. The trainer uses `ModelConfig`, `build_model`, `compute_loss`, `build_metrics`
and `update_metrics`. `run.py predict` uses `predict`. README.md explains the optional functions.
"""

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from .dataset import Batch, DataConfig, decode, encode

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

# of a continuation; a lower temperature keeps to what is likely
NUM_NEW_TOKENS, TEMPERATURE = (
    200,
    0.8,
)
# NVIDIA's, dense bf16; add your GPU
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
}
logger = logging.getLogger(__name__)


class Speed:
    """Counts this rank's training tokens since the time `since`. If `since` is None, the next step sets it."""

    num_tokens: int = 0
    since: float | None = None


speed = Speed()


@dataclass
class ModelConfig:
    """The keys under `model:` in config.yaml. pydantic's Field defines which values are allowed."""

    num_layers: Annotated[int, Field(ge=1)] = 4
    num_heads: Annotated[int, Field(ge=1)] = 4
    hidden_size: Annotated[int, Field(ge=1)] = 128
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    vocabulary_size: Annotated[int, Field(ge=0)] = 0
    """0 means 256 for a text, where tokens are bytes, or 50304 for a .bin file: GPT-2's 50257, rounded up for speed."""
    block_size: Annotated[int, Field(ge=0)] = 0
    """0 means data.block_size."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size}: must be a multiple of num_heads={self.num_heads}."
            )


def complete_config(model: ModelConfig, data: DataConfig) -> None:
    """If vocabulary_size or block_size is 0, set it to fit `data`. This runs when the config is read."""
    model.vocabulary_size = model.vocabulary_size or (
        50304 if data.train_file.endswith(".bin") else 256
    )
    model.block_size = model.block_size or data.block_size


class Block(nn.Module):
    """A transformer block: causal attention and an MLP, each added to its input. (B, T, size) -> (B, T, size)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(size, bias=False), nn.LayerNorm(size, bias=False)
        self.attention, self.attention_output = (
            nn.Linear(size, 3 * size, bias=False),
            nn.Linear(size, size, bias=False),
        )
        self.mlp, self.mlp_output = (
            nn.Linear(size, 4 * size, bias=False),
            nn.Linear(4 * size, size, bias=False),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.attention(self.norm1(hidden)).unflatten(2, (3, self.num_heads, -1))
        # (B, T, 3, heads, size/heads) -> 3 of (B, heads, T, …)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        # (B, T, size)
        hidden = hidden + self.dropout(self.attention_output(mixed.transpose(1, 2).flatten(2)))
        return hidden + self.dropout(self.mlp_output(F.gelu(self.mlp(self.norm2(hidden)))))


class GPT(nn.Module):
    """Maps (B, T) token ids to (B, T, vocabulary_size) logits of the next token. T is at most block_size."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, self.block_size = config.hidden_size, config.block_size
        self.tokens, self.positions = (
            nn.Embedding(config.vocabulary_size, size),
            nn.Embedding(self.block_size, size),
        )
        self.dropout = nn.Dropout(config.dropout)
        # fsdp shards them one by one
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(size, bias=False)
        for name, weight in self.named_parameters():
            # weights that add to `hidden` begin smaller, the more layers there are
            if weight.ndim > 1:
                nn.init.normal_(
                    weight,
                    std=0.02 / math.sqrt(2 * config.num_layers) if "output" in name else 0.02,
                )
        # Forward, backward and attention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
        num_weights = (
            sum(weight.numel() for weight in self.parameters()) - self.positions.weight.numel()
        )
        self.flops_per_token = 6 * num_weights + 12 * config.num_layers * size * self.block_size

    def forward(self, inputs: Tensor) -> Tensor:
        # (B, T, size)
        hidden = self.dropout(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        # input and output share the embedding
        return F.linear(self.norm(hidden), self.tokens.weight)


def build_model(config: ModelConfig) -> nn.Module:
    return GPT(config)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy per token of one micro-batch, in nats, and the (B, T, vocabulary_size) logits."""
    # `model(...)` itself, and once: under DDP gradients are averaged through that call
    logits = model(batch.inputs)
    speed.num_tokens += batch.inputs.numel()
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()), logits


def build_metrics(config: ModelConfig) -> "MetricCollection":
    """Return no metrics. Evaluation reports only the loss, so update_metrics has nothing to do."""
    # here, since the import takes a second that training need not wait for
    from torchmetrics import (
        MetricCollection,
    )

    return MetricCollection({})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None: ...


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, lengths: Tensor) -> list[str]:
    """Return a continuation of each prompt. `tokens` holds padded prompts, (B, L), and `lengths` their lengths, (B,).

    Each prompt seeds its own random numbers, so other prompts and the number of ranks do not change its continuation.
    """
    size: Any = model.block_size
    generators, starts = (
        [torch.Generator().manual_seed(n) for n in tokens.sum(1).tolist()],
        lengths.tolist(),
    )
    rows, offsets = (torch.arange(number, device=tokens.device) for number in (len(tokens), size))
    tokens = F.pad(tokens, (0, NUM_NEW_TOKENS + size))
    for _ in range(NUM_NEW_TOKENS):
        # of the window that the model sees; padding is behind the last token
        first = (lengths - size).clamp(min=0)
        window = tokens.gather(1, first[:, None] + offsets)  # (B, size)
        logits = model(window)[rows, lengths - first - 1].float()  # (B, vocabulary_size)
        noise = torch.stack(
            [torch.empty(logits.shape[1]).exponential_(generator=g) for g in generators]
        )
        # The largest sum with noise of Gumbel's distribution is a draw from the softmax.
        tokens[rows, lengths] = (logits / TEMPERATURE - noise.to(logits.device).log()).argmax(1)
        lengths = lengths + 1
    return [
        decode(row[start : start + NUM_NEW_TOKENS].tolist())
        for row, start in zip(tokens, starts, strict=True)
    ]


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the column that `run.py predict` writes, under its name: a continuation of each prompt."""
    return {"continuation": generate(model, *batch)}


def on_evaluation_end(model: nn.Module, log: Any) -> None:
    """Generate a sample text, and write the text to runs/<name>/media/ and to the tracker."""
    prompt = torch.tensor([encode("\n")], device=next(model.parameters()).device)
    log.text("sample", generate(model, prompt, torch.ones_like(prompt[:, 0]))[0])
    speed.since = None


def after_step(model: Any, step: int, log: Any) -> None:
    """Every 50 steps, log tokens per second of a device and, on GPUs in PEAK_FLOPS, MFU (the share of peak FLOP/s)."""
    now = time.perf_counter()
    if speed.since is not None and step % 50 == 0:
        rate = speed.num_tokens / (now - speed.since)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        peak = next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
        mfu = "" if peak is None else f", MFU {rate * model.flops_per_token / peak:.1%}"
        logger.info("step %d: %.0f tokens/s on each device%s", step, rate, mfu)
    if speed.since is None or step % 50 == 0:
        speed.since, speed.num_tokens = now, 0

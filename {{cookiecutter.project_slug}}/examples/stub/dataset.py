"""YOURS: the data. Here, made-up samples of two inputs and one number to predict: the smallest thing to overwrite.

Replace what is marked REPLACE. The trainer uses `DataConfig` and `build_datasets`, and hands each batch to model.py.
A data set may have `sample_lengths` and `sample_weights`, one number a sample, and this file `collate` and
`read_inputs`, which `predict` needs: README.md says what they do.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

NUM_FEATURES = (8, 3)  # REPLACE: the widths of the two inputs


@dataclass
class DataConfig:
    """REPLACE. The keys of config.yaml under `data:`, each with its rule (pydantic's Field)."""

    num_samples: Annotated[int, Field(ge=2)] = 2000
    noise: Annotated[float, Field(ge=0)] = 0.1
    """Standard deviation of what no model can predict: the lowest loss is its square."""


class Batch(NamedTuple):
    """REPLACE. What model.py gets: any tuple or dict of tensors, the first dimension counting samples."""

    first: Tensor
    """(B, 8) float32."""
    second: Tensor
    """(B, 3) float32."""
    targets: Tensor
    """(B,) float32."""


class Samples(Dataset[Batch]):
    """REPLACE. Tensors in memory. A data set needs `__len__` and `__getitem__`; it may read files instead."""

    def __init__(self, samples: Batch) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples.targets)

    def __getitem__(self, index: int) -> Batch:
        return Batch(*(field[index] for field in self.samples))

    # Optional and fast: the whole batch by one index, where stacking single items would take longer than the training.
    # DELETE it if you read files (worker processes then do it) or augment at random: before each __getitem__, and only
    # there, the loader seeds torch, numpy and random from (seed, epoch, index).
    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return Batch(*(field[rows] for field in self.samples))


def build_datasets(config: DataConfig) -> tuple[Samples, Samples]:
    """REPLACE. The training and the validation set; return a third one to have a test set (evaluation.split=test)."""
    generator = torch.Generator().manual_seed(0)  # not the run's seed: runs with different seeds see the same data
    first, second = (torch.randn(config.num_samples, width, generator=generator) for width in NUM_FEATURES)
    noise = config.noise * torch.randn(config.num_samples, generator=generator)
    targets = first.mean(1) * second.sum(1) + noise
    num_validation = max(1, config.num_samples // 5)
    split = [field.tensor_split((num_validation,)) for field in (first, second, targets)]
    validation, train = (Samples(Batch(*fields)) for fields in zip(*split, strict=True))
    return train, validation

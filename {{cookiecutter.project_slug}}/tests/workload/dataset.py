"""Data for the tests: a regression on random numbers, which are the same in every run."""

# Tests replace text of this file.
# fmt: off
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass
class DataConfig:
    num_samples: int = 103
    num_validation: int = 37
    dtype: str = "float32"
    noise: float = 0.0
    """Standard deviation of the random numbers that are added to the inputs of training samples."""
    min_length: int = 1
    max_length: int = 1
    """Each sample has a random length from min_length to max_length, both included."""


class Batch(NamedTuple):
    inputs: Tensor
    """(B, 6)"""
    targets: Tensor
    """(B, 2)"""
    lengths: Tensor
    """(B,)"""


class Numbers(Dataset[Any]):
    def __init__(self, config: DataConfig, num_samples: int, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, config.dtype)
        self.inputs = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = torch.randn(num_samples, 2, generator=generator, dtype=torch.float64).to(dtype)
        high = config.max_length + 1
        self.lengths = torch.randint(config.min_length, high, (num_samples,), generator=generator).to(dtype)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        inputs = self.inputs[index]
        if self.noise:
            inputs = inputs + self.noise * torch.randn_like(inputs)
        return Batch(inputs, self.targets[index], self.lengths[index])


def build_datasets(config: DataConfig) -> tuple[Numbers, Numbers, Numbers]:
    return (
        Numbers(config, config.num_samples, 1, config.noise),
        Numbers(config, config.num_validation, 2, 0.0),
        Numbers(config, 11, 3, 0.0),
    )

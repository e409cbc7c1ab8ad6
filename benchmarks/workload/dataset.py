"""The data, made from a fixed seed and held in memory: this file is also dataset.py of the measured project."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass
class DataConfig:
    work: str = "mlp"
    num_samples: int = 16000


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """One sample at a time, as most data sets are written."""

    def __init__(self, work: str, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        if work == "transformer":
            self.inputs = torch.randint(0, 64, (num_samples, 32), generator=generator)
            self.targets = ((self.inputs < 32).sum(dim=1) - 11).clamp(0, 9)
        else:
            self.inputs = torch.randn(num_samples, 64, generator=generator)
            self.targets = (self.inputs @ torch.randn(64, 10, generator=generator)).argmax(dim=1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class BatchedSamples(Samples):
    """A whole batch in one call: DataLoader and the generated project use __getitems__ where there is one."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices)
        return self.inputs[rows], self.targets[rows]


def build_datasets(config: DataConfig) -> tuple[BatchedSamples, BatchedSamples]:
    """The training set, and a small validation set that is not used: no loop evaluates."""
    return BatchedSamples(config.work, config.num_samples), BatchedSamples(config.work, 100)

"""Random numbers with new noise at each read, so that a resumed run differs if one draws other numbers."""

# Tests replace text of this file.
# fmt: off
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass
class DataConfig:
    num_samples: int = 60


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, num_samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(num_samples, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index]
        return inputs + 0.1 * torch.randn(8), inputs.sum(0, keepdim=True)


def build_datasets(config: DataConfig) -> tuple[Numbers, Numbers]:
    return Numbers(config.num_samples, 1), Numbers(24, 2)

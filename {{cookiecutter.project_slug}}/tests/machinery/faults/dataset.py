"""Data for the tests: a regression on fixed random numbers, with faults that a test can switch on."""

# Tests replace text of this file.
# fmt: off
import errno
import os
import signal
import time
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
    """The standard deviation of the noise that is added to the inputs of training samples."""
    whole_batches: bool = False
    failing_index: int = -1
    """Reading the sample with this index raises an OSError. -1 means no sample, here and below."""
    nan_index: int = -1
    """The inputs of the training sample with this index hold a NaN."""
    odd_index: int = -1
    """The sample with this index has 5 inputs instead of 6."""
    num_missing: int = 0
    """The number of samples at the end that cannot be read, although the data set's length includes them."""
    kills_worker: bool = False
    """A loader worker that reads a sample is killed by SIGKILL, as the system does when memory runs out."""
    stuck_index: int = -1
    """Reading the sample with this index takes an hour."""
    min_length: int = 1
    """The smallest length that is drawn for a sample."""
    max_length: int = 1
    """The largest length that is drawn for a sample."""


class Batch(NamedTuple):
    inputs: Tensor
    """Shape (B, 6), for B samples."""
    targets: Tensor
    """Shape (B, 2)."""
    lengths: Tensor
    """Shape (B,)."""


class Numbers(Dataset[Any]):
    def __init__(self, config: DataConfig, num_samples: int, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, config.dtype)
        self.inputs = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = torch.randn(num_samples, 2, generator=generator, dtype=torch.float64).to(dtype)
        high = config.max_length + 1
        self.lengths = torch.randint(config.min_length, high, (num_samples,), generator=generator).to(dtype)
        if seed == 1 and config.nan_index >= 0:
            self.inputs[config.nan_index, 2] = torch.nan
        self.noise, self.failing_index, self.config = noise, config.failing_index, config

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        if index == self.failing_index:
            raise OSError(errno.EIO, f"cannot read the file of sample {index} in process {os.getpid()}")
        if index == self.config.stuck_index:
            time.sleep(3600)
        if self.config.kills_worker and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        if index >= len(self.inputs) - self.config.num_missing:
            raise IndexError(f"there is no sample {index} any more")
        inputs = self.inputs[index][: 5 if index == self.config.odd_index else 6]
        if self.noise:
            inputs = inputs + self.noise * torch.randn_like(inputs)
        return Batch(inputs, self.targets[index], self.lengths[index])


class WholeBatches(Numbers):
    def __getitems__(self, indices: list[int]) -> Batch:
        return Batch(self.inputs[indices], self.targets[indices], self.lengths[indices])


def build_datasets(config: DataConfig) -> tuple[Numbers, Numbers, Numbers]:
    kind = WholeBatches if config.whole_batches else Numbers
    return (
        kind(config, config.num_samples, 1, config.noise),
        kind(config, config.num_validation, 2, 0.0),
        kind(config, 11, 3, 0.0),
    )

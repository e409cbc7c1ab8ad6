"""Your data set. This short example makes up samples with two inputs and a number to predict.

Replace everything that is marked REPLACE. The trainer uses `DataConfig` and `build_datasets`, and passes each batch to
model.py. You may add the functions `collate` and `read_inputs` (for `run.py predict`), and give a data set the
attributes `sample_lengths` and `sample_weights`, with one number per sample (size=full).
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
    """REPLACE. The keys under `data:` in config.yaml. pydantic's Field defines which values are allowed."""

    num_samples: Annotated[int, Field(ge=2)] = 2000
    noise: Annotated[float, Field(ge=0)] = 0.1
    """Standard deviation of the noise in the targets. No model can predict noise, so the lowest loss is noise ** 2."""


class Batch(NamedTuple):
    """REPLACE. A batch for model.py. It may be any tuple or dict of tensors whose first dimension B counts samples."""

    first: Tensor
    """(B, 8) float32."""
    second: Tensor
    """(B, 3) float32."""
    targets: Tensor
    """(B,) float32."""


class Samples(Dataset[Batch]):
    """REPLACE. A data set of tensors in memory. Yours may read files. It needs `__len__` and `__getitem__`."""

    def __init__(self, samples: Batch) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples.targets)

    def __getitem__(self, index: int) -> Batch:
        return Batch(*(field[index] for field in self.samples))

    # Optional and fast: reads a whole batch by one index. Stacking single items would take longer than the training.
    # DELETE it if you read files (worker processes then read them) or augment at random: the loader seeds torch, numpy
    # and random from (seed, epoch, index) before each __getitem__, and only there.
    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return Batch(*(field[rows] for field in self.samples))


def build_datasets(config: DataConfig) -> tuple[Samples, Samples]:
    """REPLACE. Return the training set, the validation set and, if you want one, a test set (evaluation.split=test)."""
    # not the run's seed: runs with different seeds see the same data
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(config.num_samples, width, generator=generator) for width in NUM_FEATURES
    )
    noise = config.noise * torch.randn(config.num_samples, generator=generator)
    targets = first.mean(1) * second.sum(1) + noise
    num_validation = max(1, config.num_samples // 5)
    split = [field.tensor_split((num_validation,)) for field in (first, second, targets)]
    validation, train = (Samples(Batch(*fields)) for fields in zip(*split, strict=True))
    return train, validation

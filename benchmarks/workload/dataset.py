"""The benchmark's data, drawn from a fixed seed. The measured project uses this file as its dataset.py."""

# Tests replace text of this file.
# fmt: off
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from .networks import random_samples


@dataclass
class DataConfig:
    work: str = "mlp"
    num_samples: int = 16000
    data: str = "batches"
    """How samples are read: one of the kinds in make_dataset()."""
    images: str = ""
    """The folder of the PNG files, for `data: images`."""
    size: str = "full"


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Returns one sample at a time, as most data sets do."""

    def __init__(self, work: str, num_samples: int, size: str = "full") -> None:
        self.num_samples = num_samples
        generator = torch.Generator().manual_seed(1)
        if work == "transformer":
            self.inputs = torch.randint(0, 64, (num_samples, 32), generator=generator)
            self.targets = ((self.inputs < 32).sum(dim=1) - 11).clamp(0, 9)
        elif work != "mlp":
            self.inputs, self.targets = random_samples(work, size, num_samples, generator)
        else:
            self.inputs = torch.randn(num_samples, 64, generator=generator)
            self.targets = (self.inputs @ torch.randn(64, 10, generator=generator)).argmax(dim=1)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = index % len(self.inputs)  # of large samples, few are kept and come again
        return self.inputs[row], self.targets[row]


class BatchedSamples(Samples):
    """Returns a whole batch in one call. DataLoader and the generated project use __getitems__ if it exists."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices) % len(self.inputs)
        return self.inputs[rows], self.targets[rows]


class TorchDraws(Samples):
    """Draws from torch's generator for each sample, as an augmentation does, but leaves the sample unchanged."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return (inputs if torch.rand(()) < 2 else -inputs), target


class OtherDraws(Samples):
    """Draws from NumPy's and Python's generators for each sample, but leaves the sample unchanged."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return (inputs if numpy.random.rand() + random.random() < 3 else -inputs), target


class Images(Samples):
    """Reads each sample from a PNG file of 8 x 8 pixels."""

    def __init__(self, folder: str, num_samples: int) -> None:
        super().__init__("mlp", num_samples)
        self.paths = [f"{folder}/{index}.png" for index in range(num_samples)]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            pixels = numpy.asarray(image, dtype=numpy.float32)
        return torch.from_numpy(pixels).flatten() / 64 - 2, self.targets[index]

    def write(self) -> None:
        """Write a PNG file for each sample."""
        from PIL import Image

        for path, inputs in zip(self.paths, self.inputs, strict=True):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            pixels = ((inputs + 2) * 64).clamp(0, 255).byte().reshape(8, 8)
            Image.fromarray(pixels.numpy()).save(path)


def make_dataset(
    work: str, num_samples: int, data: str, images: str, size: str = "full", *, is_tuned: bool = False
) -> Dataset[Any]:
    """Return the data set of the kind `data`. If `is_tuned`, "tensors" and "tuples" return whole batches."""
    if data == "images":
        return Images(images, num_samples)
    kinds = {"tuples": Samples, "torch draws": TorchDraws, "other draws": OtherDraws}
    if data in ("torch draws", "other draws"):
        return kinds[data](work, num_samples)
    if is_tuned or data == "batches":
        return BatchedSamples(work, num_samples, size)
    samples = Samples(work, num_samples, size)
    return TensorDataset(samples.inputs, samples.targets) if data == "tensors" else samples


def build_datasets(config: DataConfig) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the training set and a small validation set, which is unused, since no loop evaluates."""
    training_set = make_dataset(config.work, config.num_samples, config.data, config.images, config.size)
    return training_set, BatchedSamples(config.work, 100, config.size)

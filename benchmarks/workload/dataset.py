"""The data, made from a fixed seed and held in memory: this file is also dataset.py of the measured project."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


@dataclass
class DataConfig:
    work: str = "mlp"
    num_samples: int = 16000
    data: str = "batches"
    """How samples are read, see make_dataset()."""
    images: str = ""
    """The folder of the PNGs, for `data: images`."""


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


class TorchDraws(Samples):
    """Each sample draws from torch's generator, as an augmentation does; what is drawn changes nothing."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return (inputs if torch.rand(()) < 2 else -inputs), target


class OtherDraws(Samples):
    """Each sample draws from NumPy's and Python's generators."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return (inputs if numpy.random.rand() + random.random() < 3 else -inputs), target


class Images(Samples):
    """Each sample is a PNG of 8 x 8 pixels, read from its file."""

    def __init__(self, folder: str, num_samples: int) -> None:
        super().__init__("mlp", num_samples)
        self.paths = [f"{folder}/{index}.png" for index in range(num_samples)]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            pixels = numpy.asarray(image, dtype=numpy.float32)
        return torch.from_numpy(pixels).flatten() / 64 - 2, self.targets[index]

    def write(self) -> None:
        """Write the files."""
        from PIL import Image

        for path, inputs in zip(self.paths, self.inputs, strict=True):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            pixels = ((inputs + 2) * 64).clamp(0, 255).byte().reshape(8, 8)
            Image.fromarray(pixels.numpy()).save(path)


def make_dataset(work: str, num_samples: int, data: str, images: str, *, is_tuned: bool = False) -> Dataset[Any]:
    """The samples, as `data` says. is_tuned: as whole batches, if they are in memory and nothing is drawn."""
    if data == "images":
        return Images(images, num_samples)
    kinds = {"tuples": Samples, "torch draws": TorchDraws, "other draws": OtherDraws}
    if data in ("torch draws", "other draws"):
        return kinds[data](work, num_samples)
    if is_tuned or data == "batches":
        return BatchedSamples(work, num_samples)
    samples = Samples(work, num_samples)
    return TensorDataset(samples.inputs, samples.targets) if data == "tensors" else samples


def build_datasets(config: DataConfig) -> tuple[Dataset[Any], Dataset[Any]]:
    """The training set, and a small validation set that is not used: no loop evaluates."""
    return make_dataset(config.work, config.num_samples, config.data, config.images), BatchedSamples(config.work, 100)

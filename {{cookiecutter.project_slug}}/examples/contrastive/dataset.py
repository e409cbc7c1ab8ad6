"""Your data set. In this example, a sample is a handwritten digit cut in two: its upper and its lower half.

The images come with scikit-learn. Rewrite this file for pairs of your own, such as images and their texts. The trainer
uses `DataConfig` and `build_datasets`, and passes each batch to model.py.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset


@dataclass
class DataConfig:
    """The keys under `data:` in config.yaml. Each key's pydantic Field says which values are allowed."""

    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    shift_probability: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Probability that a training image is shifted by up to one pixel in each direction, before it is cut."""


class Batch(NamedTuple):
    """A batch for model.py: row i of `upper` belongs to row i of `lower`."""

    upper: Tensor
    """(B, 4, 8) float32 in [0, 1]."""
    lower: Tensor
    """(B, 4, 8) float32 in [0, 1]."""


class Halves(Dataset[Batch]):
    """The two halves of 8x8 images."""

    def __init__(self, images: Tensor, shift_probability: float = 0.0) -> None:
        self.images, self.shift_probability = images.float().div(16), shift_probability

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        image = self.images[index]
        # The loader seeds torch from (seed, epoch, index) before each item.
        if torch.rand(()) < self.shift_probability:
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[down : down + 8, right : right + 8]
        return Batch(image[:4], image[4:])


def build_datasets(config: DataConfig) -> tuple[Halves, Halves]:
    """Return the training and the validation set."""
    # here, since the import takes a second
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images)
    # A seed of its own, not the run's: runs with different seeds are compared on the same images.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    num_validation = round(len(images) * config.validation_fraction)
    validation, train = order[:num_validation], order[num_validation:]
    return Halves(images[train], config.shift_probability), Halves(images[validation])

"""Your data set. This example uses the 1,797 handwritten digits that come with scikit-learn.

Rewrite this file for your own data. The trainer uses `DataConfig` and `build_datasets`, and passes each batch to
model.py. `run.py predict` uses `read_inputs`. A data set may define two attributes with one number per sample:
`sample_lengths`, to batch samples of similar lengths, and `sample_weights`, to draw some samples more often.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from .errors import ConfigError

NUM_CLASSES = 10  # targets are below it; a model that tells fewer classes apart is refused


@dataclass
class DataConfig:
    """The keys under `data:` in config.yaml. Each key's pydantic Field says which values are allowed."""

    validation_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    test_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    shift_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability that a training image is shifted by up to one pixel in each direction. 0 turns augmentation off."""


class Batch(NamedTuple):
    """A batch for model.py. A single sample of the data set has the same fields, without the first dimension B.

    You may use any tuple or dict of tensors instead. If your samples differ in size, define `collate(items)` here.
    """

    inputs: Tensor
    """(B, 1, 8, 8) float32 in [0, 1]."""
    targets: Tensor
    """(B,) int64, the digit that each image shows, from 0 to 9."""


class Digits(Dataset[Batch]):
    """A data set of 8x8 images. It divides values by 16 and shifts an image with probability `shift_probability`."""

    def __init__(self, images: Tensor, digits: Tensor, shift_probability: float = 0.0) -> None:
        self.images, self.digits, self.shift_probability = images.float().div(16), digits, shift_probability

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        image = self.images[index]  # (8, 8)
        # Plain random calls (torch, numpy or random) are right here: before each item the loader seeds them from
        # (seed, epoch, index), so a sample looks the same on any rank, in any worker and after a resume.
        if torch.rand(()) < self.shift_probability:
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[down : down + 8, right : right + 8]  # new pixels at the edges are 0
        return Batch(image.unsqueeze(0), self.digits[index])


def build_datasets(config: DataConfig) -> tuple[Digits, Digits, Digits]:
    """Split all images at random into training, validation and test sets. The split is the same in every run."""
    from sklearn.datasets import load_digits  # here, so that a command that reads no data skips this slow import

    bunch = load_digits()
    images, digits = torch.from_numpy(bunch.images), torch.from_numpy(bunch.target).long()

    # A seed of its own, not the run's: runs with different seeds are compared on the same images.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    sizes = [round(len(images) * part) for part in (config.validation_fraction, config.test_fraction)]
    validation, test, train = torch.split(order, [*sizes, len(images) - sum(sizes)])
    return (
        Digits(images[train], digits[train], config.shift_probability),
        Digits(images[validation], digits[validation]),
        Digits(images[test], digits[test]),
    )


def read_inputs(source: str, config: DataConfig) -> tuple[Digits, list[str]]:
    """Read the images for `run.py predict SOURCE`. Return a data set of them, and a name for each image.

    `source` is a .npy file with one image (8, 8) or several (N, 8, 8), with values from 0 to 16.
    """
    try:
        array = numpy.load(source)
        images = torch.from_numpy(array.reshape(-1, *array.shape[-2:]))
    except Exception as error:  # no such file, or no array: that fails anywhere in NumPy's reader
        raise ConfigError(f"predict {source}: {error}. Name a .npy file with an array (8, 8) or (N, 8, 8).") from None
    names = [f"{source}[{index}]" for index in range(len(images))]
    return Digits(images, torch.zeros(len(images), dtype=torch.long)), names

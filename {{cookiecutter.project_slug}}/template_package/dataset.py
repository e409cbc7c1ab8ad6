"""YOURS: the data. Here, the 1,797 handwritten digits that come with scikit-learn.

Put your own in by rewriting this file: the trainer uses `DataConfig` and `build_datasets`, and hands each batch to
model.py; `run.py predict` uses `read_inputs`. Optional attributes of a data set, one number a sample: `sample_lengths`
(like lengths share a batch) and `sample_weights` (an epoch draws samples in proportion to them).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from .errors import ConfigError

NUM_CLASSES = 10
"""Targets are below it; a model that tells fewer classes apart is refused."""


@dataclass
class DataConfig:
    """The keys of config.yaml under `data:`. What a rule here refuses is one line, before anything starts."""

    validation_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    test_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    shift_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Chance that a training image is moved by up to one pixel each way. 0 turns augmentation off."""


class Batch(NamedTuple):
    """A batch for model.py. One item has the same fields without the first dimension; items are stacked field by field.

    Any tuple or dict of tensors will do; define `collate(items)` in this file if your items differ in size.
    """

    inputs: Tensor
    """(B, 1, 8, 8) float32 in [0, 1]."""
    targets: Tensor
    """(B,) int64, the digit."""


class Digits(Dataset[Batch]):
    """Images in memory, moved at random when `shift_probability` is above 0."""

    def __init__(self, images: Tensor, digits: Tensor, shift_probability: float = 0.0) -> None:
        self.images, self.digits, self.shift_probability = images, digits, shift_probability

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        image = self.images[index]
        # Plain random calls (torch, numpy or random) are right here: before each item the loader seeds them from
        # (seed, epoch, index), so a sample looks the same on any rank, in any worker and after a resume.
        if torch.rand(()) < self.shift_probability:
            image = random_shift(image)
        return Batch(image, self.digits[index])


def build_datasets(config: DataConfig) -> tuple[Digits, Digits, Digits]:
    """The training, validation and test sets: disjoint, together all images, the same in every run (not stratified)."""
    from sklearn.datasets import load_digits  # here, so that only who reads the data pays for the import

    bunch = load_digits()
    images, digits = scale(bunch.images), torch.from_numpy(bunch.target).long()

    # A seed of its own, not the run's: runs with different seeds are compared on the same images.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    fractions = config.validation_fraction, config.test_fraction
    num_validation, num_test = (round(len(images) * part) for part in fractions)
    validation, test, train = order.tensor_split((num_validation, num_validation + num_test))
    return (
        Digits(images[train], digits[train], config.shift_probability),
        Digits(images[validation], digits[validation]),
        Digits(images[test], digits[test]),
    )


def read_inputs(source: str, config: DataConfig) -> tuple[Digits, list[str]]:
    """The images that `run.py predict SOURCE` looks at, and a name for each.

    source: a .npy file of one image, (8, 8), or of several, (N, 8, 8), with values from 0 to 16.
    """
    try:
        array = numpy.lib.format.open_memmap(source, mode="c")  # no pickles
        images = scale(array.reshape(-1, *array.shape[-2:]))
        if images.shape[2:] != (8, 8) or not len(images):
            raise ValueError(f"its shape is {array.shape}")
    except Exception as error:  # a file that is no array fails anywhere in NumPy's reader
        rule = f"must be a .npy file with an array (8, 8) or (N, 8, 8) ({error})"
        raise ConfigError(f"predict {source}: {rule}. Use numpy.save.") from None
    names = [f"{Path(source).name}[{index}]" for index in range(len(images))]
    return Digits(images, torch.zeros(len(images), dtype=torch.long)), names


def scale(images: "numpy.ndarray[Any, Any]") -> Tensor:
    """(N, 8, 8), 0 to 16 -> (N, 1, 8, 8) float32 in [0, 1]."""
    return torch.from_numpy(images).float().div(16).unsqueeze(1)


def random_shift(image: Tensor) -> Tensor:
    """The image (1, H, W) moved by -1, 0 or 1 pixel down and right; what comes in at the edges is 0."""
    height, width = image.shape[1:]
    top, left = torch.randint(0, 3, (2,)).tolist()
    return F.pad(image, (1, 1, 1, 1))[:, top : top + height, left : left + width]

"""Checks of the user's data sets: a length that is the same on all ranks, and one number a sample."""

import math
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..errors import ConfigError
from ..launching.distributed import broadcast_object, gather_objects


def numbers_of(dataset: Any, name: str) -> Tensor | None:
    """The data set's attribute of that name: one number a sample, as float64; or None."""
    if getattr(dataset, name, None) is None:
        return None
    numbers = torch.as_tensor(getattr(dataset, name), dtype=torch.float64, device="cpu")
    if numbers.shape != (len(dataset),):
        found = f"holds {numbers.numel()} numbers for {len(dataset)} samples. Give it one number per sample."
    elif numbers.min() < 0 or not 0 < numbers.sum() < math.inf:
        found = "holds a negative number, one that is not finite, or zeros only. Remove or replace it."
    else:
        return numbers
    raise ConfigError(f"{name} of {type(dataset).__name__} {found}")


def is_stream(dataset: Dataset[Any]) -> bool:
    """True for an IterableDataset that cannot be read by index."""
    has_index = isinstance(dataset, Sized) and type(dataset).__getitem__ is not Dataset.__getitem__
    return isinstance(dataset, IterableDataset) and not has_index


def check_dataset(dataset: Dataset[Any], name: str) -> int:
    """The number of samples, the same on every rank; ConfigError for what cannot be shared out. All ranks call it."""
    if is_stream(dataset) or not isinstance(dataset, Sized):
        rule = "a stream (an IterableDataset) can be trained on, not evaluated. Return a list of its first items, say"
        raise ConfigError(f"the {name} data set has no __len__ and __getitem__: {rule}.")
    lengths: list[int] = broadcast_object(gather_objects(len(dataset)))
    if min(lengths) != max(lengths):
        rule = "Every rank must see the same ones: is a folder still being filled, or a node's copy not whole?"
        raise ConfigError(f"the {name} data set differs between ranks: {lengths} samples. {rule}")
    if lengths[0] == 0:
        raise ConfigError(f"the {name} data set is empty: build_datasets() must return at least one sample.")
    return lengths[0]

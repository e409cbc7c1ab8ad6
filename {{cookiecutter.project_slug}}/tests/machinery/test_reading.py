"""Batches on their way to the device. What needs a GPU, the copy stream, runs in every training there."""

from __future__ import annotations

import os
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from template_package.config import LoaderConfig
from template_package.data.loader import move
from template_package.launching.distributed import RankContext
from template_package.training.evaluation import EvaluationLoader


class Encoding(UserDict[str, Any]):
    """A mapping whose items are attributes too, as a tokenizer returns it."""

    def __getattr__(self, name: str) -> Any:
        if name not in self.data:
            raise AttributeError(name)
        return self.data[name]


@dataclass
class Images:
    values: torch.Tensor
    name: str


@dataclass(frozen=True)
class FrozenImages:
    values: torch.Tensor


def test_batches_keep_their_types_on_their_way_to_the_device() -> None:
    ones, device = torch.ones(3, 2), torch.device("meta")
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch: dict[str, Any] = {
        "a": (ones, [ones, "name"]),
        "b": Encoding(ids=ones),
        "c": Images(ones, "name"),
        "d": packed,
        "e": None,
    }
    moved = move(batch, device)
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1] == "name"
    assert moved["b"].ids.is_meta and moved["c"].values.is_meta and moved["c"].name == "name" and moved["e"] is None
    assert moved["d"].data.is_meta and not moved["d"].batch_sizes.is_meta, "PackedSequence wants these on the CPU"
    assert ones.device.type == "cpu" and batch["b"]["ids"] is ones, "the data set's own tensors stay where they were"
    with pytest.raises(ValueError, match="frozen dataclass"):
        move(FrozenImages(ones), device)


class ProcessIds(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_workers_stay_from_one_evaluation_to_the_next() -> None:
    loader = EvaluationLoader(ProcessIds(), LoaderConfig(num_workers=1), RankContext(), "validation")
    seen = [{int(pid) for batch, _ in loader.read(4) for pid in batch} for _ in range(3)]
    assert seen[0] == seen[1] == seen[2] != {os.getpid()} and len(seen[0]) == 1
    next(loader.read(2))  # broken off, with batches that a worker has read ahead
    assert [request.indices for _, request in loader.read(4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]

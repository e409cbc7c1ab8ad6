"""Tests of moving batches to the device, and of the worker processes that read them."""

from __future__ import annotations

import gc
import os
import time
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from template_package.core.config import LoaderConfig
from template_package.core.data import move
from template_package.core.ranks import Rank
from template_package.core.task import find_task
from template_package.data import OrderedPlan, create_evaluation_loader

TASK = find_task()
WORKER = LoaderConfig(num_workers=1)


class Encoding(UserDict[str, Any]):
    """A mapping whose items are also attributes, like the result of a tokenizer."""

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
    assert (
        moved["b"].ids.is_meta
        and moved["c"].values.is_meta
        and moved["c"].name == "name"
        and moved["e"] is None
    )
    assert moved["d"].data.is_meta and not moved["d"].batch_sizes.is_meta, (
        "PackedSequence wants these on the CPU"
    )
    assert ones.device.type == "cpu" and batch["b"]["ids"] is ones, (
        "the data set's own tensors stay where they were"
    )
    with pytest.raises(ValueError, match="frozen dataclass"):
        move(FrozenImages(ones), device)


class ProcessIds(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class WholeBatches(ProcessIds):
    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def test_data_set_that_reads_whole_batches_needs_no_workers_even_for_a_gpu() -> None:
    # Hugging Face's: it decodes
    table = type("Dataset", (WholeBatches,), {"__module__": "datasets.arrow_dataset"})()
    subset = Subset(table, range(8))
    plans = [OrderedPlan(each, TASK, "training") for each in (WholeBatches(), table, subset)]
    assert [plan.max_workers for plan in plans] == [0, 8, 8]


def test_evaluation_begins_with_the_longest_samples() -> None:
    """The first batch is rehearsed before step 1. If a later batch were larger, memory would run out after training."""
    dataset = ProcessIds()
    dataset.sample_lengths = [3, 1, 9, 4, 1, 5, 9, 2]  # type: ignore[attr-defined]
    first = [
        create_evaluation_loader(dataset, TASK, LoaderConfig(), Rank(rank, 2), "x").read_trial(2)[0]
        for rank in range(2)
    ]
    assert [request.indices for _, request in first] == [[2, 5], [6, 3]]


def test_workers_stay_from_one_evaluation_to_the_next() -> None:
    loader = create_evaluation_loader(ProcessIds(), TASK, WORKER, Rank(), "validation")
    seen = [{int(pid) for batch, _ in loader.read(4) for pid in batch} for _ in range(3)]
    assert seen[0] == seen[1] == seen[2] != {os.getpid()} and len(seen[0]) == 1
    next(loader.read(2))  # broken off, with batches that a worker has read ahead
    assert [request.indices for _, request in loader.read(4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("is_trial", [False, True])
def test_workers_of_an_evaluation_end_with_its_loader(is_trial: bool) -> None:
    """If only a garbage collection ended them, each run with workers would wait for them for seconds at its end."""
    loader = create_evaluation_loader(ProcessIds(), TASK, WORKER, Rank(), "validation")
    micro_batches = loader.read_trial(4, is_cut=True) if is_trial else loader.read(4)
    pids = {int(pid) for batch, _ in micro_batches for pid in batch}
    gc.disable()
    try:
        started_at = time.monotonic()
        del loader
        seconds = time.monotonic() - started_at
        # torch would wait for 5
        assert seconds < 4.0 and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    finally:
        gc.enable()

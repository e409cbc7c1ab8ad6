"""Tests of the order of very long data sets, which is computed only for the indices that are read."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from template_package.core.config import LoaderConfig
from template_package.core.data import TrainLoader, epoch_order
from template_package.core.ranks import Rank
from template_package.core.task import find_task
from template_package.data import LONG, OrderedPlan, long_order


class Indices(Dataset[int]):
    """A data set in which sample i is the number i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


def first_step(num_samples: int, size: int, epoch: int = 0, position: int = 0) -> list[int]:
    plan = OrderedPlan(Indices(num_samples), find_task(), "training", 5, size)
    sizes: Any = {"global_batch_size": size, "micro_batch_size": size}
    loader = TrainLoader(plan, LoaderConfig(), Rank(), **sizes)
    loader.start(epoch, position)
    return [
        index for (_, request), _ in loader.next_step(nn.Identity()) for index in request.indices
    ]


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 16, 17, 1000, 4095, 4097, 99_999])
def test_long_order_holds_each_index_once_and_any_part_is_computed_alone(num_samples: int) -> None:
    for seed in (0, 1, 2**63 - 1):
        order = long_order(torch.arange(num_samples), num_samples, seed)
        assert torch.equal(order.sort().values, torch.arange(num_samples))
        middle = torch.arange(num_samples // 3, num_samples // 2)
        assert torch.equal(long_order(middle, num_samples, seed), order[middle])


def test_long_order_looks_like_chance() -> None:
    num_samples = 1_000_003
    indices = torch.arange(num_samples)
    first, second = (long_order(indices, num_samples, seed).double() for seed in (1, 2))
    for a, b in (
        (first, second),
        (first, indices.double()),
        (first[1:], first[:-1]),
        (first[1000:], first[:-1000]),
    ):
        # The correlation of independent numbers has a standard deviation of 0.001.
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.005
    chance = len(
        set(torch.randperm(num_samples, generator=torch.Generator().manual_seed(0)).diff().tolist())
    )
    assert len(set(first.diff().tolist())) == pytest.approx(chance, rel=0.01)
    orders = {tuple(long_order(torch.arange(4), 4, seed).tolist()) for seed in range(1000)}
    assert len(orders) == 24, "every order of four"


def test_ten_billion_samples_begin_at_once_in_little_memory() -> None:
    first_step(LONG, 64)  # imports
    former_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_at = time.perf_counter()
    steps = [
        first_step(10**10, 512),
        first_step(10**10, 512, epoch=1),
        first_step(10**10, 512, position=10**10 - 300),
    ]
    seconds = time.perf_counter() - started_at
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [len(set(step)) for step in steps] == [512, 512, 300]
    assert (
        all(0 <= index < 10**10 for step in steps for index in step) and max(steps[0]) > 9 * 10**9
    )
    assert seconds < 1.0 and peak - former_peak < 50 * 1024  # KiB


def test_orders_of_shorter_data_sets_stay_as_they_were() -> None:
    assert first_step(LONG - 1, 100) == epoch_order(LONG - 1, 5, 0)[:100].tolist()
    assert first_step(LONG, 100) != epoch_order(LONG, 5, 0)[:100].tolist()

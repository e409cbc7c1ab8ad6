"""Tests of shares and of reading: which samples each rank sees, and with which weight."""

import random
from itertools import chain
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from template_package.core.config import LoaderConfig
from template_package.core.data import (
    EvaluationLoader,
    Plan,
    TrainLoader,
    cut_share,
)
from template_package.core.random_states import seed_generators
from template_package.core.ranks import Rank
from template_package.core.task import Task

# The data set below is not that of dataset.py: nothing of its collate() or loss_weight() applies.
TASK = Task(*5 * [lambda *_: None])


class Drawing(Dataset[Any]):
    """Sample i is (i, a draw of each generator)."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[float, ...]:
        draws = torch.rand(()).item(), random.random(), numpy.random.rand()
        return (float(index), *draws)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_samples", [1, 4, 7, 64])
def test_shares_hold_each_sample_once_and_differ_by_one(num_samples: int, world_size: int) -> None:
    batch = torch.arange(100, 100 + num_samples)
    shares = [cut_share(batch, rank, world_size, 3) for rank in range(world_size)]
    assert torch.cat([*chain(*shares)]).tolist() == batch.tolist()
    sizes = [sum(map(len, share)) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes)
    assert len({len(share) for share in shares}) == 1, "ranks meet in the same collectives"
    assert max(map(len, chain(*shares))) <= 3


def read(world_size: int, micro_batch_size: int) -> list[Any]:
    """Return the samples of two epochs, step by step, and the sum of the weights of each step."""
    per_rank = []
    for rank in range(world_size):
        place = Rank(rank, world_size)
        loader = TrainLoader(
            Plan(Drawing(), TASK, "training", 1), LoaderConfig(0), place,
            global_batch_size=5, micro_batch_size=micro_batch_size,
        )  # fmt: skip
        loader.start(0, 0)
        model = torch.nn.Linear(1, 1)
        per_rank.append([[*loader.next_step(model)] for _ in range(2 * loader.steps_per_epoch)])
    steps = []
    for of_ranks in zip(*per_rank, strict=True):
        pieces = [piece for of_rank in of_ranks for piece in of_rank]
        rows = [
            row
            for (batch, request), _ in pieces
            for row in torch.stack([*batch], 1)[: request.num_samples].tolist()
        ]
        steps.append((sorted(rows), sum(float(weight) for _, weight in pieces)))
    return steps


def test_samples_and_their_draws_do_not_depend_on_ranks_or_micro_batches() -> None:
    expected = read(1, 5)
    seed_generators(7)  # what was drawn before does not matter
    assert len(expected) == 10
    for settings in ((1, 2), (2, 2), (3, 1), (2, 5)):
        steps = read(*settings)
        assert [rows for rows, _ in steps] == [rows for rows, _ in expected], settings
        # Each rank's weights add up to its part of world_size: DDP divides their sum by it.
        assert all(weight == pytest.approx(settings[0]) for _, weight in steps)


def test_evaluation_gives_each_sample_to_one_rank() -> None:
    seen = []
    for rank in range(3):
        loader = EvaluationLoader(Plan(Drawing(), TASK, "test"), LoaderConfig(0), Rank(rank, 3), 0)
        for batch, request in loader.read(4):
            seen += batch[0][: request.num_samples].tolist()
    assert sorted(seen) == [*range(23)]

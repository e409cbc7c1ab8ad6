"""Tests which rank gets which samples. A single process reads the samples of each rank in turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from template_package.core.config import LoaderConfig
from template_package.core.data import MicroBatch, epoch_order
from template_package.core.ranks import Rank
from template_package.core.task import find_task
from template_package.data import (
    OrderedPlan,
    TimedLoader,
    create_evaluation_loader,
    is_stream,
)
from template_package.errors import ConfigError

# yours may not suit the test data
TASK = replace(find_task(), collate=default_collate, loss_weight=None)


class Squares(Dataset[Any]):
    """Sample i is (i, a random number). The number must not depend on which rank or worker loads the sample."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(())


class Batches(Squares):
    epochs: list[int]

    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]

    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices)


def train_loader(
    dataset: Any = None, rank: int = 0, world_size: int = 1, workers: int = 0, size: int = 7, micro: Any = 3,
    task: Any = TASK,
) -> TimedLoader:  # fmt: skip
    plan = OrderedPlan(dataset or Squares(), task, "training", 5, size)
    place, config = Rank(rank=rank, world_size=world_size), LoaderConfig(workers)
    return TimedLoader(plan, config, place, global_batch_size=size, micro_batch_size=micro)


def steps(
    rank: int, world_size: int, *, num_steps: int, position: int = 0, **options: Any
) -> list[list[MicroBatch]]:
    """Return the micro-batches of a rank, as one list for each of `num_steps` steps.

    The first step begins `position` samples into epoch 0.
    """
    loader = train_loader(rank=rank, world_size=world_size, **options)
    loader.start(0, position)
    taken = [[micro for micro, _ in loader.next_step(nn.Identity())] for _ in range(num_steps)]
    loader.close()
    return taken


def evaluated(dataset: Any, rank: int, world_size: int, micro_batch_size: int) -> list[MicroBatch]:
    """Return the micro-batches that a rank evaluates."""
    loader = create_evaluation_loader(
        dataset, TASK, LoaderConfig(), Rank(rank, world_size), "validation"
    )
    return list(loader.read(micro_batch_size))


def indices_of(batches: list[MicroBatch]) -> list[int]:
    """Return the indices of the samples. Skip micro-batches with num_samples = 0: they are fillers and do not count."""
    return [index for _, request in batches if request.num_samples for index in request.indices]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
def test_each_sample_once_an_epoch_in_shares_that_differ_by_one(world_size: int) -> None:
    ranks = [steps(rank, world_size, num_steps=8) for rank in range(world_size)]
    for epoch in range(2):
        seen = []
        for step in range(4):  # 7, 7, 7, 2 samples
            shares = [rank[4 * epoch + step] for rank in ranks]
            sizes = [sum(request.num_samples for _, request in share) for share in shares]
            assert max(sizes) - min(sizes) <= 1 and sum(sizes) == (7, 7, 7, 2)[step]
            weight = sum(request.weight for share in shares for _, request in share)
            assert weight == pytest.approx(world_size)
            for share in shares:
                is_last = [request.is_last for _, request in share]
                assert is_last == [False] * (len(share) - 1) + [True]
                assert len(share) == -(-max(sizes) // 3)
                assert all(len(request.indices) <= 3 for _, request in share)
                seen += indices_of(share)
        assert sorted(seen) == list(range(23))
        assert seen[:7] != sorted(seen[:7])
    assert all(request.num_samples for step in ranks[0] for _, request in step), (
        "rank 0's BatchNorm counts"
    )


def test_order_changes_with_epoch_and_seed() -> None:
    orders = [epoch_order(23, seed, epoch).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_augmentation_depends_on_epoch_and_index_alone() -> None:
    def numbers(world_size: int, **options: Any) -> dict[tuple[int, int], float]:
        found = {}
        for rank in range(world_size):
            for number, step in enumerate(steps(rank, world_size, num_steps=8, **options)):
                for batch, _ in step:
                    for index, value in zip(*(field.tolist() for field in batch), strict=True):
                        found[number // 4, index] = value
        return found

    alone = numbers(1)
    assert len(alone) == 46 and len(set(alone.values())) == 46
    assert numbers(2, micro=2) == alone
    assert numbers(1, workers=2) == alone


def test_position_needs_no_replay() -> None:
    resumed = steps(0, 2, num_steps=2, position=14)
    full = steps(0, 2, num_steps=4)
    assert [[request for _, request in step] for step in resumed] == [
        [request for _, request in step] for step in full[2:]
    ]


def test_whole_batches_are_fetched_in_one_call() -> None:
    dataset = Batches()
    (first, second), *_ = steps(0, 1, num_steps=5, dataset=dataset, micro=4)
    assert first[0].tolist() == first[1].indices and (len(first[0]), len(second[0])) == (4, 3)
    assert dataset.epochs == [0, 1]
    subset = Subset(Batches(), list(range(23)))
    assert steps(0, 1, num_steps=1, dataset=subset, micro=7)[0][0][0].shape == (7,)
    # has __getitems__ too, which would leave the items unseeded
    plain = Subset(Squares(), list(range(23)))
    expected = steps(0, 1, num_steps=1)[0][0][0][1].tolist()
    assert steps(0, 1, num_steps=1, dataset=plain)[0][0][0][1].tolist() == expected


class Sized(Batches):
    """A data set whose samples have different lengths. Only a few samples are long."""

    def __init__(self, num_samples: int) -> None:
        self.sample_lengths = [
            1 + (7 * i % num_samples) ** 3 // num_samples**2 for i in range(num_samples)
        ]

    def __len__(self) -> int:
        return len(self.sample_lengths)


def padded(batches: list[list[int]], lengths: list[int]) -> float:
    """Return the total size of the batches after padding, divided by their total size before padding."""
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return padded / sum(lengths[i] for batch in batches for i in batch)


def global_batches(
    dataset: Any, world_size: int, num_steps: int, position: int = 0
) -> list[list[int]]:
    options: Any = {"num_steps": num_steps, "position": position, "dataset": dataset}
    ranks = [steps(rank, world_size, **options) for rank in range(world_size)]
    return [[i for rank in ranks for i in indices_of(rank[step])] for step in range(num_steps)]


def test_samples_of_like_length_share_a_batch_on_any_number_of_ranks_and_after_a_resume() -> None:
    dataset = Sized(702)  # 100 batches of 7 in two windows, and one of 2
    batches = global_batches(dataset, 1, 202)
    assert [len(batch) for batch in batches] == 2 * [*100 * [7], 2]
    for epoch in (batches[:101], batches[101:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(702))
    assert batches[:101] != batches[101:]
    assert global_batches(dataset, 3, 202) == batches
    assert global_batches(dataset, 2, 30, position=7 * 40) == batches[40:70]

    lengths = dataset.sample_lengths
    plain = epoch_order(702, 5, 0)[:700].view(100, 7).tolist()
    assert padded(plain, lengths) > 1.8 and padded(batches[:100], lengths) < 1.15
    longest = [max(lengths[i] for i in batch) for batch in batches[:100]]
    assert sorted(longest) != longest != sorted(longest, reverse=True)  # long ones come at any time


def test_one_batch_may_hold_all_samples_however_large_its_size() -> None:
    loader = train_loader(Sized(30), size=2**63 - 1, micro="auto")
    loader.start(0, 0)
    (((_, request), _),) = loader.next_step(nn.Identity())
    assert sorted(request.indices) == list(range(30))


def test_evaluation_puts_samples_of_like_length_together_and_of_each_some_on_every_rank() -> None:
    dataset, sums = Sized(702), []
    seen: list[int] = []
    for rank in range(3):
        batches = [request.indices for _, request in evaluated(dataset, rank, 3, 10)]
        assert padded(batches, dataset.sample_lengths) < 1.15
        seen += chain.from_iterable(batches)
        sums.append(sum(dataset.sample_lengths[i] for batch in batches for i in batch))
    assert sorted(seen) == list(range(702)) and max(sums) < 1.05 * min(sums)


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
def test_evaluation_sees_each_sample_once_in_as_many_batches_on_every_rank(world_size: int) -> None:
    ranks = [evaluated(Squares(), rank, world_size, 4) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(chain.from_iterable(map(indices_of, ranks))) == list(range(23))


def test_data_that_cannot_be_shared_out_are_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ConfigError, match="can be trained on, not evaluated"):
        evaluated(Endless(), 0, 1, 4)
    empty: Subset[Any] = Subset(Squares(), [])
    with pytest.raises(ConfigError, match="validation data set is empty"):
        evaluated(empty, 0, 1, 4)
    dataset = Sized(10)
    dataset.__class__ = type("Shorter", (Sized,), {"__len__": lambda _: 9})
    with pytest.raises(ConfigError, match="sample_lengths of Shorter has the shape"):
        train_loader(dataset)


def test_samples_of_a_micro_batch_that_cannot_be_read_are_named() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> tuple[int, Tensor]:
            raise OSError("no such file")

    first = epoch_order(23, 5, 0)[:4].tolist()
    with pytest.raises(RuntimeError) as caught:
        steps(0, 1, num_steps=1, dataset=Broken(), micro=4)
    place = f"raised OSError('no such file') while reading the samples {first} of Broken"
    assert str(caught.value).endswith(place)


def noisy(items: list[Any]) -> Any:
    return torch.tensor([index for index, _ in items]), torch.rand(())


def test_numbers_that_collate_draws_in_a_worker_depend_on_the_batch_alone() -> None:
    task = replace(TASK, collate=noisy)

    def drawn(rank: int, num_steps: int, workers: int, position: int = 0) -> list[float]:
        found = steps(rank, 2, num_steps=num_steps, position=position, workers=workers, task=task)
        return [float(batch[1]) for step in found for batch, _ in step]

    full, resumed = drawn(0, 5, workers=1), drawn(0, 3, workers=2, position=14)
    assert resumed == full[-len(resumed) :]
    assert len({*full, *drawn(1, 5, workers=1)}) == 2 * len(full), "each its own"


def test_first_read_is_the_largest_micro_batch_of_its_step() -> None:
    loader = train_loader(size=23, micro=12)
    loader.start(0, 0)
    sizes = [len(request.indices) for (_, request), _ in loader.next_step(nn.Identity())]
    assert sizes == [12, 11] and len(loader.read_first(0, 0)[1].indices) == 12


class Rare(Dataset[Tensor]):
    """A data set whose items each draw a random number from torch. Item 20 also draws from Python and NumPy."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        drawn = (
            [random.random(), numpy.random.rand(), random.gauss(0, 1)]
            if index == 20
            else [0.0, 0.0, 0.0]
        )
        return torch.tensor([float(index), torch.rand(()).item(), *drawn], dtype=torch.float64)


def test_rare_draw_from_any_generator_depends_on_epoch_and_index_alone() -> None:
    seen = set()
    for size, workers in ((8, 0), (7, 0), (40, 0), (1, 0), (8, 2)):
        random.seed(size)
        numpy.random.seed(size)
        loader = train_loader(Rare(), workers=workers, size=size, micro=size)
        loader.start(0, 0)
        rows = torch.cat(
            [
                batch
                for _ in range(-(-40 // size))
                for (batch, _), _ in loader.next_step(nn.Identity())
            ]
        )
        seen.add(tuple(rows[rows[:, 0].argsort()].flatten().tolist()))
        loader.close()
    assert len(seen) == 1 and next(iter(seen))[20 * 5 + 2] > 0


def test_what_a_model_draws_depends_on_the_micro_batch_alone() -> None:
    """Not on ranks and workers, nor on what reading or the micro-batches before have drawn."""

    def draws(world_size: int, **options: Any) -> dict[int, list[float]]:
        found = {}
        for rank in range(world_size):
            loader = train_loader(Rare(), rank, world_size, size=8, micro=2, **options)
            loader.start(0, 0)
            for _ in range(5):
                for (_, request), _ in loader.next_step(nn.Identity()):
                    numbers = random.gauss(0, 1), numpy.random.randn(), torch.rand(()).item()
                    found[request.draws[0]] = [*numbers]
            loader.close()
        return found

    alone = draws(1)
    assert len({number for numbers in alone.values() for number in numbers}) == 3 * 20
    assert draws(2) == draws(2, workers=2) == draws(4) == alone
    assert draws(2, task=replace(TASK, loss_weight=lambda *_: 1.0)) == alone


def test_tensors_are_read_at_once_through_a_subset_with_any_indices() -> None:
    whole = TensorDataset(torch.arange(80.0).view(20, 4), torch.arange(20))
    for indices in (torch.randperm(20), torch.randperm(20).tolist(), range(20)):
        subset = Subset(whole, indices)  # type: ignore[arg-type]
        ((batch, request),) = steps(0, 1, num_steps=1, dataset=subset, size=2, micro=2)[0]
        expected = default_collate([subset[index] for index in request.indices])
        assert all(torch.equal(*pair) for pair in zip(batch, expected, strict=True))
        assert len(batch) == 2


def test_data_set_with_whole_batches_alone_is_no_stream() -> None:
    class WholeBatches(Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(10))

        def __len__(self) -> int:
            return 10

    assert not is_stream(WholeBatches()) and is_stream(Stream()) and not is_stream([1, 2])

"""Who gets which samples, without processes: every rank's requests side by side."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset
from torch.utils.data._utils.pin_memory import pin_memory

from template_package.config import LoaderConfig
from template_package.launching.distributed import RankContext
from template_package.training.evaluation_loader import EvaluationLoader
from template_package.training.fetching import MicroBatch
from template_package.training.loader import TrainLoader, epoch_order
from template_package.validation import ConfigError


class Squares(Dataset[Any]):
    """Sample i is (i, a random number): whatever the loader does, the number belongs to (epoch, i)."""

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


def steps(
    rank: int,
    world_size: int,
    *,
    num_steps: int,
    position: int = 0,
    workers: int = 0,
    dataset: Any = None,
    micro: int = 3,
    collate: Any = None,
) -> list[list[MicroBatch]]:
    loader = TrainLoader(
        dataset or Squares(),
        LoaderConfig(num_workers=workers),
        RankContext(rank=rank, world_size=world_size),
        seed=5,
        global_batch_size=7,
        micro_batch_size=micro,
        collate=collate,
    )
    loader.start(0, position)
    taken = [list(loader.next_step()) for _ in range(num_steps)]
    loader.close()
    return taken


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
def test_each_sample_once_an_epoch_in_shares_that_differ_by_one(world_size: int) -> None:
    ranks = [steps(rank, world_size, num_steps=8) for rank in range(world_size)]
    for epoch in range(2):
        seen = []
        for step in range(4):  # 7, 7, 7, 2 samples
            shares = [rank[4 * epoch + step] for rank in ranks]
            sizes = [sum(micro.request.num_samples for micro in share) for share in shares]
            assert max(sizes) - min(sizes) <= 1 and sum(sizes) == (7, 7, 7, 2)[step]
            assert sum(micro.request.weight for share in shares for micro in share) == pytest.approx(world_size)
            for share in shares:
                assert [micro.request.is_last for micro in share] == [False] * (len(share) - 1) + [True]
                assert len(share) == -(-max(sizes) // 3) and all(len(micro.request.indices) <= 3 for micro in share)
                seen += [i for micro in share if micro.request.num_samples for i in micro.request.indices]
        assert sorted(seen) == list(range(23))
        assert seen[:7] != sorted(seen[:7])


def test_order_changes_with_epoch_and_seed() -> None:
    orders = [epoch_order(23, seed, epoch).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_augmentation_depends_on_epoch_and_index_alone() -> None:
    def numbers(world_size: int, **options: Any) -> dict[tuple[int, int], float]:
        found = {}
        for rank in range(world_size):
            for number, step in enumerate(steps(rank, world_size, num_steps=8, **options)):
                for micro in step:
                    for index, value in zip(*(field.tolist() for field in micro.batch), strict=True):
                        found[number // 4, index] = value
        return found

    alone = numbers(1)
    assert len(alone) == 46 and len(set(alone.values())) == 46
    assert numbers(2, micro=2) == alone
    assert numbers(1, workers=2) == alone


def test_reading_leaves_the_random_state_alone_and_position_needs_no_replay() -> None:
    before = torch.get_rng_state()
    resumed = steps(0, 2, num_steps=2, position=14)
    assert torch.equal(torch.get_rng_state(), before)
    full = steps(0, 2, num_steps=4)
    assert [[micro.request for micro in step] for step in resumed] == [[m.request for m in step] for step in full[2:]]


def test_whole_batches_are_fetched_in_one_call() -> None:
    dataset = Batches()
    (first, second), *_ = steps(0, 1, num_steps=5, dataset=dataset, micro=4)
    assert first.batch.tolist() == first.request.indices and (len(first.batch), len(second.batch)) == (3, 4)
    assert dataset.epochs == [0, 1]
    subset = Subset(Batches(), list(range(23)))
    assert steps(0, 1, num_steps=1, dataset=subset, micro=7)[0][0].batch.shape == (7,)
    plain = Subset(Squares(), list(range(23)))  # has __getitems__ too, which would leave the items unseeded
    assert (
        steps(0, 1, num_steps=1, dataset=plain)[0][0].batch[1].tolist()
        == steps(0, 1, num_steps=1)[0][0].batch[1].tolist()
    )


class Sized(Batches):
    """Samples of different lengths, few of which are long."""

    def __init__(self, num_samples: int) -> None:
        self.sample_lengths = [1 + (7 * i % num_samples) ** 3 // num_samples**2 for i in range(num_samples)]

    def __len__(self) -> int:
        return len(self.sample_lengths)


def padded(batches: list[list[int]], lengths: list[int]) -> float:
    """Places in the batches for each one that is filled."""
    places = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return places / sum(lengths[i] for batch in batches for i in batch)


def global_batches(dataset: Any, world_size: int, num_steps: int, position: int = 0) -> list[list[int]]:
    ranks = [
        steps(rank, world_size, num_steps=num_steps, position=position, dataset=dataset) for rank in range(world_size)
    ]
    return [
        [i for rank in ranks for micro in rank[step] if micro.request.num_samples for i in micro.request.indices]
        for step in range(num_steps)
    ]


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
    dataset = Sized(30)
    size: Any = {"global_batch_size": 2**63 - 1, "micro_batch_size": "auto"}
    loader = TrainLoader(dataset, LoaderConfig(num_workers=0), RankContext(), seed=5, **size)
    loader.start(0, 0)
    assert [sorted(micro.request.indices) for micro in loader.next_step()] == [list(range(30))]


def test_samples_of_a_step_are_those_it_was_given_whatever_its_number() -> None:
    options: Any = {"global_batch_size": 7, "micro_batch_size": 3}
    loader = TrainLoader(Squares(), LoaderConfig(num_workers=0), RankContext(rank=1, world_size=2), seed=5, **options)
    loader.start(1, 14, steps_done=100)  # 4 steps an epoch: after more of them than these 6
    given = [[i for micro in loader.next_step() for i in micro.request.indices] for _ in range(4)]
    assert [loader.indices_of_step(101 + place)[0] for place in range(4)] == given


def test_evaluation_puts_samples_of_like_length_together_and_of_each_some_on_every_rank() -> None:
    dataset, means = Sized(702), []
    seen: list[int] = []
    for rank in range(3):
        context = RankContext(rank=rank, world_size=3)
        loader = EvaluationLoader(dataset, LoaderConfig(), context, micro_batch_size=10, name="test")
        batches = [micro.request.indices for micro in loader]
        assert padded(batches, dataset.sample_lengths) < 1.15
        seen += chain.from_iterable(batches)
        means.append(sum(dataset.sample_lengths[i] for batch in batches for i in batch))
    assert sorted(seen) == list(range(702)) and max(means) < 1.05 * min(means)


def test_lengths_of_other_samples_are_refused() -> None:
    dataset = Sized(10)
    dataset.__class__ = type("Shorter", (Sized,), {"__len__": lambda _: 9})
    with pytest.raises(ConfigError, match="sample_lengths of Shorter holds 10 lengths of 9 samples"):
        steps(0, 1, num_steps=1, dataset=dataset)


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
def test_evaluation_sees_each_sample_once_in_as_many_batches_on_every_rank(world_size: int) -> None:
    ranks = [
        list(
            EvaluationLoader(
                Squares(),
                LoaderConfig(),
                RankContext(rank=rank, world_size=world_size),
                micro_batch_size=4,
                name="test",
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(i for batches in ranks for m in batches if m.request.num_samples for i in m.request.indices) == list(
        range(23)
    )


def test_what_cannot_be_shared_out_is_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ConfigError, match="IterableDataset is not supported"):
        steps(0, 1, num_steps=1, dataset=Endless())
    empty: Subset[Any] = Subset(Squares(), [])
    with pytest.raises(ConfigError, match="validation data set is empty"):
        EvaluationLoader(empty, LoaderConfig(), RankContext(), micro_batch_size=4, name="validation")


def test_item_that_cannot_be_read_is_named() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> tuple[int, Tensor]:
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file") as caught:
        steps(0, 1, num_steps=1, dataset=Broken())
    assert "while reading sample" in caught.value.__notes__[0]


def noisy(items: list[Any]) -> Any:
    return torch.tensor([index for index, _ in items]), torch.rand(())


@pytest.mark.parametrize("workers", [1, 2])
def test_what_collate_draws_in_a_worker_depends_on_the_batch_alone(workers: int) -> None:
    def drawn(rank: int, num_steps: int, position: int = 0) -> list[float]:
        found = steps(rank, 2, num_steps=num_steps, position=position, workers=workers, collate=noisy)
        return [float(micro.batch[1]) for step in found for micro in step]

    full = drawn(0, 5)
    assert drawn(0, 3, position=14) == full[-len(drawn(0, 3, position=14)) :], "as after a resume"
    assert len(set(full + drawn(1, 5))) == len(full) + len(drawn(1, 5)), "each its own"


def test_rehearsals_and_evaluations_draw_nothing_from_the_runs_generators() -> None:
    options: Any = {"global_batch_size": 7, "micro_batch_size": 3, "collate": noisy}
    loader = TrainLoader(Squares(), LoaderConfig(num_workers=0), RankContext(), seed=5, **options)
    evaluation = EvaluationLoader(
        Squares(), LoaderConfig(num_workers=0), RankContext(), micro_batch_size=9, name="validation", collate=noisy
    )
    before = torch.get_rng_state()
    loader.read_first(0, 0)
    whole = [micro.request.indices for micro in evaluation]
    evaluation.limit = 4
    parts = [micro.request for micro in evaluation]
    assert torch.equal(torch.get_rng_state(), before)
    assert max(len(part.indices) for part in parts) <= 4 and sum(part.is_last for part in parts) == len(whole)
    assert sorted(chain(*(part.indices for part in parts))) == list(range(23))


def test_first_read_is_the_largest_of_its_step_and_its_indices_are_not_searched_for_tensors() -> None:
    loader = TrainLoader(
        Squares(), LoaderConfig(num_workers=0), RankContext(), seed=5, global_batch_size=23, micro_batch_size=12
    )
    loader.start(0, 0)
    assert [len(micro.request.indices) for micro in loader.next_step()] == [11, 12]
    request = loader.read_first(0, 0).request
    assert len(request.indices) == 12
    assert pin_memory(MicroBatch(None, request)).request is request  # type: ignore[no-untyped-call]

"""Tests of cases from public reports that concern reading data: wrong results that nobody was told of."""

from __future__ import annotations

import pickle
import random
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from template_package.core.config import LoaderConfig
from template_package.core.data import Plan, Request, epoch_order
from template_package.core.random_states import generators_of, seed_generators
from template_package.core.ranks import Rank
from template_package.core.task import find_task, inner
from template_package.data import OrderedPlan, TimedLoader, numbers_of, weighted_order
from template_package.errors import ConfigError

from conftest import Project
from test_resuming import assert_equal

DOUBLE = (
    "model.dtype=float64",
    "data.dtype=float64",
    "schedule.name=constant",
    "training.epochs=2",
)
NUM_SAMPLES = 24
TASK = replace(find_task(), collate=default_collate, loss_weight=None)


class Slots:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __call__(self) -> float:
        return self.rng.random()


class OfClass:
    """As MONAI's transforms: all share one generator until somebody sets another."""

    R = numpy.random.RandomState(0)

    def __call__(self) -> float:
        return float(self.R.rand())


def closure() -> Any:
    generator = torch.Generator().manual_seed(3)
    return lambda: torch.rand((), generator=generator).item()


def drawn_from(rng: numpy.random.Generator) -> float:
    return float(rng.random())


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self) -> list[float]:
        drawn: list[Any] = [transform() for transform in self.transforms]
        return [x for each in drawn for x in (each if isinstance(each, list) else [each])]


class Augmented(Dataset[Any]):
    """Sample i is i, and the numbers that its transforms drew."""

    def __init__(self) -> None:
        nested = Compose(
            {"x": Compose(closure())}["x"], partial(drawn_from, numpy.random.default_rng(3))
        )
        self.rng = numpy.random.default_rng(0)
        self.late: Any = None
        self.transform = Compose(Slots(), OfClass(), nested, nested)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if self.late is None:  # made when first used, as many do in workers
            self.late = numpy.random.default_rng()
        return torch.tensor(
            [index, self.rng.random(), self.late.random(), *self.transform()], dtype=torch.float64
        )

    def __getattr__(self, name: str) -> Any:
        assert name in ("set_epoch", "__getitems__", "sample_lengths", "sample_weights"), name
        raise AttributeError(name)


def train_loader(
    dataset: Any, rank: int = 0, world_size: int = 1, workers: int = 0, size: int = 8
) -> TimedLoader:
    plan, context = OrderedPlan(dataset, TASK, "training", 5, size), Rank(rank, world_size)
    config = LoaderConfig(num_workers=workers)
    return TimedLoader(plan, config, context, global_batch_size=size, micro_batch_size=3)


def rows(
    dataset: Any, world_size: int = 1, workers: int = 0, position: int = 0
) -> list[list[float]]:
    """Return the samples of an epoch from `position` on, of all ranks, in the order of their first numbers."""
    found = []
    for rank in range(world_size):
        loader = train_loader(dataset, rank, world_size, workers)
        loader.start(0, position)
        for _ in range(-(-(len(dataset) - position) // 8)):
            found += [
                row for (batch, _), _ in loader.next_step(nn.Identity()) for row in batch.tolist()
            ]
        loader.close()
    return sorted(found)


def test_generators_that_a_data_set_owns_are_seeded_like_the_global_ones() -> None:
    """Row 05 of the public cases. Further forms: in slots, classes, closures, arguments, and made when first used."""
    alone = rows(Augmented())
    drawn = Counter(number for row in alone for number in row[1:])
    assert len(alone) == NUM_SAMPLES and len(drawn) == NUM_SAMPLES * 8 == drawn.total(), (
        "each draws its own numbers"
    )
    assert rows(Augmented(), world_size=2) == alone
    assert rows(Augmented(), workers=2) == alone
    rest = epoch_order(NUM_SAMPLES, 5, 0)[16:].tolist()
    assert rows(Augmented(), position=16) == [row for row in alone if int(row[0]) in rest]


def test_search_for_generators_leaves_out_the_global_ones_and_ends_early() -> None:
    """Row 05: those are seeded already. A long list must not be walked for minutes, and a circle not for ever."""
    holder: Any = types.SimpleNamespace(
        draw=random.shuffle, one=torch.default_generator, rand=numpy.random.rand
    )
    holder.itself, holder.samples = holder, [(f"{number}.png", number) for number in range(200_000)]
    holder.rng = random.Random(0)
    assert generators_of(holder) == [holder.rng]


GLOBAL_RNG = """
_rng = __import__("numpy").random.default_rng(0)


class Noisy(Numbers):
    def __getitem__(self, index: int) -> Batch:
        batch = super().__getitem__(index)
        return batch._replace(inputs=batch.inputs + 0.3 * _rng.standard_normal())


def build_datasets(config: DataConfig) -> Any:
    return tuple(Noisy(config, number, seed, 0.0) for seed, number in enumerate((103, 37, 11), start=1))
"""


def test_runs_whose_augmentation_has_its_own_generator_do_not_depend_on_ranks_workers_and_stops(
    project: Project,
) -> None:
    """Row 05: `rng = numpy.random.default_rng(0)` at the top of dataset.py."""
    project.append("dataset.py", GLOBAL_RNG)
    words = [*DOUBLE, "checkpoint.every_steps=5"]
    project.run_many({"one": ["device_ids=cpu", *words]})
    workers = ["device_ids=cpu,cpu", "loader.num_workers=2", *words]
    project.run_many({"two": ["device_ids=cpu,cpu", *words], "workers": workers})
    project.rewind("two", 10, "resumed")
    project.run_many({"resumed": ["device_ids=cpu,cpu", *words]})
    for split in ("train", "validation"):
        expected = [line["loss"] for line in project.lines("one", split)]
        for name in ("two", "workers"):
            losses = [line["loss"] for line in project.lines(name, split)]
            # float64, in another order of summation
            assert losses == pytest.approx(expected, rel=1e-10), name
        assert project.lines("resumed", split) == project.lines("two", split)


class FromNumpy(Augmented):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, numpy.random.rand()], dtype=torch.float64)


@pytest.fixture
def restored() -> Iterator[Any]:
    public: Any = numpy.random
    former = public.get_bit_generator()
    yield public
    public.set_bit_generator(former)


def test_another_bit_generator_of_numpy_is_seeded(restored: Any) -> None:
    """Generators are seeded by public calls alone, so those follow numpy.random.set_bit_generator()."""
    restored.set_bit_generator(numpy.random.MT19937(1))
    alone = rows(FromNumpy())
    assert (
        alone == rows(FromNumpy(), world_size=2)
        and len({number for _, number in alone}) == NUM_SAMPLES
    )


def test_bit_generator_that_seeding_does_not_reset_is_refused(restored: Any) -> None:
    restored.set_bit_generator(numpy.random.PCG64(1))
    with pytest.raises(ConfigError, match="PCG64 keeps half of a pair"):
        seed_generators(3)


class Mined(Dataset[Tensor]):
    """Its set_epoch() draws, as one does that mines negatives."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.drawn = [epoch, random.random(), numpy.random.rand(), torch.rand(()).item()]

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *self.drawn], dtype=torch.float64)


def test_what_set_epoch_draws_depends_on_the_epoch_alone() -> None:
    alone = rows(Mined())
    assert rows(Mined()) == rows(Mined(), world_size=2) == rows(Mined(), workers=2) == alone


def test_what_loss_weight_draws_depends_on_the_micro_batch_alone() -> None:
    task = replace(TASK, loss_weight=lambda *_: random.random())
    found = []
    for state in (1, 2):
        plan = OrderedPlan(TensorDataset(torch.arange(NUM_SAMPLES)), task, "training", 5, 8)
        loader = TimedLoader(plan, LoaderConfig(), Rank(), 8, 2)
        loader.start(0, 0)
        random.seed(state)
        found.append([float(weight) for _, weight in loader.next_step(nn.Identity())])
    assert found[0] == found[1] and len({*found[0]}) == 4


def test_dropout_of_the_same_micro_batches_is_the_same_on_any_number_of_ranks(
    project: Project,
) -> None:
    words = [*DOUBLE, "model.dropout=0.5", "training.drop_last=true", "training.micro_batch_size=4"]
    for name, devices in {"one": "cpu", "two": "cpu,cpu"}.items():
        project.run(f"device_ids={devices}", f"name={name}", *words)
    losses = [line["loss"] for line in project.lines("one")]
    assert [line["loss"] for line in project.lines("two")] == pytest.approx(losses, rel=1e-10)
    assert len({*losses}) == 12


def test_each_sample_is_read_once() -> None:
    """A data set with a side effect was read twice, once to find out whether it draws random numbers."""
    reads: Counter[int] = Counter()

    class Counted(Augmented):
        def __getitem__(self, index: int) -> Tensor:
            reads[index] += 1
            return torch.tensor([index, random.random()])

    rows(Counted())
    assert reads == dict.fromkeys(range(NUM_SAMPLES), 1)


class Weighted(Dataset[Any]):
    def __init__(self, start: int = 0) -> None:
        self.sample_weights = [index % 3 for index in range(start, start + NUM_SAMPLES)]
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.sample_weights[index])])

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Wrapper(Dataset[Any]):
    def __init__(self, *datasets: Any) -> None:
        self.parts, self.first = list(datasets), datasets[0]

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> Any:
        return self.first[index]


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_lengths_and_epochs_are_found_behind_subset_and_concatenation(
    world_size: int,
) -> None:
    """Row 20 of the public cases. Further forms: nested ones, ConcatDataset, set_epoch, a tensor of indices."""
    inside = Weighted(), Weighted(1)
    joined: Any = ConcatDataset(inside)
    nested = random_split(Subset(joined, torch.randperm(40)), [30, 10])[0]  # type: ignore[arg-type]
    weights = numbers_of(nested, "sample_weights")
    assert weights is not None and weights.tolist() == [float(nested[index]) for index in range(30)]
    assert min(min(row) for row in rows(nested, world_size)) > 0, "no sample of weight 0"
    assert all(part.epochs == [0] * world_size for part in inside)
    assert numbers_of(nested, "sample_lengths") is None and inner(nested)[-2:] == list(inside)
    nested.sample_weights = None  # type: ignore[attr-defined]
    assert numbers_of(nested, "sample_weights") is None


@pytest.mark.parametrize(
    "hide",
    [
        Wrapper,
        lambda one: Subset(Wrapper(one), range(3)),
        lambda one: ConcatDataset([one, TensorDataset(torch.ones(3))]),
    ],
    ids=["own", "own in Subset", "a part has none"],
)
@pytest.mark.parametrize("name", ["sample_weights", "sample_lengths"])
def test_weights_that_a_data_set_hides_are_refused(hide: Any, name: str) -> None:
    """Row 20: behind a wrapper of one's own they were not used, and nothing said so."""
    dataset = Weighted()
    dataset.sample_lengths, dataset.sample_weights = dataset.sample_weights, None  # type: ignore
    setattr(dataset, name, [1.0] * NUM_SAMPLES)
    if name == "sample_weights":
        dataset.sample_lengths = None  # type: ignore[attr-defined]
    hidden = hide(dataset)
    with pytest.raises(
        ConfigError, match=f"{name} of Weighted is out of reach .in .*build_datasets"
    ):
        numbers_of(hidden, name)
    setattr(hidden, name, None)
    assert numbers_of(hidden, name) is None


def test_two_data_sets_that_know_each_other_are_no_endless_circle() -> None:
    """Row 20: the search for wrapped data sets ends."""
    first: Any = Wrapper(TensorDataset(torch.ones(2)))
    first.other = Wrapper(first)
    assert numbers_of(first, "sample_weights") is None and len(inner(first)) == 2


BEHIND = """
_plain = build_datasets


def build_datasets(config: DataConfig) -> Any:
    train, validation, test = _plain(config)
    train.sample_weights = torch.arange(len(train)) % 3
    validation.label_names, train.sample_lenghts = ["left", "right"], None
    halves = torch.utils.data.random_split(train, [53, 50])
    return halves[0], torch.utils.data.Subset(validation, range(11)), test


def is_weighted(indices: list[int]) -> bool:
    return all(index % 3 for index in indices)
"""
RECORD = "        for (batch, request), weight in self.loader.next_step(strategy.module):\n"
ASSERT = """            from .dataset import is_weighted
            assert is_weighted([self.loader.plan.dataset.indices[index] for index in request.indices])
"""


def test_split_weights_count_on_one_and_two_ranks_and_names_are_found(project: Project) -> None:
    """Row 20: sample_weights before random_split. 44 of 76 reads were of samples with weight 0."""
    project.append("dataset.py", BEHIND)
    project.edit("trainer.py", RECORD, RECORD + ASSERT)
    outputs = [
        project.run(*DOUBLE, f"name={name}", f"device_ids={device_ids}")
        for name, device_ids in (("one", "cpu"), ("two", "cpu,cpu"))
    ]
    assert all(
        "does not use sample_lenghts. Did you mean sample_lengths?" in output for output in outputs
    )


def test_more_than_two_to_the_24_samples_are_drawn_in_proportion_to_their_weights() -> None:
    """Row 07 of the public cases: torch.multinomial takes no more."""
    number = 2**24 + 8
    weights = torch.zeros(number, dtype=torch.float64)
    weights[-6:] = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    drawn = weighted_order(weights, 5, 0) % number
    places, counts = torch.unique(drawn, return_counts=True)
    assert places.tolist() == [number - 5, number - 3, number - 2]
    # eight standard deviations
    assert (counts / number).tolist() == pytest.approx([0.25, 0.5, 0.25], abs=1e-3)


DROPPING = """
def collate(items: list[Batch]) -> Batch:
    return torch.utils.data.default_collate([item for item in items if item.lengths < 9])


_plain = build_datasets


def build_datasets(config: DataConfig) -> Any:
    train, *others = _plain(config)
    train.lengths[::10] = 9.0
    return train, *others
"""
COUNTED = """
def loss_weight(batch: Batch, module: nn.Module) -> Tensor:
    return torch.tensor(float(len(batch.inputs)))
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_that_leaves_samples_out_is_refused_or_counts_those_left(
    project: Project, workers: int
) -> None:
    """Row 09 of the public cases. Further form: bad by another sign than None."""
    project.append("dataset.py", DROPPING)
    words = [*DOUBLE, f"loader.num_workers={workers}"]
    output = project.run("device_ids=cpu,cpu", *words, code=2)
    assert (
        "entries from " in output
        and "let loss_weight() of model.py return" in output
        and "Traceback" not in output
    )
    project.append("model.py", COUNTED)
    for name in ("one", "two"):
        project.run(f"name={name}", f"device_ids={'cpu' if name == 'one' else 'cpu,cpu'}", *words)
    expected = [line["loss"] for line in project.lines("one")]
    assert [line["loss"] for line in project.lines("two")] == pytest.approx(expected, rel=1e-10)


def test_batches_that_hold_as_much_as_was_asked_for_are_taken() -> None:
    """Row 09: two views of each sample, pictures of different sizes in a list, padded and packed batches."""

    def check(batch: Any, num_samples: int, task: Any = TASK) -> None:
        plan = Plan([0] * num_samples, replace(task, collate=lambda _: batch), "training")
        indices = [*range(num_samples)]
        plan[Request(0, indices, indices, num_samples)]

    check({"views": torch.ones(6, 2)}, 3)
    check(([torch.ones(2), torch.ones(4), torch.ones(3)], torch.ones(())), 3)
    check(nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]), 2)
    check(types.SimpleNamespace(graph=1), 3)
    for left_out in (
        torch.ones(2, 3),
        {"x": (torch.ones(2), torch.ones(2))},
        (["a", "b"], numpy.ones(2)),
    ):
        with pytest.raises(ConfigError, match="a batch of 2 entries from 3 samples"):
            check(left_out, 3)
    check(torch.ones(1, 20), 3, task=replace(TASK, loss_weight=lambda batch, module: 7))


DRAWING = """
from pathlib import Path

_plain = build_datasets


def build_datasets(config: DataConfig) -> Any:
    cache = Path(__file__).parent / "cache"
    if not cache.exists():
        torch.randn(1000)
        cache.touch()
    return _plain(config)
"""
PROJECTION = """
_plain_model = build_model


def build_model(config: ModelConfig) -> nn.Module:
    model: Any = _plain_model(config)
    model.projection = [torch.randn(())]  # no buffer, so in no checkpoint
    print(f"projection {float(model.projection[0]):.6f}", flush=True)
    return model
"""


def test_initial_weights_do_not_depend_on_what_the_data_drew(project: Project) -> None:
    """Row 17 of the public cases. Further form: what the model holds beside its weights is alike on ranks, and in
    `evaluate` as it was in training.
    """
    project.append("dataset.py", DRAWING)
    project.append("model.py", PROJECTION)
    words = ("device_ids=cpu,cpu", "training.epochs=1", "checkpoint.every_steps=1")
    seen = set()
    for name in ("first", "second"):  # the second finds the cache
        project.run(*words, f"name={name}")
        for rank in (0, 1):
            log = (project.directory(name) / "logs" / f"rank_{rank}.log").read_text(
                encoding="utf-8"
            )
            seen |= {
                line.rpartition("projection ")[2]
                for line in log.splitlines()
                if "projection " in line
            }
    assert assert_equal(project.checkpoint("first", 1), project.checkpoint("second", 1)) > 6
    seen.add(project.run("evaluate", "name=first").partition("projection ")[2].splitlines()[0])
    assert len(seen) == 1, seen


FAULTY = """
class Faulty(Numbers):
    def __getitem__(self, index: int) -> Any:
        inputs, targets, lengths = super().__getitem__(index)
        return FAULT


def build_datasets(config: DataConfig) -> Any:
    return Faulty(config, 103, 1, 0.0), Numbers(config, 37, 2, 0.0), Numbers(config, 11, 3, 0.0)
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "(inputs, targets, None)",
            "found <class 'NoneType'> Mend the samples in dataset.py, or write collate",
        ),
        (
            "(inputs, targets, open)",
            "Mend the samples in dataset.py, or write collate(items) there",
        ),
        ("Batch(inputs.requires_grad_(), targets, lengths)", "in dataset.py"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_refused_in_one_line(
    project: Project, fault: str, told: str, workers: int
) -> None:
    """Row 14 of the public cases. Further form: a value that is neither a tensor nor a number."""
    project.append("dataset.py", FAULTY.replace("FAULT", fault))
    output = project.run("device_ids=cpu,cpu", f"loader.num_workers={workers}", code=2)
    (line,) = [line for line in output.splitlines() if "error: " in line]
    assert told in line and ("grad" in line) == ("grad" in fault) and "Traceback" not in output


def test_reader_can_be_sent_to_a_worker_that_is_spawned_as_on_a_mac() -> None:
    # no lambda can be sent: the worker finds it in dataset.py
    task = replace(TASK, collate=lambda items: items)
    plan = OrderedPlan(TensorDataset(torch.zeros(3)), task, "training")
    received = pickle.loads(pickle.dumps(plan))
    assert len(received.dataset) == 3 and received.task.collate is find_task().collate


def test_data_set_that_holds_arrays_under_the_name_dataset_is_read() -> None:
    """Arrays compare element by element, and a data set without an end would be iterated."""

    class Endless(Dataset[Any]):
        def __init__(self) -> None:
            self.dataset, self.datasets = numpy.zeros(3), [numpy.zeros(2), numpy.zeros(2)]

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

    assert len(inner(Endless())) == 3


def test_generators_are_found_behind_many_annotations() -> None:
    class Annotated(Dataset[Any]):
        def __init__(self) -> None:
            self.records = [
                {"id": i, "polygon": [float(x) for x in range(60)]} for i in range(1000)
            ]
            self.transform = [[numpy.random.default_rng(0)]]

    assert len(generators_of(Annotated())) == 1


@pytest.mark.parametrize("returned", ["train", "(train,)", "{'train': train}"])
def test_data_sets_that_are_not_two_or_three_are_refused(project: Any, returned: str) -> None:
    """One alone was unpacked into its first samples, and the loss failed on a number."""
    project.append(
        "dataset.py",
        f"""
_plain = build_datasets


def build_datasets(config: DataConfig) -> Any:
    train, *_ = _plain(config)
    return {returned}
""",
    )
    output = project.run("device_ids=cpu,cpu", code=2)
    assert "error: build_datasets in dataset.py: it must return two or three data sets" in output


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
@pytest.mark.parametrize(
    ("code", "is_told"),
    [
        ("numpy.random.default_rng().random()", True),
        ("os.getpid()", None),
        ("numpy.random.random() + OWN.random()", False),
    ],
)
def test_samples_that_are_others_when_read_again_are_told(
    project: Any, code: str, is_told: bool | None, devices: str
) -> None:
    """Splits drawn by a fresh default_rng() were others on each rank, and validated on what others trained on."""
    project.append(
        "dataset.py",
        f"""
import os

import numpy

OWN = numpy.random.default_rng()
_plain = build_datasets


class Drawing(torch.utils.data.Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index], torch.tensor({code})


def collate(items: list[Any]) -> Any:
    return torch.utils.data.default_collate([item for item, _ in items]), [x for _, x in items]


def build_datasets(config: DataConfig) -> Any:
    return tuple(Drawing(part) for part in _plain(config))
""",
    )
    project.append(
        "model.py",
        """
_plain = compute_loss


def compute_loss(model: Any, batch: Any) -> Any:
    return _plain(model, batch[0])


def update_metrics(metrics: Any, outputs: Tensor, batch: Any) -> None:
    metrics.update(outputs, batch[0].targets)
""",
    )
    output = project.run(f"device_ids={devices}", "training.max_steps=2")
    expected = devices != "cpu" if is_told is None else is_told
    assert ("warning: a training sample is another one when it is read again" in output) is expected


def test_collate_that_needs_several_samples_trains(project: Any) -> None:
    """The samples that are compared are not collated: two of them were too few."""
    project.append(
        "dataset.py",
        """
import random


def collate(items: list[Any]) -> Any:
    random.sample(items, 6)
    return torch.utils.data.default_collate(items)
""",
    )
    words = "training.global_batch_size=20", "evaluation.every_epochs=null"
    project.run("device_ids=cpu", *words, "training.max_steps=2", "data.num_samples=100")

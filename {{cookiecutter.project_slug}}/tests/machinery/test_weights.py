"""Tests of weights of samples, classes and losses: results do not depend on the number of ranks or on micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import config_of
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from template_package.core.config import LoaderConfig
from template_package.core.data import TrainLoader
from template_package.core.ranks import Rank
from template_package.core.task import find_task
from template_package.data import OrderedPlan, weighted_order
from template_package.errors import ConfigError
from template_package.strategies.data_parallel import DataParallelStrategy

from conftest import Project
from test_resuming import assert_equal

NUM_SAMPLES, GLOBAL_BATCH_SIZE = 2000, 16
TASK = replace(find_task(), collate=default_collate, loss_weight=None)
DOUBLE = ("model.dtype=float64", "data.dtype=float64", "schedule.name=constant")


class Weighted(Dataset[Any]):
    """A data set in which sample i is (i, a random number) and is drawn in proportion to `weights[i]`."""

    def __init__(self, weights: Any) -> None:
        self.sample_weights = weights

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(())


def seen(
    dataset: Weighted, world_size: int, epoch: int, position: int = 0
) -> list[list[tuple[int, float]]]:
    """Return (index, random number) of all ranks' samples for each step from `position` to the end of the epoch."""
    steps: list[list[tuple[int, float]]] = [
        [] for _ in range(-(-(NUM_SAMPLES - position) // GLOBAL_BATCH_SIZE))
    ]
    for rank in range(world_size):
        context = Rank(rank=rank, world_size=world_size)
        plan = OrderedPlan(dataset, TASK, "training", 3, GLOBAL_BATCH_SIZE)
        sizes: Any = {"global_batch_size": GLOBAL_BATCH_SIZE, "micro_batch_size": 3}
        loader = TrainLoader(plan, LoaderConfig(), context, **sizes)
        loader.start(epoch, position)
        for step in steps:
            for (batch, request), _ in loader.next_step(nn.Identity()):
                pairs = list(zip(*(field.tolist() for field in batch), strict=True))
                step.extend(pairs[: request.num_samples])
    return steps


@pytest.mark.parametrize("has_lengths", [False, True])
def test_samples_are_drawn_in_proportion_to_their_weights_alike_on_any_number_of_ranks(
    has_lengths: bool,
) -> None:
    dataset = Weighted([i % 4 for i in range(NUM_SAMPLES)])
    if has_lengths:
        dataset.sample_lengths = [1 + i % 50 for i in range(NUM_SAMPLES)]  # type: ignore[attr-defined]
    steps = seen(dataset, 1, epoch=1)
    drawn = [sample for step in steps for sample in step]
    assert len(drawn) == NUM_SAMPLES
    for remainder in range(4):
        number = sum(index % 4 == remainder for index, _ in drawn)
        # 100: five standard deviations
        assert number == pytest.approx(NUM_SAMPLES * remainder / 6, abs=100)
    assert len({index for index, _ in drawn}) < 1200 and len(set(drawn)) == NUM_SAMPLES, (
        "a repeated one looks different"
    )
    assert seen(dataset, 2, epoch=1) == seen(dataset, 3, epoch=1) == steps
    assert seen(dataset, 2, epoch=1, position=5 * GLOBAL_BATCH_SIZE) == steps[5:]
    assert seen(dataset, 1, epoch=0) != steps


def test_an_epoch_of_one_sample_is_that_sample_each_time() -> None:
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert weighted_order(weights, 3, 0).tolist() == [2, 6, 10, 14]


@pytest.mark.parametrize("weights", [[1.0] * 5, torch.ones(NUM_SAMPLES, 1)])
def test_weights_that_are_not_one_for_each_sample_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError, match="not one number per sample") as caught:
        seen(Weighted(weights), 1, 0)
    assert str(caught.value).startswith("sample_weights of Weighted has the shape (")


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 0.0])
def test_weights_that_are_no_probabilities_end_the_start(weight: float) -> None:
    """Row 14 of the public cases: one line in place of torch's traceback."""
    first, others = [weight], [0.0 if weight == 0.0 else 1.0] * (NUM_SAMPLES - 1)
    with pytest.raises(
        ConfigError,
        match="sample_weights of the training set: must be finite, from 0, and not all 0",
    ):
        seen(Weighted(first + others), 1, 0)


WEIGHTED_DATA = """
_build_plain_datasets = build_datasets


def build_datasets(config: DataConfig) -> Any:
    train, *others = _build_plain_datasets(config)
    train.sample_weights = torch.arange(len(train)) % 3
    train.sample_lengths = train.lengths.tolist()
    return train, *others
"""


def test_ranks_train_on_the_same_drawn_samples_and_go_on_with_them(project: Project) -> None:
    project.append("dataset.py", WEIGHTED_DATA)
    words = [
        *DOUBLE,
        "data.noise=0.1",
        "data.max_length=9",
        "training.epochs=2",
        "checkpoint.every_steps=5",
    ]
    for num_ranks in (1, 2, 3):
        project.run(
            *words, f"name=ranks-{num_ranks}", f"device_ids={','.join(['cpu'] * num_ranks)}"
        )
    losses = [line["loss"] for line in project.lines("ranks-1")]
    for name in ("ranks-2", "ranks-3"):
        assert [line["loss"] for line in project.lines(name)] == pytest.approx(losses, rel=1e-10)
    project.rewind("ranks-2", 10, "resumed")  # in the middle of the second epoch
    assert "resuming after step 10" in project.run(*words, "name=resumed", "device_ids=cpu,cpu")
    assert project.lines("resumed") == project.lines("ranks-2")
    assert assert_equal(project.checkpoint("resumed", 14), project.checkpoint("ranks-2", 14)) > 6


CLASS_WEIGHTS = """
class Classifier(nn.Sequential):
    def classes_of(self, batch: Batch) -> Tensor:
        return (batch.targets[:, 0] > 0.5).long()


def build_model(config: ModelConfig) -> nn.Module:
    model: Any = Classifier(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model.register_buffer("class_weights", torch.tensor([0.3, 2.0], dtype=torch.float64))
    model.dim = 8  # as DistributedDataParallel has one of its own
    return model


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    assert model.dim == 8 and len(model.class_weights) == 2
    logits = model(batch.inputs)
    return nn.functional.cross_entropy(logits, model.classes_of(batch), weight=model.class_weights), logits


def loss_weight(batch: Batch, module: nn.Module, unused: int = 0) -> Tensor:
    return module.class_weights[module.classes_of(batch)].sum()


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    metrics.update(outputs, batch.targets)
"""


def test_class_weights_on_the_module_give_the_mean_of_the_whole_batch(project: Project) -> None:
    project.append("model.py", CLASS_WEIGHTS)
    words = [*DOUBLE, "training.max_gradient_norm=0.5", "training.epochs=1"]
    small = ["training.micro_batch_size=3", "evaluation.micro_batch_size=2"]
    project.run_many(
        {"whole": ["device_ids=cpu", *words], "pieces": ["device_ids=cpu", *words, *small]}
    )
    ranks = {
        name: ["device_ids=cpu,cpu", f"strategy={name}", *words, *small] for name in ("ddp", "fsdp")
    }
    project.run_many(ranks)
    expected = project.checkpoint("whole", 7)["model"]
    for name in ("pieces", *ranks):
        for split, keys in (("train", ("loss", "gradient_norm")), ("validation", ("loss",))):
            for line, whole in zip(
                project.lines(name, split), project.lines("whole", split), strict=True
            ):
                assert [line[key] for key in keys] == pytest.approx(
                    [whole[key] for key in keys], rel=1e-10
                ), name
        for key, weight in project.checkpoint(name, 7)["model"].items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-8, atol=1e-8)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two devices of one kind")
def test_data_parallel_shows_what_is_on_the_module() -> None:
    class Module(nn.Linear):
        def twice(self) -> Any:
            return self.get_buffer("class_weights") * 2

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    devices = (
        tuple(torch.device(kind, index) for index in range(2))
        if kind == "cuda"
        else (torch.device("cpu"),) * 2
    )
    strategy = DataParallelStrategy(config_of(), Rank(devices=devices))
    module = Module(3, 2)
    module.register_buffer("class_weights", torch.ones(2))
    strategy.prepare(module, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    model: Any = strategy.model
    assert (
        model is not module
        and model.class_weights is module.class_weights
        and model.out_features == 2
    )
    assert (
        model.twice().tolist() == [2.0, 2.0]
        if kind == "cpu"
        else len(model(torch.ones(5, 3).cuda())) == 5
    )
    with pytest.raises(AttributeError, match="no_such_name"):
        model.no_such_name  # noqa: B018

"""Tests of dataset.py. Adapt them to your data, and add your own."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from template_package.dataset import (
    NUM_FEATURES,
    Batch,
    DataConfig,
    Samples,
    build_datasets,
)
from template_package.errors import ConfigError

from conftest import load_config

CONFIG_YAML = Path(__file__).parents[1] / "config.yaml"


def rows(dataset: Samples) -> list[list[float]]:
    return dataset.samples.first.tolist()


@pytest.mark.parametrize(("num_samples", "sizes"), [(2000, [1600, 400]), (7, [6, 1]), (2, [1, 1])])
def test_splits_are_disjoint_and_hold_every_sample(num_samples: int, sizes: list[int]) -> None:
    train, validation = build_datasets(DataConfig(num_samples=num_samples))
    assert [len(train), len(validation)] == sizes
    assert len({tuple(row) for row in rows(train) + rows(validation)}) == num_samples


def test_data_are_the_same_whatever_the_random_state() -> None:
    torch.manual_seed(1)
    first = [rows(dataset) for dataset in build_datasets(DataConfig())]
    torch.manual_seed(2)
    assert [rows(dataset) for dataset in build_datasets(DataConfig())] == first


def test_the_targets_follow_from_the_inputs_but_for_the_noise() -> None:
    for dataset in build_datasets(DataConfig(noise=0.1)):
        first, second, targets = dataset.samples
        noise = targets - first.mean(1) * second.sum(1)
        assert noise.std().item() == pytest.approx(0.1, rel=0.2)


def test_a_batch_fetched_at_once_equals_the_items_stacked() -> None:
    train, _ = build_datasets(DataConfig())
    at_once = train.__getitems__([5, 0, 7])
    stacked = default_collate([train[5], train[0], train[7]])
    assert type(at_once) is type(stacked) is Batch
    assert all(torch.equal(*fields) for fields in zip(at_once, stacked, strict=True))
    assert [tuple(field.shape) for field in at_once] == [
        (3, NUM_FEATURES[0]),
        (3, NUM_FEATURES[1]),
        (3,),
    ]


@pytest.mark.parametrize("wrong", ["num_samples=1", "noise=-1"])
def test_impossible_values_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.{wrong}: must be"):
        load_config(CONFIG_YAML, [f"data.{wrong}"])

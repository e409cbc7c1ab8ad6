"""Tests of dataset.py. Adapt them to your data, and add your own."""

from pathlib import Path

import pytest
import torch

from template_package.dataset import DataConfig, Halves, build_datasets
from template_package.errors import ConfigError

from conftest import load_config

CONFIG_YAML = Path(__file__).parents[1] / "config.yaml"


def rows(dataset: Halves) -> list[tuple[float, ...]]:
    return [tuple(row) for row in dataset.images.flatten(1).tolist()]


def test_splits_are_disjoint_and_hold_every_sample() -> None:
    train, validation = build_datasets(DataConfig())
    assert [len(train), len(validation)] == [1438, 359]
    assert len({*rows(train), *rows(validation)}) == 1797


def test_data_are_the_same_whatever_the_random_state() -> None:
    torch.manual_seed(1)
    first = [rows(dataset) for dataset in build_datasets(DataConfig())]
    torch.manual_seed(2)
    assert [rows(dataset) for dataset in build_datasets(DataConfig())] == first


def test_halves_are_those_of_one_image() -> None:
    _, validation = build_datasets(DataConfig())
    sample = validation[3]
    assert sample.upper.shape == sample.lower.shape == (4, 8)
    assert torch.equal(torch.cat(sample), validation.images[3])


def test_only_training_images_are_shifted() -> None:
    torch.manual_seed(0)
    train, validation = build_datasets(DataConfig(shift_probability=1.0))
    for dataset, is_shifted in ((train, True), (validation, False)):
        same = [torch.equal(torch.cat(dataset[i]), dataset.images[i]) for i in range(50)]
        assert all(same) != is_shifted


@pytest.mark.parametrize("wrong", ["validation_fraction=0", "shift_probability=2"])
def test_impossible_values_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.{wrong}: must be"):
        load_config(CONFIG_YAML, [f"data.{wrong}"])

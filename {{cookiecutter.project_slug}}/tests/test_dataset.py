"""Tests of dataset.py. Adapt them to your data, and add your own."""

from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import default_collate

from template_package.dataset import (
    NUM_CLASSES,
    Batch,
    DataConfig,
    Digits,
    build_datasets,
)
from template_package.errors import ConfigError

from conftest import load_config

CONFIG_YAML = Path(__file__).parents[1] / "config.yaml"


def fingerprints(dataset: Digits) -> list[tuple[bytes, int]]:
    return [
        (image.numpy().tobytes(), int(digit))
        for image, digit in zip(dataset.images, dataset.digits, strict=True)
    ]


def test_splits_are_disjoint_and_hold_every_sample() -> None:
    sets = [fingerprints(dataset) for dataset in build_datasets(DataConfig())]
    assert [len(samples) for samples in sets] == [1257, 270, 270]
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float() / 16
    everything = [
        (image.numpy().tobytes(), int(digit))
        for image, digit in zip(images, bunch.target, strict=True)
    ]
    # no two images are alike, so equal lists mean disjoint sets
    assert len(set(everything)) == 1797
    assert sorted(sets[0] + sets[1] + sets[2]) == sorted(everything)


def test_splits_are_the_same_whatever_the_random_state() -> None:
    torch.manual_seed(1)
    first = [fingerprints(dataset) for dataset in build_datasets(DataConfig())]
    torch.manual_seed(2)
    assert [fingerprints(dataset) for dataset in build_datasets(DataConfig())] == first


def test_every_set_holds_every_digit() -> None:
    assert all(
        set(dataset.digits.tolist()) == set(range(NUM_CLASSES))
        for dataset in build_datasets(DataConfig())
    )


def test_items_collate_to_the_batch_that_the_model_expects() -> None:
    for dataset in build_datasets(DataConfig()):
        batch = default_collate([dataset[index] for index in range(5)])
        assert isinstance(batch, Batch)
        assert (batch.inputs.shape, batch.inputs.dtype) == ((5, 1, 8, 8), torch.float32)
        assert (batch.targets.shape, batch.targets.dtype) == ((5,), torch.int64)
        assert batch.inputs.min() >= 0
        assert 0.5 < batch.inputs.max() <= 1


def test_training_items_depend_on_nothing_but_the_seed() -> None:
    train = build_datasets(DataConfig())[0]
    seen = set()
    for seed in range(100):
        images = []
        for _ in range(2):
            torch.manual_seed(seed)
            images.append(train[0].inputs.numpy().tobytes())
        assert images[0] == images[1]
        seen.add(images[0])
    assert len(seen) == 9  # three shifts down times three to the right


def test_only_training_items_are_augmented() -> None:
    train, validation, test = build_datasets(DataConfig(shift_probability=1.0))
    plain = build_datasets(DataConfig(shift_probability=0.0))[0]
    torch.manual_seed(0)
    assert any(not torch.equal(train[index].inputs[0], train.images[index]) for index in range(20))
    for dataset in (validation, test, plain):
        assert all(
            torch.equal(dataset[index].inputs[0], dataset.images[index])
            for index in range(len(dataset))
        )


def test_a_shift_moves_the_image_by_at_most_one_pixel() -> None:
    dot = torch.zeros(1, 8, 8)
    dot[0, 3, 5] = 1
    dataset = Digits(dot, torch.zeros(1, dtype=torch.long), shift_probability=1.0)
    torch.manual_seed(0)
    positions = {tuple(dataset[0].inputs.nonzero().squeeze().tolist()) for _ in range(200)}
    assert positions == {(0, row, column) for row in (2, 3, 4) for column in (4, 5, 6)}


@pytest.mark.parametrize(
    "wrong", ["validation_fraction=0", "test_fraction=0.8", "shift_probability=1.5"]
)
def test_impossible_values_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.{wrong}: must be"):
        load_config(CONFIG_YAML, [f"data.{wrong}"])

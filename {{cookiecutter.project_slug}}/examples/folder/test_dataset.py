"""Tests of dataset.py. Adapt them to your data, and add your own."""

from pathlib import Path

from template_package.dataset import (
    DataConfig,
    build_datasets,
    write_digits,
)


def test_splits_are_disjoint_and_a_missing_class_neither_moves_nor_renumbers_images(
    tmp_path: Path,
) -> None:
    write_digits(tmp_path / "digits")
    config = DataConfig(folder=str(tmp_path / "digits"), class_names=[*"0123456789"])
    train, validation = ({*images.samples} for images in build_datasets(config))
    assert len(train | validation) == len(train) + len(validation) == 1797
    (tmp_path / "digits" / "3").rename(tmp_path / "3")
    for before, after in zip((train, validation), build_datasets(config), strict=True):
        assert {*after.samples} == {sample for sample in before if sample[1] != 3} != before

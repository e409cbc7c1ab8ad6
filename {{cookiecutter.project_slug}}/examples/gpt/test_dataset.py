"""Tests of dataset.py. Adapt them to your data, and add your own."""

from pathlib import Path

import numpy
import pytest

from template_package.dataset import (
    DataConfig,
    build_datasets,
    collate,
    decode,
    read_inputs,
)
from template_package.errors import ConfigError


def test_targets_are_the_next_tokens_and_validation_asks_for_each_token_once(
    tmp_path: Path,
) -> None:
    numpy.arange(300, 400, dtype=numpy.uint16).tofile(tmp_path / "tokens.bin")
    numpy.arange(100, dtype=numpy.uint8).tofile(tmp_path / "text")
    for name, zero in (("tokens.bin", 300), ("text", 0)):
        config = DataConfig(str(tmp_path / name), validation_fraction=0.3, block_size=8)
        train, validation = (
            data.__getitems__([*range(len(data))]) for data in build_datasets(config)
        )
        assert (train.inputs - zero).tolist() == [[*range(first, first + 8)] for first in range(62)]
        assert train.targets.equal(train.inputs + 1)
        assert (validation.targets - zero).flatten().tolist() == [*range(71, 95)]


def test_prompts_are_the_lines_of_a_file_or_the_text_itself(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("To be\n\n鳥", encoding="utf-8")
    prompts, names = read_inputs(str(tmp_path / "prompts.txt"), DataConfig())
    assert names == ["To be", "", "鳥"] == [decode(prompt.tolist()).strip() for prompt in prompts]
    tokens, lengths = collate(prompts)
    assert (tokens.shape, lengths.tolist()) == ((3, 5), [5, 1, 3])
    assert read_inputs("no file" * 99, DataConfig())[1] == ["no file" * 99]
    with pytest.raises(ConfigError, match="cannot read"):
        build_datasets(DataConfig(str(tmp_path / "missing.txt")))

"""Tests of dataset.py. Adapt them to your data, and add your own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from template_package.dataset import (
    PADDING,
    UNKNOWN,
    Batch,
    DataConfig,
    Sentences,
    Vocabulary,
    build_datasets,
    names_file,
    read_inputs,
    read_splits,
    tokenize,
)
from template_package.errors import ConfigError

ROOT = Path(__file__).parents[1]


def make_config(folder: Path, num_rows: int = 50, **values: object) -> DataConfig:
    rows = [[f"sentence number {number} 第{number}", number % 2] for number in range(num_rows)]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    own: dict[str, Any] = {"train_file": str(folder / "rows.json"), "label_names": ["even", "odd"]}
    return DataConfig(**(own | values))


def test_splits_are_disjoint_and_hold_every_row_whatever_the_random_state(tmp_path: Path) -> None:
    torch.manual_seed(1)
    train, validation = read_splits(make_config(tmp_path))
    torch.manual_seed(2)
    assert read_splits(make_config(tmp_path)) == [train, validation]
    assert read_splits(make_config(tmp_path, split_seed=1)) != [train, validation]
    assert (len(train), len(validation), len({*train, *validation})) == (40, 10, 50)
    assert all(int(text.split()[2]) % 2 == label for text, label in train + validation)
    assert [
        len(rows) for rows in read_splits(make_config(tmp_path, max_rows=10, train_fraction=0.95))
    ] == [9, 1]


def test_files_of_their_own_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,even\nb,odd\n", encoding="utf-8")
    other = str(tmp_path / "other.csv")
    train, validation, test = read_splits(
        make_config(tmp_path, validation_file=other, test_file=other)
    )
    assert len(train) == 50 and validation == test == [("a", 0), ("b", 1)]
    assert len(build_datasets(make_config(tmp_path, test_file=other))) == 3


def test_tokens_are_characters_where_there_are_no_spaces_and_words_elsewhere() -> None:
    text = "Don't 吃了2碗 ラーメン!! 안녕 naïve_x 😀"
    assert tokenize(text) == [*"don ' t 吃 了 2 碗 ラ ー メ ン ! ! 안 녕 naïve _ x 😀".split()]
    assert tokenize(" \n") == []


def test_vocabulary_numbers_the_most_frequent_tokens_and_pairs() -> None:
    vocabulary = Vocabulary(["b a b", "a b c"], size=5, max_length=64)
    assert vocabulary.numbers == {"b": 2, "a": 3, "a b": 4}
    assert vocabulary("a b d").tolist() == [[3, PADDING], [2, 4], [UNKNOWN, PADDING]]
    assert vocabulary("").tolist() == [[UNKNOWN, PADDING]]
    assert len(Vocabulary(["a"], size=10, max_length=2)("a b c d")) == 2


def test_vocabulary_knows_the_training_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("unheard of,even\n", encoding="utf-8")
    _, validation = build_datasets(
        make_config(tmp_path, validation_file=str(tmp_path / "other.csv"))
    )
    assert validation.encoded[0].tolist() == [[UNKNOWN, PADDING], [UNKNOWN, PADDING]]


def test_another_vocabulary_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    first = build_datasets(config)
    assert config.fingerprint is not None
    assert [data.encoded[0].tolist() for data in build_datasets(config)] == [
        data.encoded[0].tolist() for data in first
    ]
    changed = make_config(tmp_path, num_rows=51, fingerprint=config.fingerprint)
    with pytest.raises(ConfigError, match="other words"):
        build_datasets(changed)


def test_a_batch_is_as_long_as_its_longest_sentence() -> None:
    vocabulary = Vocabulary(["a b c d"], size=100, max_length=3)
    data = Sentences([("a", 0), ("a b c d", 1), ("b c", 1)], vocabulary, DataConfig())
    assert data.sample_lengths.tolist() == [1, 3, 2]
    batch = data.__getitems__([2, 0])
    assert isinstance(batch, Batch) and batch.inputs.shape == (2, 2, 2)
    assert torch.equal(batch.inputs[0], vocabulary("b c")) and torch.equal(
        batch.inputs[1, :1], vocabulary("a")
    )
    assert batch.inputs[1, 1].tolist() == [PADDING, PADDING]
    assert batch.mask.tolist() == [[True, True], [True, False]]
    assert batch.targets.tolist() == [1, 0]


def test_inputs_to_predict_are_the_rows_of_a_file_or_a_sentence(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train = build_datasets(config)[0]
    (tmp_path / "new.txt").write_text("sentence number 3\n\n第4\n", encoding="utf-8")
    data, names = read_inputs(str(tmp_path / "new.txt"), config)
    assert names == ["sentence number 3", "第4"] and data.label_names == ["even", "odd"]
    alone, names = read_inputs("第4", config)
    assert names == ["第4"] and torch.equal(alone.encoded[0], data.encoded[1])
    row = read_splits(config)[0][0][0]
    assert torch.equal(read_inputs(row, config)[0].encoded[0], train.encoded[0])
    with pytest.raises(ConfigError, match="No such file"):
        read_inputs("missing.json", config)
    with pytest.raises(ConfigError, match="predict caf\udce9: is not UTF-8"):
        read_inputs("caf\udce9", config)


def test_a_sentence_is_no_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "笔记").write_text("a", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    for name in ("笔记", "数据.csv", "my rows.jsonl", "rows.xlsx", "data/rows.JSON", "./a.parquet"):
        assert names_file(name), name
    for sentence in (
        "价格是3.5元",
        "这个App版本是3.0",
        "再来一次...好吗",
        "今日は晴れ。明日は雨.たぶん",
        "请访问example.com",
        "wait...",
        "it costs 3.50",
        "I am Dr.Who now",
        "v2.0",
        "docs",
        "很长" * 300,
        "a\0b",
        "",
    ):
        assert not names_file(sentence), sentence


def test_the_sentences_that_come_along_are_balanced_and_each_there_once() -> None:
    rows = json.loads((ROOT / "sentences.json").read_text(encoding="utf-8"))
    assert len({text for text, _ in rows}) == len(rows) == 600
    assert {
        name: sum(label == name for _, label in rows) for name in DataConfig().label_names
    } == dict.fromkeys(DataConfig().label_names, 150)


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_fraction": 0.0},
        {"train_fraction": 1.0},
        {"max_rows": 1},
        {"max_length": 0},
        {"max_length": 2**63 - 1},
        {"vocabulary_size": 2**63 - 1},
        {"vocabulary_size": 1},
        {"label_names": ["one"]},
        {"label_names": ["a", "a"]},
    ],
)
def test_impossible_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DataConfig(**wrong)  # type: ignore[arg-type]

"""Your data set. This example uses labelled sentences from a JSON, JSON lines, CSV or TSV file.

To use your own sentences, set `data.train_file` in config.yaml. For other data, rewrite this file. The trainer uses
`DataConfig` and `build_datasets`, and passes each batch to model.py. `run.py predict` uses `read_inputs`. To split
Chinese or Japanese sentences into words instead of characters, change `tokenize`.
"""

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .errors import ConfigError, one_line
from .text_files import READERS, read_rows, read_texts

PADDING, UNKNOWN, FIRST = 0, 1, 2
"""Ids of padding, of any token that is not in the vocabulary, and of the most frequent entry of the vocabulary."""


@dataclass
class DataConfig:
    """The keys under `data:` in config.yaml. If this class raises a ValueError, the user sees a one-line error."""

    train_file: str = field(default="sentences.json", metadata={"decisive": False})
    """A file of texts and labels. Relative paths start in the folder of run.py. A resumed run may use a new path."""
    validation_file: str | None = field(default=None, metadata={"decisive": False})
    """If None, the rows of train_file that are not used for training are used for validation."""
    test_file: str | None = field(default=None, metadata={"decisive": False})
    train_fraction: float = 0.8
    split_seed: int = 0
    """Seed for shuffling train_file before the split. The run's `seed` does not change the split."""
    max_rows: int | None = None
    """If set, only this many rows are read from the start of each file. None means all rows."""
    label_names: list[str] = field(default_factory=lambda: ["weather", "food", "travel", "money"])
    """Names of the classes. Class ids count from 0 in this order. A label in a file is a name or an id."""
    max_length: int = 64
    """Maximum number of tokens in a sentence. The rest of a longer sentence is cut off."""
    vocabulary_size: int = 8000
    """Number of ids. The most frequent tokens and pairs of neighbouring tokens in the training rows get an id each."""
    tokenizer: str | None = None
    """Name or folder of a Hugging Face tokenizer, which replaces `tokenize`. Defaults to `model.pretrained`, if set."""
    fingerprint: str | None = None
    """Hash of the vocabulary. A run and its checkpoint must have the same hash. Do not set it: build_encoder does."""

    def __post_init__(self) -> None:
        if not 0 < self.train_fraction < 1:
            raise ValueError(
                f"train_fraction={self.train_fraction}: must be between 0 and 1. Set 0.8, for example."
            )
        limits = {
            "max_rows": (2, 2**63 - 1),
            "max_length": (1, 100_000),
            "vocabulary_size": (10, 1_000_000),
        }
        for key, (lowest, highest) in limits.items():
            value = getattr(self, key)
            if value is not None and not lowest <= value <= highest:
                raise ValueError(
                    f"{key}={value}: must be from {lowest} to {highest}. Set one of these."
                )
        if len(set(self.label_names)) < max(2, len(self.label_names)):
            raise ValueError(
                f"label_names={','.join(self.label_names)}: must be two or more different names."
            )
        require_transformers("tokenizer", self.tokenizer)


def require_transformers(key: str, name: str | None) -> None:
    """Raise ValueError if the config key `key` names a model or tokenizer, but transformers is not installed."""
    if name is not None and find_spec("transformers") is None:
        command = "pip install -c constraints.txt -e '.[transformers]'"
        raise ValueError(f"{key}={name}: transformers is not installed. Run {command}")


def tokenize(text: str) -> list[str]:
    """Split text into lower-case tokens. Chinese, Japanese and Korean are split into characters, the rest into words.

    A punctuation mark is a token, too. To split Chinese into words, write `return jieba.lcut(text)` (pip install
    jieba). To split Japanese into words, write `return MeCab.Tagger("-Owakati").parse(text).split()` (pip install
    mecab-python3 unidic-lite).
    """
    return re.findall(rf"[{CJK}]|[^\W_{CJK}]+|[^\w\s]|_", text.lower())


CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"  # kana, ideographs, hangul


class Batch(NamedTuple):
    """A batch for model.py. Shorter sentences are padded to the length L of the longest sentence."""

    inputs: Tensor
    """(B, L, 2) int64: the ids of each token and of its pair with the token before. (B, L, 1) with a data.tokenizer."""
    mask: Tensor
    """(B, L) bool: True for tokens and False for padding."""
    targets: Tensor
    """(B,) int64 class ids: indices into label_names."""


class Sentences(Dataset[Batch]):
    """A data set of sentences in memory.

    The loader uses `sample_lengths` to batch sentences of similar length. Reports and predictions show `label_names`.
    """

    def __init__(
        self,
        rows: list[tuple[str, int]],
        encode: "Vocabulary | PretrainedTokenizer",
        config: DataConfig,
    ) -> None:
        self.encoded = [encode(text) for text, _ in rows]
        self.targets = torch.tensor([label for _, label in rows])
        self.sample_lengths = torch.tensor([len(sentence) for sentence in self.encoded])
        self.label_names, self.padding = config.label_names, encode.padding

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a whole batch. This is faster than stacking single samples."""
        rows = torch.tensor(indices)
        inputs = pad_sequence(
            [self.encoded[i] for i in indices], batch_first=True, padding_value=self.padding
        )
        # (L,) < (B, 1) -> (B, L)
        mask = torch.arange(inputs.shape[1]) < self.sample_lengths[rows].unsqueeze(1)
        return Batch(inputs, mask, self.targets[rows])


def build_datasets(config: DataConfig) -> tuple[Sentences, ...]:
    """Return the training, validation and, if there is a test file, test sets. The sets are the same in every run."""
    splits = read_splits(config)
    encode = build_encoder(config, [text for text, _ in splits[0]])
    return tuple(Sentences(rows, encode, config) for rows in splits)


def read_inputs(source: str, config: DataConfig) -> tuple[Sentences, list[str]]:
    """Read the sentences for `run.py predict SOURCE`. Return a data set of them, and the text of each sentence.

    `source` is a file or a sentence. The targets are all 0 and are not used.
    """
    texts = read_texts(Path(source)) if names_file(source) else [source]
    # what Python makes of other bytes in an argument
    if any("\ud800" <= char <= "\udfff" for char in texts[0]):
        raise ConfigError(
            f"predict {one_line(source)}: is not UTF-8. Type it in a terminal that is set to UTF-8."
        )
    encode = build_encoder(
        config, [] if config.tokenizer else [text for text, _ in read_splits(config)[0]]
    )
    return Sentences([(text, 0) for text in texts], encode, config), texts


def names_file(source: str) -> bool:
    """Return True if `source` is a file or looks like a file's name. If there is no such file, read_texts() says so."""
    # The name of a missing file beyond ASCII must end as in READERS: 价格是3.5元 and 再来一次...好吗 are sentences.
    # Path.exists() raises for a name that is too long
    is_there = os.path.exists(source) and not os.path.isdir(source)
    return (
        is_there
        or Path(source).suffix in READERS
        or re.fullmatch(r"[!-~]+\.[A-Za-z]{2,8}", source) is not None
    )


def read_splits(config: DataConfig) -> list[list[tuple[str, int]]]:
    """Return lists of (text, class id) rows for training, for validation and, if there is a test file, for testing."""
    names = [
        name
        for name in (config.train_file, config.validation_file, config.test_file)
        if name is not None
    ]
    root = Path(__file__).parents[1]
    splits = [read_rows(root / name, config.label_names, config.max_rows) for name in names]
    if config.validation_file is None:
        rows, generator = splits[0], torch.Generator().manual_seed(config.split_seed)
        rows = [rows[index] for index in torch.randperm(len(rows), generator=generator).tolist()]
        num_train = min(max(1, round(config.train_fraction * len(rows))), len(rows) - 1)
        splits[:1] = rows[:num_train], rows[num_train:]
    return splits


def build_encoder(config: DataConfig, texts: list[str]) -> "Vocabulary | PretrainedTokenizer":
    """Return the config's tokenizer or a vocabulary of `texts`. Raise ConfigError if the run has another vocabulary."""
    if config.tokenizer is not None:
        return PretrainedTokenizer(config.tokenizer, config.max_length)
    vocabulary = Vocabulary(texts, config.vocabulary_size, config.max_length)
    if config.fingerprint not in (None, vocabulary.fingerprint):
        raise ConfigError(
            f"data.fingerprint={config.fingerprint}: the training rows have other words. Put {config.train_file} "
            "back as it was, or take the key out of the config and choose another name=…"
        )
    config.fingerprint = vocabulary.fingerprint  # so it stands in every checkpoint
    return vocabulary


class Vocabulary:
    """Gives an id to each of the most frequent tokens, and pairs of neighbouring tokens, in the training rows."""

    padding = PADDING

    def __init__(self, texts: list[str], size: int, max_length: int) -> None:
        self.max_length = max_length
        counts: Counter[str] = Counter()
        for text in texts:
            tokens = tokenize(text)[:max_length]
            counts.update((*tokens, *pairs(tokens)))
        frequent = sorted(counts, key=lambda entry: (-counts[entry], entry))[: size - FIRST]
        self.numbers = {entry: number for number, entry in enumerate(frequent, FIRST)}
        self.fingerprint = hashlib.sha256("\n".join(frequent).encode()).hexdigest()[:16]

    def __call__(self, text: str) -> Tensor:
        """Return (L, 2) int64: the id of each token, and the id of its pair with the token before it."""
        tokens = tokenize(text)[: self.max_length] or [""]
        singles = [self.numbers.get(token, UNKNOWN) for token in tokens]
        return torch.tensor(
            [singles, [self.numbers.get(pair, PADDING) for pair in pairs(tokens)]]
        ).T


class PretrainedTokenizer:
    """Encodes texts with a Hugging Face tokenizer, which is loaded by name or from a folder."""

    def __init__(self, name: str, max_length: int) -> None:
        from transformers import AutoTokenizer

        self.tokenizer, self.max_length = AutoTokenizer.from_pretrained(name), max_length
        if self.tokenizer.pad_token is None:  # generative ones have none
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.padding: int = self.tokenizer.pad_token_id

    def __call__(self, text: str) -> Tensor:
        """Return the ids of the text's tokens: (L, 1) int64."""
        return torch.tensor(
            self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]
        ).unsqueeze(1)


def pairs(tokens: list[str]) -> list[str]:
    """Return each token joined to the token before it. For example, ["a", "b"] gives [" a", "a b"]."""
    return [f"{former} {token}" for former, token in zip(["", *tokens], tokens, strict=False)]

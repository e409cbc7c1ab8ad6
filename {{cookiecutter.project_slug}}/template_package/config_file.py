"""Reads config.yaml and `key=value` arguments into nested dicts of text. config.py turns the text into typed values.

This file imports neither torch nor the user's files, because the fork server may have to start before those imports.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, one_line


def other_words() -> dict[str, dict[str, str]]:
    """Read other_words.yaml, which lists other tools' names for this project's keys and values."""
    return dict(yaml.safe_load(Path(__file__).with_name("other_words.yaml").read_bytes()))


def available_files(folder: str, besides: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the modules in a folder of this package, except for the names in `besides`."""
    paths = (Path(__file__).parent / folder).glob("[a-z]*")
    return sorted({path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()} - {*besides})


def our_word(key: str, value: str) -> str | None:
    """Translate another tool's setting into this project's "key=value" text. Return None if the key is unknown."""
    name = key.lower().rpartition(".")[2]
    ours = next((ours for ours, others in other_words()["keys"].items() if name in others.split()), None)
    if ours and re.search(r"[\[,]|^(0|-1|cuda|gpu)$", value):
        ours = re.sub("=auto:{}.*", "", ours)  # gpus=0,2 and gpus=[2] are ids, gpus=2 is their number
    value = "auto" if value in ("cuda", "gpu", "-1") else re.sub(r"cuda:|[\[\] ]", "", value)  # cuda:2, [0, 2]
    return None if ours is None else ours.format(value) if "=" in ours else f"{ours}={value}"


class _TextLoader(yaml.BaseLoader):
    """Reads YAML, but leaves numbers and booleans as text. Raises ConfigError if a key is set twice."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        return _null(super().construct_scalar(node), is_quoted=node.style is not None)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if doubled := {key for key in keys if keys.count(key) > 1}:
            raise ConfigError(f"{', '.join(doubled)}: this key is set twice. Delete one of its lines.")
        return super().construct_mapping(node, deep=True)


def read_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Read the YAML file, apply the `key=value` overrides, and return nested dicts in which numbers are still text."""
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path)) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({one_line(error)}). Name a readable text file.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds no settings. Write each as a line of the form key: value.")
    return set_words(settings, overrides)


def set_words(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    if flags := [argument for argument in overrides if not re.match("[^-+~=][^=]*=", argument)]:
        full = {key.rpartition(".")[2]: key for key in reversed(dotted(settings))}  # the first section that has it
        # --key value, --key=value, --key value value, --key
        pairs = re.findall(r"([A-Za-z][\w.-]*)[ =]*((?:(?!-+[A-Za-z])\S+ ?)*)", " ".join(flags)) or [("KEY", "")]
        ours = []
        for typed, values in pairs:
            key, value = typed.replace("-", "_"), ",".join(values.split()) or "VALUE"
            ours.append(our_word(key, value) or f"{full.get(key, key if '.' in key else f'model.{key}')}={value}")
        raise ConfigError(f"{one_line(' '.join(flags))}: a setting is key=value. Write {' '.join(ours)}.")
    for argument in overrides:
        key, _, text = argument.partition("=")
        *sections, name = key.split(".")
        section = settings
        for inner in sections:
            section[inner] = section = section[inner] if isinstance(section.get(inner), dict) else {}
        section[name] = parse_yaml(text, key) if text[:1] in ("[", "{") else _null(text)
    return settings


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts into one dict with dotted keys, such as `training.epochs`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML, but leave numbers and booleans as text. Raise ConfigError if it is invalid or sets a key twice."""
    try:
        return yaml.load(text, _TextLoader)  # it builds nothing but dicts, lists and text
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())[:300]  # with its line
        raise ConfigError(f"{source}: not readable as YAML ({problem}). Correct or quote it.") from None


def _null(text: str, is_quoted: bool = False) -> str | None:
    return None if text.lower() in ("null", "~", "") and not is_quoted else text

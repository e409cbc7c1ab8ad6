"""Reads config.yaml and `key=value` arguments into nested dicts of text. config.py turns the text into typed values.

This file imports neither torch nor the user's files, because the fork server may have to start before those imports.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, one_line

SHARED_PARTS = {"base", "common", "library_environment", "zero"}  # of strategies/
SETTING = re.compile("[^-+~=][^=]*=")  # how an argument key=value begins


def available_files(folder: str) -> list[str]:
    """Return the names of the modules in a folder of this package, except for SHARED_PARTS."""
    paths = (Path(__file__).parent / folder).glob("[a-z]*")
    names = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(names - SHARED_PARTS)


class _TextLoader(yaml.BaseLoader):
    """Reads YAML, but leaves numbers and booleans as text. Raises ConfigError if a key is set twice."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        return _null(super().construct_scalar(node), is_quoted=node.style is not None)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if doubled := {key for key in keys if keys.count(key) > 1}:
            raise ConfigError(
                f"{', '.join(doubled)}: this key is set twice. Delete one of its lines."
            )
        return super().construct_mapping(node, deep=True)


def read_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Read the YAML file, apply the `key=value` overrides, and return nested dicts in which numbers are still text."""
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path)) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({one_line(error)}). Name a readable text file."
        ) from None
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{path}: holds no settings. Write each as a line of the form key: value."
        )
    return set_words(settings, overrides)


def set_words(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    flags = " ".join(argument for argument in overrides if not SETTING.match(argument))
    if flags:
        pair = re.fullmatch(r"-*([\w.]+)[ =]+([^ -]\S*)", flags)
        example = "=".join(pair.groups()) if pair else "KEY=VALUE"
        raise ConfigError(f"{one_line(flags)}: a setting is key=value. Write {example}.")
    for argument in overrides:
        key, _, text = argument.partition("=")
        *sections, name = key.split(".")
        section = settings
        for inner in sections:
            section[inner] = section = (
                section[inner] if isinstance(section.get(inner), dict) else {}
            )
        section[name] = parse_yaml(text, key) if text[:1] in ("[", "{") else _null(text)
    return settings


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts into one dict with dotted keys, such as `training.epochs`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            dotted(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return flat


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML, but leave numbers and booleans as text. Raise ConfigError if it is invalid or sets a key twice."""
    try:
        return yaml.load(text, _TextLoader)  # it builds nothing but dicts, lists and text
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())[:300]  # with its line
        raise ConfigError(
            f"{source}: not readable as YAML ({problem}). Correct or quote it."
        ) from None


def _null(text: str, is_quoted: bool = False) -> str | None:
    return None if text.lower() in ("null", "~", "") and not is_quoted else text

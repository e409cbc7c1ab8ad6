"""Reads config.yaml and `key=value` words into a dataclass: config_values.py reads each value as its field's type wants
it, OmegaConf merges, checks and builds. Which values are allowed is validation.py's."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config_values import TypedText, parse_yaml, read_value
from .validation import ConfigError, one_line

Root = TypeVar("Root")

_MAX_FILE_BYTES = 100_000


def load(root: type[Root], path: Path, overrides: Sequence[str]) -> Root:
    """An instance of the dataclass `root`: its defaults, then the file, then the overrides. Raises ConfigError."""
    try:
        file_node = parse_yaml(_read_text(path), str(path))
        if not isinstance(file_node, yaml.MappingNode):
            raise ConfigError(f"{path}: holds no settings. Write each as a line of the form key: value")
        values = [read_value(node, root, "", root) for node in (file_node, *_override_nodes(overrides))]
    except RecursionError:
        raise ConfigError(f"{path}: brackets or sections are nested too deep. Take some levels out.") from None
    try:
        return _build(root, values, path)
    except OmegaConfBaseException as error:
        problem = " ".join(str(error).partition("\n")[0].split())
        raise ConfigError(f"{error.full_key or path}: {problem}. See the key's type in its config class.") from None


def _build(root: type[Root], values: list[dict[str, Any]], path: Path) -> Root:
    sections: dict[str, Any] = {name: {} for name, kind in get_type_hints(root).items() if is_dataclass(kind)}
    merged = OmegaConf.merge(OmegaConf.structured(root), sections, *values)
    for key in sorted(OmegaConf.missing_keys(merged)):
        raise ConfigError(f"{key}=???: has no value and no default. Set {key}=VALUE or write it in {path.name}.")
    if "${" in repr(merged):  # in a default in code; the file and the overrides are known to hold none
        raise ConfigError("${…} in a default of a config class is not replaced. Write the value itself there.")
    for name in sections:
        try:
            OmegaConf.to_object(OmegaConf.select(merged, name))
        except ValueError as error:  # a __post_init__ of DataConfig or ModelConfig refuses its values
            problem = " ".join(str(error).split())
            raise ConfigError(f"{name}{'.' if re.match('[a-z_]+=', problem) else ': '}{problem}") from None
    return cast(Root, OmegaConf.to_object(merged))


def to_plain(value: Any) -> Any:
    """Dataclasses, lists and dicts of anything as dicts and lists of what YAML, JSON and checkpoints can hold."""
    if is_dataclass(value):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():  # nor is a device one: reading that may never end
            name = str(path) if str(path).isprintable() else repr(str(path))
            raise ConfigError(f"{name}: there is no such file. Name the config file: --config PATH.")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Check its name and permissions.") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than 100 kB. Name the config file: --config PATH.")
    return text


def _override_nodes(overrides: Sequence[str]) -> Iterator[yaml.Node]:
    """`a.b=text` as the YAML nodes of {a: {b: text}}."""
    for position, word in enumerate(overrides):
        key, equals, value = word.partition("=")
        if not equals or not key or key[0] in "-+~":
            following = [] if equals else [word for word in overrides[position + 1 : position + 2] if "=" not in word]
            remedy = f"{key.lstrip('-+~').replace('-', '_') or 'KEY'}={value or ''.join(following) or 'VALUE'}"
            typed = " ".join([word, *following])
            raise ConfigError(f"{one_line(typed)}: a setting is written key=value. Write {one_line(remedy)}")
        node: yaml.Node = TypedText("", value)
        for name in reversed(key.split(".")):
            node = yaml.MappingNode("", [(yaml.ScalarNode("", name), node)])
        yield node

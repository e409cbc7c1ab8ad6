"""Reads the command line and config.yaml as text. config.py turns the text into typed values.

This file imports neither torch nor your files, so the process that starts the ranks is ready at once.
"""

from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ..errors import NEEDS_FULL, ConfigError, one_line
from ..files import run_directory

COMMANDS = {
    "train": "trains on the devices of config.yaml, or continues the run; the default",
    "evaluate": "evaluates a checkpoint on any number of devices, and writes evaluation.json",
    "predict INPUT": "applies a trained model to new inputs, and writes predictions.jsonl",
    "smoke": "tests that your model trains, saves, resumes and evaluates on two CPU ranks",
}
IN_FULL = ("doctor", "benchmark", "sweep", "report")
USAGE = "python run.py [COMMAND] [--config PATH …] [key=value …]"


@dataclass
class CommandLine:
    command: str
    settings: dict[str, Any]  # nested dicts; numbers are still text
    words: list[str]  # the key=value words
    config_paths: list[Path]
    source: str = ""  # what `predict` reads
    stored: dict[str, Any] | None = None  # of the run that is evaluated, with its own settings

    def get(self, key: str, default: str) -> str:
        """Return the text of a key such as launch.nodes. config.py refuses a wrong one later."""
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else str(value)


def read_command_line(arguments: Sequence[str], default_config: Path) -> CommandLine:
    """Parse run.py's arguments. Raise ConfigError for a mistake, and SystemExit(0) after --help."""
    help_text = "\n".join(f"{name:14} {text}" for name, text in COMMANDS.items())
    parser = ArgumentParser(
        "run.py", USAGE, help_text, formatter_class=RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, action="append", metavar="PATH")
    options, words = parser.parse_known_args(arguments)
    command, source = "train", ""
    names = [name.split()[0] for name in COMMANDS]
    if first := next((word for word in words if "=" not in word), ""):
        if first in IN_FULL:
            raise ConfigError(f"{first}: this command {NEEDS_FULL}")
        if first in names:
            command = first
            words.remove(first)
        elif not first.startswith("-") and "." not in first:
            close = get_close_matches(first, names, n=1)
            meant = f"Did you mean {close[0]}?" if close else f"There are {', '.join(names)}."
            raise ConfigError(f"{one_line(first)}: no such command. {meant}")
    if command == "predict":
        if not words or words[0].startswith("-"):
            raise ConfigError("predict: takes one input: a FILE, or 'a text in quotes'.")
        source = words.pop(0)
    paths = options.config or [default_config]
    settings: dict[str, Any] = {}
    for path in paths:
        merge(settings, read_file(path))
    set_words(settings, words)
    line = CommandLine(command, settings, words, paths, source)
    path = run_directory(str(settings.get("name", "baseline"))) / "config.yaml"
    if command in ("evaluate", "predict") and not options.config and path.exists():
        line.stored = read_file(path)
    return line


def read_file(path: Path) -> dict[str, Any]:
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path)) or {}
    except (OSError, UnicodeDecodeError) as error:
        problem = one_line(error)
        raise ConfigError(f"{path}: cannot be read ({problem}). Name a text file.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds no settings. Write each as a line `key: value`.")
    return settings


def merge(settings: dict[str, Any], others: dict[str, Any]) -> None:
    """Set the values of `others` in `settings`, section by section."""
    for key, value in others.items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            merge(settings[key], value)
        else:
            settings[key] = value


def set_words(settings: dict[str, Any], words: Sequence[str]) -> None:
    """Set `key=value` words in the nested settings."""
    for number, word in enumerate(words):
        key, equals, text = word.partition("=")
        if not equals or not key or key.startswith("-"):
            following = words[number + 1] if number + 1 < len(words) and not equals else "VALUE"
            example = f"{key.lstrip('-')}={text or following}"
            raise ConfigError(f"{one_line(word)}: a setting is key=value. Write {example}.")
        *sections, name = key.split(".")
        section = settings
        for inner in sections:
            if not isinstance(section.get(inner), dict):
                section[inner] = {}
            section = section[inner]
        section[name] = parse_yaml(text, key) if text[:1] in ("[", "{") else _null(text)


class _TextLoader(yaml.BaseLoader):
    """Leaves numbers and booleans as text. Refuses a key that is set twice."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        text = super().construct_scalar(node)
        return text if node.style else _null(text)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if doubled := {key for key in keys if keys.count(key) > 1}:
            raise ConfigError(f"{', '.join(doubled)}: set twice. Delete one of the lines.")
        return super().construct_mapping(node, deep=True)


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _TextLoader)  # it builds nothing but dicts, lists and text
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())[:300]  # with its line
        raise ConfigError(f"{source}: not readable as YAML ({problem}). Correct it.") from None


def _null(text: str) -> str | None:
    return None if text.lower() in ("null", "~", "") else text

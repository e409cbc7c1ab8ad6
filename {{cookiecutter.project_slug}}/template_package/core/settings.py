"""Reads the command line and config.yaml as text. config.py turns the text into typed values.

This file imports neither torch nor your files, so the process that starts the ranks is ready at once.
"""

import json
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

from ..errors import NEEDS_FULL, ConfigError, one_line

COMMANDS = {
    "train": "trains on the devices of config.yaml, or continues the run; the default",
    "evaluate": "evaluates a checkpoint on any number of devices, and writes evaluation.json",
    "predict INPUT": "applies a trained model to new inputs, and writes predictions.jsonl",
    "smoke": "tests that your model trains, saves, resumes and evaluates on two CPU ranks",
    "benchmark": "measures how fast each strategy trains, and what 16-bit precision or torch.compile adds",
    "doctor [--json]": "finds what would make runs fail on this machine, and how to fix it",
    "export DTYPE": "writes a checkpoint's weights as fp32, bf16 or fp16, in parts if they are large",
    "report [NAME…]": "writes an HTML file, readable offline, that shows one run or compares several runs",
    "sweep FILE": "starts many training runs, in parallel if possible. Rerun it to resume the sweep",
}
"""{command: help}. The text behind a command's name says what else it takes, besides settings."""
ALONE = ("doctor", "export", "report", "sweep")
"""Commands that a project of size=small may have, too."""
USAGE = "python run.py [COMMAND] [--config PATH …] [key=value …]"
SETTINGS = "DDP_SETTINGS"  # an environment variable of ranks
Settings = dict[str, Any]
"""Nested dicts, such as {"training": {"epochs": "3"}}. Numbers are still text."""


@dataclass
class CommandLine:
    default_config: Path
    config_paths: Sequence[Path] = ()  # those of --config, in place of the default one
    command: str = "train"
    words: Sequence[str] = ()  # the key=value words
    rest: Sequence[str] = ()  # what the command itself reads, such as INPUT

    @cached_property
    def settings(self) -> Settings:
        """What the lab's file sets and then, stronger, the other files and the words.

        A rank of start_ranks() is handed them: the files may have changed since.
        """
        if handed := os.environ.get(SETTINGS):
            return dict(json.loads(handed))
        settings = lab_settings()
        for path in self.config_paths or [self.default_config]:
            merge(settings, read_file(path))
        return merge(settings, read_words(self.words))

    def get(self, key: str, default: str) -> str:
        """Return the text of a key such as launch.backend. config.py refuses a wrong one later."""
        return str(value_at(key, self.settings) or default)

    def load_config(self) -> Any:
        """Return the typed Config. Raise ConfigError if a setting is wrong."""
        from .config import build_config, find_config

        return build_config(self, find_config())


def find_commands() -> dict[str, str]:
    """Return those of COMMANDS that this project has. Each but `train` is a module of commands/."""
    paths = (Path(__file__).parents[1] / "commands").glob("*")
    modules = [path for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = {"train", *(path.stem for path in modules)}
    return {usage: text for usage, text in COMMANDS.items() if usage.split()[0] in names}


def read_command_line(arguments: Sequence[str], default_config: Path) -> CommandLine:
    """Parse run.py's arguments. Raise ConfigError for a mistake, and SystemExit(0) after --help."""
    # The shell has cut device_ids=[0, 1] at the blank.
    whole = re.sub(r"=\[[^][]*\]", lambda match: match[0].replace("\0", ""), "\0".join(arguments))
    # Launchers append the local rank; the environment says the same.
    arguments = [
        word for word in whole.split("\0") if not re.fullmatch("(--local[-_]rank=.*)?", word)
    ]
    commands = find_commands()
    lines = "\n".join(f"{usage:16} {text}" for usage, text in commands.items())
    parser = ArgumentParser(usage=f"{USAGE}\n\n{lines}", allow_abbrev=False)
    parser.add_argument("--config", type=Path, action="append", metavar="PATH", default=[])
    options, others = parser.parse_known_args(arguments)
    words = [word for word in others if re.match(r"\w[\w.-]*=", word)]
    rest = [word for word in others if word not in words]
    name = rest.pop(0) if rest and rest[0].isalpha() else "train"
    usage = next((usage for usage in commands if usage.split()[0] == name), None)
    if usage is None:
        problem = f"is unknown. There are {', '.join(commands)}."
        if any(usage.split()[0] == name for usage in COMMANDS):
            problem = NEEDS_FULL + f" (or, for it alone, extras={name})" * (name in ALONE)
        raise ConfigError(f"{name}: this command {problem}")
    if usage == name and rest:
        flags = " ".join(rest)
        example = re.sub(r"\W*([\w.-]*)[ =]*(\S*).*", r"\1=\2", flags, count=1)
        raise ConfigError(f"{one_line(flags)}: a setting is key=value. Write {example}.")
    if "[" not in usage != name and len(rest) != 1:
        raise ConfigError(f"{name}: takes one input. Type: python run.py {usage}")
    return CommandLine(default_config, options.config, name, words, rest)


def read_words(words: Sequence[str]) -> Settings:
    """Return {"training": {"epochs": "3"}} for the word training.epochs=3."""
    settings: Settings = {}
    for word in words:
        key, _, text = word.partition("=")
        is_yaml = text.startswith(("[", "{"))
        value = parse_yaml(key, partial(str, text)) if is_yaml else plain(text)
        merge(settings, nested(key, value))
    return settings


def read_file(path: Path) -> Settings:
    settings = parse_yaml(str(path), partial(path.read_text, "utf-8-sig")) or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds no settings. Write each as a line `key: value`.")
    return settings


def lab_settings() -> Settings:
    """Return what the file says that the environment variable DDP_CONFIG names, or {} without it."""
    try:
        path = os.environ.get("DDP_CONFIG")
        return read_file(Path(path)) if path else {}
    except ConfigError as error:  # it begins with the path
        raise ConfigError(f"DDP_CONFIG={error}") from None


def merge(settings: Settings, others: Settings) -> Settings:
    """Set the values of `others` in `settings`, section by section. Return `settings`."""
    for key, value in others.items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            merge(settings[key], value)
        else:
            settings[key] = value
    return settings


def nested(key: str, value: Any) -> Any:
    """Return {"training": {"epochs": value}} for the key training.epochs."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def value_at(key: str, settings: Any, default: Any = None) -> Any:
    """Return the value of the key training.epochs in {"training": {"epochs": value}}."""
    for part in key.split("."):
        settings = settings.get(part, default) if isinstance(settings, dict) else settings
    return settings


class _TextLoader(yaml.BaseLoader):
    """Leaves numbers and booleans as text. Refuses a key that is set twice."""

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        value = plain(text)
        return text if node.style else value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping = super().construct_mapping(node, deep=True)
        if len(mapping) < len(node.value):
            raise ConfigError(f"one of {', '.join(map(str, mapping))} is set twice")
        return mapping


def parse_yaml(source: str, read: Callable[[], str]) -> Any:
    try:
        return yaml.load(read(), _TextLoader)  # it builds nothing but dicts, lists and text
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())[:300]  # with its line
        raise ConfigError(f"{source}: cannot be read ({problem}). Correct it.") from None


def plain(text: str) -> str | None:
    if "${" in text:
        raise ConfigError(f"{one_line(text)}: ${{…}} is not replaced. Write the value itself.")
    return None if text.lower() in ("null", "~", "") else text


def parse_device_ids(value: object) -> str | list[int | str]:
    """Return `auto`, `auto:N`, or a list with one device per rank: [0, 2], or ["cpu", "cpu"]."""
    text = re.sub("[][']", "", str(value)).replace(", ", ",")
    if re.fullmatch("auto(:[1-9][0-9]{0,3})?", text):
        return text
    if re.fullmatch("mps|cpu(,cpu){0,255}|[0-9]{1,9}(,[0-9]{1,9}){0,255}", text):
        return [int(entry) if entry.isdigit() else entry for entry in text.split(",")]
    rule = "must be auto, auto:N, or GPU ids or cpu, one per rank"
    raise ValueError(f"{rule}. Set device_ids=0,2 or device_ids=cpu,cpu.")

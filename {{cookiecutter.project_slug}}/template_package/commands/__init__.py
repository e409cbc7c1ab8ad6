"""What `python run.py` offers: `train` is run.py's own, each other command is a file here with a function
`main(config)`; predict's is `main(config, source)`, and the doctor's `main(line)`, as it also reports on a config that
cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ..validation import ConfigError, one_line

USAGE = """usage: python run.py [{commands}] [--config PATH] [key=value ...]

Without a command it trains, or continues. Every key of config.yaml can be set, with dots into sections:
  python run.py device_ids=0,2 training.epochs=3 name=first
  python run.py evaluate evaluation.split=test
  python run.py predict FILE                    or 'a sentence', whatever read_inputs() in dataset.py takes
  python run.py doctor --json"""


class CommandLine(NamedTuple):
    """The words after run.py, sorted."""

    command: str
    config_path: Path
    overrides: list[str]
    is_json: bool = False
    source: str | None = None
    """What to predict: predict's own word."""
    asked: tuple[str, ...] = ()
    """All that chooses the config, as typed."""


def available_commands() -> list[str]:
    """`train`, and one for each file beside this one."""
    return ["train", *sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))]


def parse_command_line(words: Sequence[str], default_config: Path) -> CommandLine:
    """Command, config file and overrides. ConfigError for a word that is none of these; SystemExit(0) after --help."""
    commands = available_commands()
    command: str | None = None
    config_path, overrides, is_json = default_config, list[str](), False
    source: str | None = None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            print(USAGE.format(commands="|".join(commands)))
            raise SystemExit(0)
        if word == "--config" and rest:
            config_path = Path(rest.pop(0))
        elif word.startswith("--config="):
            config_path = Path(word.removeprefix("--config="))
        elif word == "--json" and command == "doctor":
            is_json = True
        elif word.startswith(("--local-rank=", "--local_rank=")):
            continue  # torch.distributed.launch and deepspeed append it; the environment says the same
        elif command == "predict" and not re.match(r"[a-z_]+(\.[a-z_]+)*=|--[a-z]", word):
            if source is not None:
                raise ConfigError(f"predict {source} {word}: takes one input. Put quotes around a sentence.")
            source = word
        elif command is None and not overrides and not re.search(r"[=.]|^-", word):
            if word not in commands:
                close = get_close_matches(word, commands, n=1)
                remedy = f"Did you mean {close[0]}?" if close else "A value is set by key=value."
                raise ConfigError(f"{one_line(word)}: no such command; there are {', '.join(commands)}. {remedy}")
            command = word
        elif command is None and word in commands:
            raise ConfigError(
                f"{word}: the command comes first. Write python run.py {word} …, and the settings behind."
            )
        else:
            overrides.append(word)
    if command == "predict" and not source:
        raise ConfigError("predict: what? Write python run.py predict FILE, or predict 'a sentence'.")
    asked = [*overrides] if config_path is default_config else [f"--config={config_path}", *overrides]
    return CommandLine(command or "train", config_path, overrides, is_json, source, tuple(asked))


def run_command(line: CommandLine) -> int:
    """The exit code of one of the commands beside train."""
    command = import_module(f".{line.command}", __package__)
    if line.command == "doctor":
        return int(command.main(line))
    from ..config import load_config

    config = load_config(line.config_path, line.overrides)
    match line.command:
        case "predict":
            return int(command.main(config, line.source))
        case "benchmark":
            return int(command.main(config, line.asked))
    return int(command.main(config))

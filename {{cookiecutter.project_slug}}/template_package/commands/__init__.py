"""What `python run.py` offers: `train` is run.py's own, each other command is a file here with a function
`main(config)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ..config import Config
from ..validation import ConfigError

USAGE = """usage: python run.py [{commands}] [--config PATH] [key=value ...]

Without a command it trains, or continues. Every key of config.yaml can be set, with dots into sections:
  python run.py device_ids=0,2 training.epochs=3 name=first
  python run.py evaluate evaluation.split=test"""


class CommandLine(NamedTuple):
    """The words after run.py, sorted."""

    command: str
    config_path: Path
    overrides: list[str]


def available_commands() -> list[str]:
    """`train`, and one for each file beside this one."""
    return ["train", *sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))]


def parse_command_line(words: Sequence[str], default_config: Path) -> CommandLine:
    """Command, config file and overrides. ConfigError for a word that is none of these; SystemExit(0) after --help."""
    commands = available_commands()
    command: str | None = None
    config_path, overrides = default_config, list[str]()
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
        elif word.startswith(("--local-rank=", "--local_rank=")):
            continue  # torch.distributed.launch and deepspeed append it; the environment says the same
        elif command is None and not overrides and not re.search(r"[=.]|^-", word):
            if word not in commands:
                close = get_close_matches(word, commands, n=1)
                remedy = f"Did you mean {close[0]}?" if close else "A value is set by key=value."
                raise ConfigError(f"{word}: no such command; there are {', '.join(commands)}. {remedy}")
            command = word
        else:
            overrides.append(word)
    return CommandLine(command or "train", config_path, overrides)


def run_command(command: str, config: Config) -> int:
    """The exit code of one of the commands beside train."""
    code: int = import_module(f".{command}", __package__).main(config)
    return code

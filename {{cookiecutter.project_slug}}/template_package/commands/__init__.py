"""The command line of run.py. Each command, besides `train`, is a file or folder here with `main(line)`."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config_file import available_files, read_settings, set_words
from ..errors import ConfigError, one_line
from ..files import run_directory
from ..launching.environment import launcher_of
from ..launching.processes import start_fork_server

if TYPE_CHECKING:
    from ..config import Config

USAGE = """usage: python run.py [COMMAND] [--config PATH] [key=value ...]

Without a command it trains, or continues. Every key of config.yaml can be set, with dots into sections:
  python run.py device_ids=0,2 training.epochs=3 name=first\n"""
TOOLS = ("doctor", "benchmark", "sweep", "report")


@dataclass
class CommandLine:
    """The words after run.py, by kind. rest: those that only the command understands (predict's input, --json)."""

    config_path: Path
    command: str = "train"
    overrides: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    is_config_typed: bool = False

    def load_config(self) -> "Config":
        """The Config that file and words make. Raises ConfigError.

        evaluate and predict take the run's own file instead, unless --config is typed or a launcher's nodes may lack
        it; where and how to evaluate is still the present file's.
        """
        settings, is_alone = read_settings(self.config_path, self.overrides), launcher_of(os.environ) is None
        is_started_here = is_alone and self.command in ("train", "evaluate", "predict")
        if is_started_here and _has_several_ranks(settings.get("device_ids")):
            start_fork_server()  # it imports torch while this process does
        from ..config import as_today, build_config, keys_free_to_change

        stored = run_directory(str(settings.get("name", "baseline"))) / "config.yaml"
        if self.command in ("evaluate", "predict") and not self.is_config_typed and is_alone and stored.exists():
            own, _ = as_today(read_settings(stored, ()))
            own |= {key: settings.get(key, {}) for key in ("launch", "loader", "evaluation")}
            own |= {"device_ids": settings.get("device_ids", "auto"), "name": settings.get("name", "baseline")}
            for section, _, key in (key.partition(".") for key in keys_free_to_change()):
                if key in (settings.get(section) or {}):  # a folder on this machine, say
                    own[section][key] = settings[section][key]
            settings = set_words(own, self.overrides)
        return build_config(settings)

    def run(self) -> int:
        return int(import_module(f".{self.command}", __package__).main(self))

    def launch(self, run_fn: Callable[[int, int, "Config"], None]) -> int:
        """The exit code of run_fn, run once per device of the config."""
        config = self.load_config()
        from ..launching.launcher import find_node, launch

        node = find_node(config)
        return launch(run_fn, config, node, node.num_ranks)


def parse_command_line(words: Sequence[str], default_config: Path) -> CommandLine:
    """Command, config file and settings. ConfigError for a word that is none of these; SystemExit(0) after --help."""
    commands, line, has_command = ["train", *available_files("commands")], CommandLine(default_config), False
    # The shell has cut device_ids=[0, 1] at the blank.
    waiting = [*filter(None, re.sub(r"=\[[^][]*\]", lambda m: m[0].replace("\0", ""), "\0".join(words)).split("\0"))]
    while waiting:
        word = waiting.pop(0)
        if word in ("-h", "--help"):
            files = [*Path(__file__).parent.glob("[a-z]*.py"), *Path(__file__).parent.glob("*/__init__.py")]
            lines = [line for file in files for line in re.findall('\\A"""(.*)', file.read_text(encoding="utf-8"))]
            print(USAGE, *sorted(line.strip('"') for line in lines), sep="\n")
            raise SystemExit(0)
        if word.startswith("--config=") or (word == "--config" and waiting):
            line.config_path, line.is_config_typed = Path(word.partition("=")[2] or waiting.pop(0)), True
        elif word.startswith(("--local-rank=", "--local_rank=")):
            continue  # torch.distributed.launch and deepspeed append it; the environment says the same
        elif word in commands and not has_command:
            line.command, has_command = word, True
        elif has_command and (word == "--json" or not re.match(r"[a-z_][a-z0-9_.]*=|--[a-z]", word)):
            line.rest.append(word)
        elif has_command or line.overrides or re.search(r"[=.]|^-", word):
            line.overrides.append(word)
        elif word in TOOLS:
            folder = f"{Path(__file__).parents[1].name}/commands/{word}"
            raise ConfigError(f"{word}: this project was made without it. Copy {folder} from the template (tools=all).")
        else:
            close = get_close_matches(word, commands, n=1)
            remedy = f"Did you mean {close[0]}?" if close else "A value is set by key=value."
            raise ConfigError(f"{one_line(word)}: no such command; there are {', '.join(commands)}. {remedy}")
    if line.rest and line.command not in ("predict", *TOOLS):
        raise ConfigError(f"{one_line(' '.join(line.rest))}: {line.command} takes settings of the form key=value only.")
    return line


def write_report(directory: Path) -> None:
    """Write the run's report.html, if the project has the command `report`. If that fails, only warn."""
    if "report" in available_files("commands"):
        try:
            import_module(".report", __package__).write_report([directory], directory / "report.html")
        except Exception as error:
            logging.getLogger(__name__).warning("warning: no report.html (%s)", one_line(error))


def _has_several_ranks(device_ids: Any) -> bool:
    """Whether run.py will start several ranks; for `auto`, whether there are several GPUs."""
    if str(device_ids).startswith("auto"):
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) > 1
    return len(device_ids) > 1 if isinstance(device_ids, list) else "," in str(device_ids)

"""Reads run.py's command line. Each command except `train` is a module in this folder with a function main(line)."""

import logging
import os
import re
from argparse import SUPPRESS, ArgumentParser, RawTextHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..config_file import available_files, read_settings, set_words
from ..errors import ConfigError, one_line
from ..files import run_directory
from ..launching.environment import launcher_of
from ..launching.processes import start_fork_server

if TYPE_CHECKING:
    from ..config import Config, Suggest

USAGE = """python run.py [COMMAND] [--config PATH] [key=value ...]
Without a command it trains, or continues. The keys are those of config.yaml: training.epochs=3 name=first"""
# --help shows those that the project has
COMMANDS = {
    "benchmark": "measures how fast each strategy trains, and what 16-bit precision or torch.compile adds.",
    "doctor": "finds what would make runs fail on this machine, and how to fix it. --json prints JSON.",
    "evaluate": "evaluates a checkpoint on any number of devices, and writes evaluation.json.",
    "predict INPUT": "applies a trained model to new inputs, and writes predictions.jsonl.",
    "report [NAME…]": "writes an HTML file, readable offline, that shows one run or compares several runs.",
    "smoke": "tests that your model trains, saves, resumes and evaluates on two CPU ranks.",
    "sweep FILE": "starts many training runs, in parallel if possible. Rerun it to resume the sweep.",
}
GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass
class CommandLine:
    """Holds run.py's parsed arguments. `rest` holds those that the command itself reads, for example `--json`."""

    config_path: Path
    command: str = "train"
    overrides: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    is_config_typed: bool = False

    def load_config(self) -> "Config":
        """Return the config from the config file and the overrides. Raise ConfigError if a setting is wrong.

        For an existing run, `evaluate` and `predict` use that run's own config.yaml, unless --config or a launcher is
        used. If you set `name`, `device_ids`, `launch`, `loader` or `evaluation`, the run's own value is ignored.
        """
        suggest: Suggest | None = None
        if "other_words" in available_files("extras"):
            from ..extras import other_words

            other_words.refuse_flags(self.config_path, self.overrides)
            suggest = other_words.suggest
        settings, is_alone = (
            read_settings(self.config_path, self.overrides),
            launcher_of(os.environ) is None,
        )
        devices = str(settings.get("device_ids", "auto"))
        has_several_ranks = "," in devices or (
            devices.startswith("auto") and len([*GPUS.glob("*")]) > 1
        )
        if is_alone and has_several_ranks and self.command in ("train", "evaluate", "predict"):
            start_fork_server()  # it imports torch while this process does
        from ..config import as_today, build_config

        stored = run_directory(str(settings.get("name", "baseline"))) / "config.yaml"
        if (
            self.command in ("evaluate", "predict")
            and not self.is_config_typed
            and is_alone
            and stored.exists()
        ):
            own, here = (
                as_today(read_settings(stored, ())),
                ("name", "device_ids", "launch", "loader", "evaluation"),
            )
            settings = set_words(
                own | {key: settings[key] for key in here if key in settings}, self.overrides
            )
        return build_config(settings, suggest)

    def run(self) -> int:
        return int(import_module(f".{self.command}", __package__).main(self))

    def launch(self, run_fn: Callable[[int, int, "Config"], None]) -> int:
        config = self.load_config()
        from ..launching.launcher import find_node, launch

        node = find_node(config)
        return launch(run_fn, config, node, node.num_ranks)


def parse_command_line(arguments: Sequence[str], default_config: Path) -> CommandLine:
    """Parse the arguments. Raise ConfigError for an unknown command or argument, and SystemExit(0) after --help."""
    commands, has_command = ["train", *available_files("commands")], False
    lines = [
        f"`python run.py {usage}`: {text}"
        for usage, text in COMMANDS.items()
        if usage.split()[0] in commands
    ]
    parser = ArgumentParser(
        "run.py",
        USAGE,
        epilog="\n".join(lines),
        formatter_class=RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="PATH", default=default_config)
    # torch.distributed.launch and deepspeed append it; the environment says the same.
    parser.add_argument("--local-rank", "--local_rank", help=SUPPRESS)
    options, others = parser.parse_known_args(arguments)
    line = CommandLine(options.config, is_config_typed=options.config is not default_config)
    # The shell has cut device_ids=[0, 1] at the blank.
    whole = re.sub(r"=\[[^][]*\]", lambda match: match[0].replace("\0", ""), "\0".join(others))
    for argument in filter(None, whole.split("\0")):
        if argument in commands and not has_command:
            line.command, has_command = argument, True
        elif has_command and (
            argument == "--json" or not re.match(r"[a-z_][a-z0-9_.]*=|--[a-z]", argument)
        ):
            line.rest.append(argument)
        elif has_command or line.overrides or re.search(r"[=.]|^-", argument):
            line.overrides.append(argument)
        else:
            remedy = f"Set a value by key=value; copy a missing tool, {Path(__file__).parent}/NAME, from the template."
            raise ConfigError(
                f"{one_line(argument)}: no such command; there are {', '.join(commands)}. {remedy}"
            )
    if line.rest and line.command in ("train", "evaluate", "smoke", "benchmark"):
        raise ConfigError(
            f"{one_line(' '.join(line.rest))}: {line.command} takes settings of the form key=value only."
        )
    return line


def write_report(directory: Path) -> None:
    """Write report.html for the run, if the project has the command `report`. If that fails, only log a warning."""
    if "report" in available_files("commands"):
        try:
            import_module(".report", __package__).write_report(
                [directory], directory / "report.html"
            )
        except Exception as error:
            logging.getLogger(__name__).warning("warning: no report.html (%s)", one_line(error))

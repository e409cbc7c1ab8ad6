"""Reads run.py's command line. Each command except `train` is a module in this folder with a function main(line)."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import settings
from ..errors import ConfigError, one_line
from ..launching.environment import launcher_of
from ..launching.processes import start_fork_server
from ..optional_files import available_files

if TYPE_CHECKING:
    from ..config import Config

COMMANDS = settings.COMMANDS | {
    "benchmark": "measures how fast each strategy trains, and what 16-bit precision or torch.compile adds",
    "doctor [--json]": "finds what would make runs fail on this machine, and how to fix it",
    "report [NAME…]": "writes an HTML file, readable offline, that shows one run or compares several runs",
    "sweep FILE": "starts many training runs, in parallel if possible. Rerun it to resume the sweep",
}
"""{command: help}. A project has those whose file is in this folder."""
GPUS = Path("/proc/driver/nvidia/gpus")


class CommandLine(settings.CommandLine):
    def load_config(self) -> "Config":
        """Return the config from the config files and the words. Raise ConfigError if a setting is wrong."""
        with answered_in_our_words():
            devices = self.get("device_ids", "auto")
            has_several_ranks = "," in devices or (
                devices.startswith("auto") and len([*GPUS.glob("*")]) > 1
            )
            starts_ranks = self.command in ("train", "evaluate", "predict")
            if has_several_ranks and starts_ranks and launcher_of(os.environ) is None:
                start_fork_server()  # it imports torch while this process does
            from ..config import Config
            from ..core.config import build_config

            return build_config(self, Config)

    def run(self) -> int:
        return int(import_module(f".{self.command}", __package__).main(self))

    def launch(self, run_fn: Callable[[int, int, "Config"], None]) -> int:
        config = self.load_config()
        from ..launching.launcher import find_node, launch

        node = find_node(config)
        return launch(run_fn, config, node, node.num_ranks)


def parse_command_line(arguments: Sequence[str], default_config: Path) -> CommandLine:
    """Parse the arguments. Raise ConfigError for an unknown command or argument, and SystemExit(0) after --help."""
    files = ["train", *available_files("commands")]
    commands = {usage: text for usage, text in COMMANDS.items() if usage.split()[0] in files}
    # The shell has cut device_ids=[0, 1] at the blank.
    whole = re.sub(r"=\[[^][]*\]", lambda match: match[0].replace("\0", ""), "\0".join(arguments))
    # torch.distributed.launch and deepspeed append the local rank; the environment says the same.
    words = [word for word in whole.split("\0") if not re.fullmatch("(--local[-_]rank=.*)?", word)]
    with answered_in_our_words():
        line = settings.read_command_line(words, default_config, commands)
    return CommandLine(**vars(line))


@contextmanager
def answered_in_our_words() -> Iterator[None]:
    """Answer another tool's words with this project's, if the extra `other_words` is there."""
    try:
        yield
    except ConfigError as error:
        if "other_words" not in available_files("extras"):
            raise
        from ..extras.other_words import translate

        raise ConfigError("\n".join(map(translate, str(error).splitlines()))) from None


def write_report(directory: Path) -> None:
    """Write report.html for the run, if the project has the command `report`. If that fails, only log a warning."""
    if "report" in available_files("commands"):
        try:
            import_module(".report", __package__).write_report(
                [directory], directory / "report.html"
            )
        except Exception as error:
            logging.getLogger(__name__).warning("warning: no report.html (%s)", one_line(error))

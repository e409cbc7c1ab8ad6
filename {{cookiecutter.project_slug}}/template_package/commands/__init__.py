"""Reads run.py's command line. Each command except `train` is a module in this folder.

Those that run on ranks have functions check() and work(), which run.py calls on each of them; the others a main(line).
"""

import logging
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..core import settings
from ..core.launch import as_stop
from ..core.processes import STOP_SIGNALS
from ..errors import ConfigError, StopRun, one_line
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


class CommandLine(settings.CommandLine):
    def load_config(self) -> "Config":
        """Return the config from the config files and the words. Raise ConfigError if a setting is wrong."""
        with answered_in_our_words():
            from ..config import Config
            from ..core.config import build_config

            return build_config(self, Config)

    def run(self) -> int:
        return int(import_module(f".{self.command}", __package__).main(self))


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
def stops_raised() -> Iterator[None]:
    """Inside, a stop signal raises StopRun (exit code 130 or 143)."""

    def stop(number: int, _: object) -> NoReturn:
        raise StopRun(128 + as_stop(number))

    # nohup
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)


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

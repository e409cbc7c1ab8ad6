"""`python run.py benchmark`: measures each way to train your model on your data that this machine allows.

Each run is a command of its own, `run.py benchmark measure DIRECTORY …`, so that it starts as a training does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ...errors import ConfigError, one_line
from ...launching.processes import die_with_parent
from .. import CommandLine


def main(line: CommandLine) -> int:
    """0; 1 if no row ran; 130 after Ctrl-C and 143 after SIGTERM, with what was measured till then."""
    if line.rest[:1] == ["measure"] and len(line.rest) == 2:
        die_with_parent()  # torchrun, when killed, leaves its ranks behind
        line = replace(line, command="train")
        line.load_config()  # starts the fork server before torch is imported here, as a training does
        from .measure import run_fn

        return line.launch(partial(run_fn, Path(line.rest[1])))
    if line.rest:
        raise ConfigError(f"{one_line(' '.join(line.rest))}: benchmark takes settings of the form key=value only.")
    from .rounds import run_benchmark

    return run_benchmark(line)

"""How many devices a run would take here: scripts/torchrun.sh asks, to start a rank for each.

python -m template_package.commands._count_devices WORDS

The words are those of `python run.py`.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ..config import load_config
from ..launching.devices import take_devices
from ..validation import ConfigError
from . import parse_command_line


def main(words: list[str]) -> int:
    """Print the number. The exit code is 2, with one line, for a mistake of the user's."""
    try:
        with redirect_stdout(sys.stderr):  # --help, and what your files print when they are imported
            line = parse_command_line(words, default_config=Path(__file__).parents[2] / "config.yaml")
            config = load_config(line.config_path, line.overrides)
            devices = take_devices(config.device_ids, config.launch, os.environ)
        print(len(devices.names))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One run of one row, in processes of its own: `python -m …benchmarking.measure CONFIG DIRECTORY key=value …`, or the
same under torchrun. It leaves measured.json and summary.json in DIRECTORY.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from ..launching.starting import warm_up

# Imports stand in the functions, as in run.py.


def main(arguments: list[str]) -> int:
    """The exit code, as of run.py."""
    from ..config import load_config
    from ..launching.launcher import find_node, launch
    from ..validation import ConfigError
    from .measuring import measure

    try:
        config = load_config(Path(arguments[0]), arguments[2:])
        node = find_node(config)
        return launch(partial(measure, Path(arguments[1])), config, node, sum(node.num_ranks))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    warm_up(sys.argv[3:], Path(sys.argv[1]))
    sys.exit(main(sys.argv[1:]))

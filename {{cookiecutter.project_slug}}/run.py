"""Trains on the devices of config.yaml: reads the config, computes world_size, starts run_fn once per rank.

python run.py                                   train, on device_ids
python run.py device_ids=cpu,cpu name=first     any key of config.yaml, changed for this run
torchrun --nproc-per-node=2 run.py              joins the ranks that torchrun has started
python run.py evaluate                          the best checkpoint of the run
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from template_package.launching.starting import escape_output, heed_ctrl_c, warm_up

if TYPE_CHECKING:
    from template_package.config import Config

CONFIG = Path(__file__).with_name("config.yaml")

# Imports stand in the functions: the process that only starts the ranks need not load what they train with.


def run_fn(rank: int, world_size: int, config: Config) -> None:
    """What each of world_size ranks does, its process group and device being set: train to the end of the run."""
    from template_package.launching.distributed import current_context
    from template_package.training.logs import rank_logs
    from template_package.training.run_files import run_directory
    from template_package.training.trainer import Trainer

    with rank_logs(run_directory(config), current_context()):
        Trainer(config, current_context(), run_directory(config)).fit()


def main(arguments: list[str]) -> int:
    """The exit code of the command: 0 done, 1 a rank failed, 2 a mistake of the user's, 130 Ctrl-C, 143 SIGTERM."""
    from template_package.commands import parse_command_line, run_command
    from template_package.validation import ConfigError

    try:
        line = parse_command_line(arguments, default_config=CONFIG)
        if line.command != "train":
            return run_command(line)
        from template_package.config import load_config
        from template_package.launching.launcher import find_node, launch

        config = load_config(line.config_path, line.overrides)
        node = find_node(config)
        world_size = sum(node.num_ranks)  # over nodes: one rank a device
        return launch(run_fn, config, node, world_size)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "omegaconf"):
            raise
        remedy = "Activate this project's environment, or type: python -m pip install -c constraints.txt -e ."
        print(f"error: {sys.executable} has no {error.name}. {remedy}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    heed_ctrl_c()
    escape_output()
    try:
        warm_up(sys.argv[1:], CONFIG)
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

"""Several runs in the same ranks, to save their start: python many_runs.py '[["name=a", ...], ["name=b", ...]]'."""

import json
from functools import partial
from pathlib import Path

from template_package.config import Config, load_config
from template_package.launching.distributed import current_context
from template_package.launching.launcher import find_node, launch
from template_package.training.logs import rank_logs
from template_package.training.run_files import run_directory
from template_package.training.trainer import Trainer


def run_all(configs: list[Config], rank: int, world_size: int, _: Config) -> None:
    for config in configs:
        with rank_logs(run_directory(config), current_context()):
            Trainer(config, current_context(), run_directory(config)).fit()


def main(arguments: list[str]) -> int:
    configs = [load_config(Path("config.yaml"), words) for words in json.loads(arguments[0])]
    node = find_node(configs[0])
    return launch(partial(run_all, configs), configs[0], node, sum(node.num_ranks))

"""Runs the tests' commands in turn, in one process. Its fork server stays up, so ranks start within a second.

`python session.py FD` reads commands from stdin, one JSON object per line (`folder`, `script`, its arguments `words`).
It writes the exit code of each command to file descriptor FD, and the output of commands and ranks to stdout.
"""

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from template_package.launching.processes import start_fork_server


def run(folder: str, script: str, words: list[str]) -> int:
    """Do what `python <script>.py <words>` would do in `folder`, but in this process. Return the exit code."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("template_package", "run", "session"):
            del sys.modules[name]
    os.chdir(folder)
    sys.path[0], sys.argv = folder, [f"{script}.py", *words]
    importlib.invalidate_caches()
    try:
        code: int = importlib.import_module(script).main(words)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        code = int(stop.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main(arguments: list[str]) -> int:
    """Do several training runs in the same processes, because starting ranks takes time. Return the exit code.

    arguments[0] is a JSON list of the runs' arguments, for example [["name=a", "seed=1"], ["name=b", "seed=2"]].
    """
    from template_package.config import load_config
    from template_package.launching.launcher import find_node, launch

    configs = [load_config(Path("config.yaml"), words) for words in json.loads(arguments[0])]
    node = find_node(configs[0])
    return launch(partial(train_all, configs), configs[0], node, node.num_ranks)


def train_all(configs: list[Any], rank: int, world_size: int, _: Any) -> None:
    from run import run_fn

    for config in configs:
        run_fn(rank, world_size, config)


if __name__ == "__main__":
    start_fork_server()
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        for line in sys.stdin:
            print(run(**json.loads(line)), file=replies, flush=True)

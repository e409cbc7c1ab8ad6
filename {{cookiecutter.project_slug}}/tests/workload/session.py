"""Runs the tests' commands in turn, each in a process that is forked from this one, which has imported torch.

`python session.py FD` reads commands from stdin, one JSON object per line (`folder`, `script`, its arguments `words`,
variables of the environment `env`).
It writes the process's id and then its exit code to file descriptor FD, and what the command prints to stdout.
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SLOW = ["torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torchmetrics"]
SLOW += ["tqdm", "pydantic", "safetensors.torch", "lightning_utilities.core.apply_func"]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Forked:
    """Takes the place of Popen in core/launch.py: a process takes seconds to import torch, and a fork does not."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        self._code: int | None = None
        self._pid = fork(os.getcwd(), Path(command[1]).stem, command[2:], env)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, _: float) -> None:
        with suppress(ChildProcessError):  # poll() has waited for it
            os.waitpid(self._pid, 0)


def fork(folder: str, script: str, words: Sequence[str], env: Mapping[str, str]) -> int:
    """Do what `python <script>.py <words>` would do in `folder`, in a new process. Return its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    os.environ |= env
    os.chdir(folder)
    sys.path[0], sys.argv = folder, [f"{script}.py", *words]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        (path,) = Path(folder).glob("*/core/launch.py")
        launch = importlib.import_module(f"{path.parents[1].name}.core.launch")
        vars(launch)["Popen"] = Forked
        code: int = importlib.import_module(script).main(list(words))
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: list[str]) -> int:
    """Do several training runs in the same processes, because starting ranks takes time. Return the exit code.

    arguments[0] is a JSON list of the runs' arguments, for example [["name=a", "seed=1"], ["name=b", "seed=2"]].
    """
    from template_package.core.launch import (
        DONE,
        choose_devices,
        start_ranks,
    )
    from template_package.core.settings import read_command_line

    from run import run_fn

    os.environ.pop("DDP_SETTINGS", None)  # those of the first run
    lines = [read_command_line(words, Path("config.yaml")) for words in json.loads(arguments[0])]
    devices = None if "RANK" in os.environ else choose_devices(lines[0])
    if devices is not None and len(devices.names) > 1:
        return start_ranks(devices, lines[0])
    from template_package.core.group import join, leave

    place = join(lines[0], lines[0].load_config().launch, devices)
    codes = [
        run_fn(place.rank, place.world_size, line.load_config(), place, line) for line in lines
    ]
    leave()
    return max(codes) or DONE * ("RANK" in os.environ)


if __name__ == "__main__":
    for name in SLOW:
        importlib.import_module(name)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # those to the whole group, too
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        for line in sys.stdin:
            pid = fork(**json.loads(line))
            print(pid, file=replies, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=replies, flush=True)

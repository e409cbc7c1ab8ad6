"""Trains on the devices that config.yaml names: one process per device, which calls run_fn().

python run.py                                   trains on the devices in device_ids
python run.py device_ids=cpu,cpu name=first     overrides keys of config.yaml for this run
torchrun --nproc-per-node=2 run.py              trains on two ranks that torchrun starts
python run.py evaluate                          evaluates the best checkpoint of the run
"""

import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from template_package.core.launch import (
        DONE,
        PARENT,
        Devices,
        as_stop,
        choose_devices,
        start_ranks,
        tell_failure,
    )
    from template_package.core.processes import (
        STOP_SIGNALS,
        die_with_parent,
        end_process,
        settle_process,
    )
    from template_package.core.settings import (
        CommandLine,
        read_command_line,
    )
    from template_package.errors import ConfigError
except (ModuleNotFoundError, AttributeError) as missing:
    text = f"{sys.executable}: {missing}. Activate this project's environment, or type: python -m pip install "
    text += "-c constraints.txt -e ."
    if not hasattr(signal, "SIGHUP"):
        text = "Windows is not supported by itself. Type the command in WSL 2."
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)

if TYPE_CHECKING:  # the process that starts the ranks does not import torch
    from template_package.core.config import Config
    from template_package.core.ranks import Rank

STARTED_AT = time.time()
ON_RANKS = ("train", "evaluate", "predict")


def module_of(line: CommandLine) -> Any:
    return import_module(f"template_package.commands.{line.command}")


def run_fn(rank: int, world_size: int, config: "Config", place: "Rank", line: CommandLine) -> int:
    """Do the command's work as rank `rank` of `world_size`. Return the exit code."""
    from template_package.core.checkpoint import run_lock
    from template_package.core.group import StopRequest
    from template_package.core.logs import rank_log
    from template_package.core.task import find_task
    from template_package.files import run_directory
    from template_package.trainer import Trainer

    directory, task = run_directory(config.name), find_task()
    command: Any = None
    if line.command != "train":
        command = module_of(line)
    if line.command not in ON_RANKS:  # doctor starts ranks, too
        command.on_rank(place)
        return 0
    if command is not None:
        path = command.check(config, task)  # before anything is written
    with rank_log(directory, place) as log:
        console = log if world_size > 1 else sys.__stderr__
        stop = StopRequest(place, config.launch.timeout_minutes, console)
        code = 0
        if command is not None:
            command.work(path, line, config, place, task, stop)
        else:
            with run_lock(directory):
                code = Trainer(config, place, directory, task).fit(stop, STARTED_AT)
        stop.close()
    return code


def main(arguments: list[str]) -> int:
    """Return 0 on success, 2 for a user's mistake, 130 or 143 if stopped, 1 if a rank failed."""
    try:
        line = read_command_line(arguments, Path(__file__).with_name("config.yaml"))
        if line.command not in ON_RANKS and PARENT not in os.environ:
            return int(module_of(line).main(line))
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:  # a launcher has started this rank
            return run_rank(line, None)
        devices = choose_devices(line)
        world_size = len(devices.names)  # one rank per device
        return start_ranks(devices, line) if world_size > 1 else run_rank(line, devices)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run_rank(line: CommandLine, devices: Devices | None) -> int:
    """Run the command as one rank. Report an error once, whichever rank has it."""
    place: Any = None
    try:
        if devices is None:
            die_with_parent(int(os.environ.get(PARENT, os.getppid())))
            for number in STOP_SIGNALS:  # a handler would wait for the other ranks
                if signal.getsignal(number) != signal.SIG_IGN:  # start_ranks() decides on Ctrl-C
                    signal.signal(number, signal.SIG_DFL)
        from template_package.core.group import check_alike, join, leave

        config = line.load_config()
        place = join(line, config.launch, devices)
        if PARENT not in os.environ:  # torchrun may have started ranks on several nodes
            check_alike(config)
        code = run_fn(place.rank, place.world_size, config, place, line)
        leave()
        return code or DONE * (PARENT in os.environ)
    except ConfigError as error:
        tell_failure(f"error: {error}", error.exit_code, place)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:  # SystemExit too: a rank that leaves alone lets the others wait
        text = f"{place or 'this process'} failed:\n{traceback.format_exc()}"
        if type(error).__name__ == "OutOfMemoryError":  # torch's
            text += "error: a device's memory is full. Set a smaller training.micro_batch_size (loss_over: README.md)."
        if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "pydantic"):
            text = f"error: {sys.executable} has no {error.name}. Type: python -m pip install -c constraints.txt -e ."
        tell_failure(text, 1, place)
        return 1


if __name__ == "__main__":
    settle_process()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # GPU ids as nvidia-smi shows them
    # torch's threads would spin while they wait: beside other work on their cores, 4 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in STOP_SIGNALS:  # until the run can save; torch's import would lose Ctrl-C
        if signal.getsignal(name) != signal.SIG_IGN:  # nohup, and ranks of start_ranks()
            signal.signal(name, lambda number, _: os._exit(128 + as_stop(number)))
    code = main(sys.argv[1:])
    # After an error on a GPU, CUDA would abort a process that ends in the normal way.
    end_process(code, at_once="RANK" in os.environ or code == 1)

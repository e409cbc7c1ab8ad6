"""Trains on the devices that config.yaml names: one process per device, which calls run_fn().

python run.py                                   trains on the devices in device_ids
python run.py device_ids=cpu,cpu name=first     overrides keys of config.yaml for this run
torchrun --nproc-per-node=2 run.py              trains on two ranks that torchrun starts
python run.py evaluate                          evaluates the best checkpoint of the run
"""

import faulthandler
import gc
import logging
import os
import re
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from template_package.core.launch import (
        DONE,
        OUT_OF_MEMORY,
        PARENT,
        Devices,
        as_stop,
        choose_devices,
        number_of,
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
    from template_package.errors import ConfigError, StopRun, one_line
    from template_package.launchers import (
        adopt,
        become_torchrun,
        watch_others,
    )
    from template_package.optional_files import available_files
except (ModuleNotFoundError, AttributeError) as missing:
    text = f"{sys.executable}: {missing}. Activate this project's environment, or type: python -m pip install "
    text += "-c constraints.txt -e ."
    if not hasattr(signal, "SIGHUP"):
        text = "Windows is not supported by itself. Type the command in WSL 2."
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)

if TYPE_CHECKING:  # the process that starts the ranks does not import torch
    from template_package.config import Config
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
        try:
            if command is not None:
                command.work(path, line, config, place, task, stop)
                code = 0
            else:
                with run_lock(directory):
                    code = Trainer(config, place, directory, task).fit(stop, STARTED_AT)
                if place.is_main and config.logging.report and not code:
                    write_report(directory)
            stop.close()
        finally:
            faulthandler.cancel_dump_traceback_later()  # out of memory: one rank starts again
    return code


def main(arguments: list[str]) -> int:
    """Return 0 on success, 2 for a user's mistake, 130 or 143 if stopped, 1 if a rank failed."""
    try:
        line = read_command_line(arguments, Path(__file__).with_name("config.yaml"))
        if line.command not in ON_RANKS and PARENT not in os.environ:
            return int(module_of(line).main(line))
        if adopt(line):  # a launcher has started this rank
            return run_rank(line, None)
        if number_of(line, "launch.nodes", 1) > 1:
            become_torchrun(line)
        if number_of(line, "launch.wait_minutes", 0):
            line.load_config()  # a mistake is told before, not after
        devices = choose_devices(line)
        world_size = len(devices.names)  # one rank per device
        if line.get("strategy", "ddp") == "data_parallel":
            world_size = 1  # of all devices
        start = partial(run_rank, line, devices)
        if world_size > 1:
            start = partial(start_ranks, devices, line, asked=[])
        while (code := start()) == OUT_OF_MEMORY:
            heed_signals()
            gc.collect()  # a single rank's model may be part of a cycle, and still on the GPU
            print(
                "out of memory: starting again from the last checkpoint, with smaller micro-batches",
                file=sys.stderr,
            )
            attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt + 1)
        return code
    except ConfigError as error:
        print(f"error: {in_our_words(error)}", file=sys.stderr)
        return error.exit_code


def in_our_words(error: ConfigError) -> str:
    """Return its text. The extra other_words answers another tool's words with this project's."""
    text = str(error)
    about_words = "a setting is key=value|there is no such key|is a section|: must be "
    if "other_words" in available_files("extras") and re.search(about_words, text):
        with suppress(Exception):  # a file of the user cannot be imported, as the error may say
            from template_package.extras.other_words import translate

            text = "\n".join(map(translate, text.splitlines()))
    return text


def write_report(directory: Path) -> None:
    """Write the run's report.html, if the project has the command `report`. If that fails, warn."""
    if "report" in available_files("commands"):
        try:
            report = import_module("template_package.commands.report")
            report.write_report([directory], directory / "report.html")
        except Exception as error:
            logging.getLogger(__name__).warning("warning: no report.html (%s)", one_line(error))


def heed_signals() -> None:
    """Let a stop signal end this process. The ranks, or the run, take over later."""
    for name in STOP_SIGNALS:
        if signal.getsignal(name) != signal.SIG_IGN:  # nohup, and ranks of start_ranks()
            signal.signal(name, lambda number, _: os._exit(128 + as_stop(number)))


def run_rank(line: CommandLine, devices: Devices | None) -> int:
    """Run the command as one rank. Report an error once, whichever rank has it."""
    place: Any = None
    try:
        if devices is None:
            die_with_parent(int(os.environ.get(PARENT, os.getppid())))
            for number in STOP_SIGNALS:  # a handler would wait for the other ranks
                if signal.getsignal(number) != signal.SIG_IGN:  # start_ranks() decides on Ctrl-C
                    signal.signal(number, signal.SIG_DFL)
        # A child that the user forks, of a Pool for example, ends by SIGTERM, as Pool.terminate() expects.
        os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
        from torch import distributed

        from template_package.core.group import check_alike, join, leave

        config = line.load_config()
        if config.launch.debug:
            # Not DETAIL, under which DistributedDataParallel on gloo dies of SIGSEGV (torch 2.13).
            os.environ.update(TORCH_DISTRIBUTED_DEBUG="INFO", NCCL_DEBUG="INFO")
            distributed.set_debug_level_from_env()  # torch has read the environment when it was imported
        place = join(line, config.launch, devices)
        watch_others(place)
        if PARENT not in os.environ:  # torchrun may have started ranks on several nodes
            check_alike(config)
        code = run_fn(place.rank, place.world_size, config, place, line)
        leave()
        if devices is not None and distributed.is_initialized():  # by join_alone()
            gc.collect()  # gloo hangs if the model outlives the group, and may crash a normal exit
            distributed.destroy_process_group()
        return code or DONE * (PARENT in os.environ)
    except ConfigError as error:
        tell_failure(f"error: {in_our_words(error)}", error.exit_code, place)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except StopRun as stop:
        if devices is None and PARENT not in os.environ:
            text = "out of memory: the same command continues, with smaller micro-batches"
            tell_failure(f"{place} failed:\n{text}", stop.code, place)
        return stop.code
    except BaseException as error:  # SystemExit too: a rank that leaves alone lets the others wait
        text = f"{place or 'this process'} failed:\n{traceback.format_exc()}"
        if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "pydantic"):
            text = f"error: {sys.executable} has no {error.name}. Type: python -m pip install -c constraints.txt -e ."
        tell_failure(text, 1, place)
        return 1


if __name__ == "__main__":
    settle_process()
    folder = Path(__file__).parent
    if (folder / "small" / "run.py").exists() and "{" not in folder.name:
        text = "warning: cookiecutter has run no hooks here: the answers for size, example, tracker and license were "
        text += "ignored. Make the project again with --accept-hooks=yes."
        print(text, file=sys.stderr)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # GPU ids as nvidia-smi shows them
    # torch's threads would spin while they wait: beside other work on their cores, 4 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["MPLBACKEND"] = "agg"  # a notebook's own backend may be missing here
    heed_signals()  # torch's import would lose Ctrl-C
    code = main(sys.argv[1:])
    # After an error on a GPU, CUDA would abort a process that ends in the normal way.
    end_process(code, at_once="RANK" in os.environ or code == 1)

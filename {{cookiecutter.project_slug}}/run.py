"""Trains on the devices that config.yaml names: reads the config, computes world_size, and calls run_fn on each rank.

python run.py                                   trains on the devices in device_ids
python run.py device_ids=cpu,cpu name=first     overrides keys of config.yaml for this run
torchrun --nproc-per-node=2 run.py              trains on two ranks that torchrun starts
python run.py evaluate                          evaluates the best checkpoint of the run
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["CUDA_DEVICE_ORDER"] = (
    "PCI_BUS_ID"  # GPU ids as nvidia-smi shows them; before anything can start CUDA
)

if TYPE_CHECKING:  # imports are inside functions, since the process that starts the ranks does not load the trainer
    from template_package.config import Config


def run_fn(rank: int, world_size: int, config: "Config") -> None:
    """Train as rank `rank` of `world_size`. launch() has already set up the device and the process group."""
    from template_package.commands import write_report
    from template_package.core.task import find_task
    from template_package.files import run_directory
    from template_package.launching.distributed import rank_context
    from template_package.tracking import rank_logs
    from template_package.trainer import Trainer

    context, directory = rank_context(rank, world_size), run_directory(config.name)
    with rank_logs(directory, context):
        Trainer(config, context, directory, find_task()).fit()
        if context.is_main and config.logging.report:
            write_report(directory)


def main(arguments: list[str]) -> int:
    """Run the command. Return 0 on success, 2 on user error, 130/143 if stopped, 75 to ask for a restart, else 1."""
    from template_package.errors import ConfigError

    if sys.platform == "win32":  # it has no Unix signals, locks and sockets
        print(
            "error: Windows is not supported by itself. Type the command in WSL 2.", file=sys.stderr
        )
        sys.exit(2)
    try:
        from template_package.commands import parse_command_line

        line = parse_command_line(arguments, default_config=Path(__file__).with_name("config.yaml"))
        if line.command != "train":
            return line.run()
        config = line.load_config()
        from template_package.launching.launcher import find_node, launch

        node = find_node(config)
        world_size = node.num_ranks  # over all nodes: one rank per device
        # By its module's name: a profiler that runs this file has another module called __main__.
        from run import run_fn as work

        return launch(work, config, node, world_size)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "pydantic", "yaml"):
            raise
        remedy = "Activate this project's environment, or type: python -m pip install -c constraints.txt -e ."
        print(f"error: {sys.executable} has no {error.name}. {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    if sys.platform != "win32":  # there, main() says what to do
        from template_package.core.processes import settle_process

        settle_process()
    folder = Path(__file__).parent
    if (folder / "small" / "run.py").exists() and "{" not in folder.name:
        text = "warning: cookiecutter has run no hooks here: the answers for size, example, tracker and license were "
        text += "ignored. Make the project again with --accept-hooks=yes."
        print(text, file=sys.stderr)
    # a notebook's own backend may be missing here, and its import would fail
    os.environ["MPLBACKEND"] = "agg"
    # until the launcher handles them: torch's import would lose Ctrl-C
    for name in (
        signal.SIGINT,
        signal.SIGTERM,
    ):
        # others: nohup, a user's own
        if signal.getsignal(name) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):
            signal.signal(name, lambda number, _: os._exit(128 + number))
    exit_code = main(sys.argv[1:])
    from template_package.core.processes import end_process

    end_process(exit_code, at_once=False)  # launch() ends a rank that a launcher has started

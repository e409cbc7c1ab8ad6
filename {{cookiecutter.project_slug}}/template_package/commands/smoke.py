"""`python run.py smoke`: tests that your model trains, saves, resumes and evaluates on two CPU ranks."""

from ..core.smoke import smoke
from . import CommandLine

OFF = """
    launch.nodes=1 launch.node_rank=0 ddp.gradient_compression=none training.sync_batchnorm=false
    training.early_stopping_epochs=null logging.report=false logging.profile_steps=null checkpoint.sharded=false
"""


def main(line: CommandLine) -> int:
    line.load_config()  # a mistake in it is one line
    files = [f"--config={path}" for path in line.config_paths]
    return smoke([*files, *line.words, *OFF.split()])

"""Builds the user's data sets, and chooses the loader that reads the training set."""

from importlib import import_module
from typing import Any

from torch.utils.data import Dataset

from ..config import Config
from ..core.data import TrainLoader, is_stream
from ..core.random_states import seed_generators
from ..core.task import Task, inner
from ..errors import ConfigError
from ..launching.distributed import RankContext
from ..optional_files import available_files
from .orders import find_order


def build_datasets(task: Task, config: Config, context: RankContext) -> tuple[Dataset[Any], ...]:
    """Build the user's data sets with the same seed on all ranks. Local rank 0 builds (and downloads) them first."""
    seed_generators(config.seed)
    with context.local_rank_first("data"):
        return tuple(task.build_datasets(config.data))


def create_loader(dataset: Any, task: Task, config: Config, context: RankContext) -> TrainLoader:
    training, steps = config.training, config.checkpoint.every_steps
    sizes: Any = {
        "global_batch_size": training.global_batch_size,
        "micro_batch_size": training.micro_batch_size,
    }
    if not is_stream(dataset):
        order = find_order(dataset, config.seed, training.global_batch_size)
        return TrainLoader(
            dataset, task, config.loader, context, seed=config.seed, order=order, **sizes
        )
    for key, number in (
        ("training.max_steps", training.max_steps),
        ("checkpoint.every_steps", steps),
    ):
        if number is None:
            raise ConfigError(
                f"{key}=null: the training set has no __len__. Write it, or, for a stream, a number."
            )
    for name in ("sample_weights", "sample_lengths"):
        if any(getattr(one, name, None) is not None for one in (dataset, *inner(dataset))):
            raise ConfigError(
                f"{name}: a training set without __len__ and __getitem__ has none. Set it to None."
            )
    if "stream" not in available_files("extras"):
        remedy = "Copy extras/stream.py from the template (size=full), or give it __len__ and __getitem__"
        raise ConfigError(
            f"the training set can only be iterated, and this project has no extras/stream.py. {remedy}."
        )
    stream = import_module(f"{__name__.partition('.')[0]}.extras.stream")
    loader: TrainLoader = stream.StreamLoader(
        dataset, task, config.loader, context, seed=config.seed, **sizes
    )
    return loader

"""Builds the user's data sets, and chooses the loader that reads the training set."""

from typing import Any

from torch.utils.data import Dataset

from ..config import Config
from ..core.task import Task
from ..errors import ConfigError
from ..launching.distributed import RankContext
from .loader import TrainLoader, is_stream, seed_generators


def build_datasets(task: Task, config: Config, context: RankContext) -> tuple[Dataset[Any], ...]:
    """Build the user's data sets with the same seed on all ranks. Local rank 0 builds (and downloads) them first."""
    seed_generators(config.seed)
    with context.local_rank_first("data"):
        return tuple(task.build_datasets(config.data))


def create_loader(dataset: Any, task: Task, config: Config, context: RankContext) -> TrainLoader:
    training, steps, kind = config.training, config.checkpoint.every_steps, TrainLoader
    if is_stream(dataset):
        from .stream import StreamLoader  # here, since most runs do without

        kind = StreamLoader
        for key, number in (("training.max_steps", training.max_steps), ("checkpoint.every_steps", steps)):
            if number is None:
                raise ConfigError(f"{key}=null: the training set has no __len__. Write it, or, for a stream, a number.")
    sizes: Any = {"global_batch_size": training.global_batch_size, "micro_batch_size": training.micro_batch_size}
    return kind(dataset, task, config.loader, context, seed=config.seed, **sizes)

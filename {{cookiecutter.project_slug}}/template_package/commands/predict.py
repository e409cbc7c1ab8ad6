"""`python run.py predict INPUT`: applies a trained model to new inputs, and writes predictions.jsonl.

read_inputs() in dataset.py reads the inputs, and predict() in model.py computes the predictions.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import Config
from ..core.data import EvaluationLoader
from ..core.group import StopRequest
from ..core.ranks import Rank, gather_objects
from ..core.task import Function, Task
from ..data import create_evaluation_loader
from ..errors import ConfigError
from ..files import run_directory, write_predictions
from ..strategies.base import Strategy
from . import CommandLine
from .evaluate import find_checkpoint, restore

logger = logging.getLogger(__name__)


def check(_line: CommandLine, config: Config, task: Task) -> None:
    for file, name in (("dataset.py", "read_inputs"), ("model.py", "predict")):
        if getattr(task, name) is None:
            raise ConfigError(
                f"predict: {file} has no {name}(). Write it; README.md says what it takes and returns."
            )
    find_checkpoint(config, run_directory(config.name))


def work(
    line: CommandLine, config: Config, context: Rank, directory: Path, task: Task, stop: StopRequest
) -> None:
    """Compute predictions for this rank's share of the inputs. Rank 0 writes all predictions, in the inputs' order."""
    checkpoint = find_checkpoint(config, directory)
    read = partial(task.read_inputs, line.rest[0], config.data)
    _, strategy, (dataset, names) = restore(checkpoint, config, context, task, read)
    loader = create_evaluation_loader(dataset, task, config.loader, context, "prediction")
    sizes = config.evaluation.micro_batch_size, config.training.micro_batch_size
    size = next((int(size) for size in sizes if size != "auto"), 64)  # 64 if both are auto
    rows = _predict_part(task.predict, strategy, loader, size, stop.beat)
    parts = gather_objects(rows)
    strategy.close()
    if parts is not None:  # rank 0
        rows = {index: row for part in parts for index, row in part.items()}
        for row in rows.values():
            if getattr(dataset, "label_names", None) and isinstance(row.get("label"), int):
                row["label"] = dataset.label_names[row["label"]]
        whole = [{"input": names[i], **rows[i]} for i in sorted(rows)]
        lines, path = write_predictions(directory, whole), directory / "predictions.jsonl"
        # the first ones, to look at
        logger.info("%s\n%d rows: %s", "\n".join(lines[:20]), len(lines), path)


@torch.no_grad()
def _predict_part(
    predict: Function,
    strategy: Strategy,
    loader: EvaluationLoader,
    size: int,
    beat: Callable[[], None],
) -> dict[int, dict[str, Any]]:
    """Compute predictions for this rank's share of the inputs, `size` at a time. Return {input's index: prediction}."""
    rows: dict[int, dict[str, Any]] = {}
    strategy.evaluation_model.eval()
    for batch, request in loader.read(size):
        beat()
        with strategy.autocast():
            columns = predict(strategy.evaluation_model, batch)
        lists = [
            column.tolist() if hasattr(column, "tolist") else column for column in columns.values()
        ]
        for index, *values in zip(request.indices, *lists, strict=True):
            if request.num_samples:
                rows[index] = dict(zip(columns, values, strict=True))
    return rows

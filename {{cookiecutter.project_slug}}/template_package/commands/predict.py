"""`python run.py predict INPUT`: applies a trained model to new inputs, and writes predictions.jsonl.

read_inputs() in dataset.py reads the inputs, and predict() in model.py computes the predictions.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.group import StopRequest
from ..core.ranks import Rank, gather_objects
from ..core.settings import CommandLine
from ..core.task import Task
from ..errors import ConfigError
from ..files import run_directory, write_predictions
from ..trainer import Config, Evaluator
from . import evaluate

logger = logging.getLogger(__name__)


def check(config: Config, task: Task) -> Path:
    """Return the checkpoint's path, before anything is written."""
    if task.read_inputs is None or task.predict is None:
        names = "read_inputs() in dataset.py and predict() in model.py"
        raise ConfigError(f"predict: needs {names}. README.md says what they return.")
    return evaluate.check(config, task)


@torch.no_grad()
def work(
    path: Path, line: CommandLine, config: Config, rank: Rank, task: Task, stop: StopRequest
) -> None:
    """Predict for this rank's share of the inputs. Rank 0 writes all predictions, in their order."""
    read = partial(task.read_inputs, line.rest[0], config.data)
    _, strategy, (dataset, names) = evaluate.restore(path, config, rank, task, read)
    loader = Evaluator.create_loader(dataset, task, config.loader, rank, "prediction")
    sizes = config.evaluation.micro_batch_size, config.training.micro_batch_size
    size = next((int(size) for size in sizes if size != "auto"), 64)
    label_names = getattr(dataset, "label_names", None)
    strategy.evaluation_model.eval()
    rows: dict[int, dict[str, Any]] = {}
    stop.beat()
    for batch, request in loader.read(size):
        stop.beat()
        with strategy.gathered(), strategy.autocast():  # a text may need more passes on one rank
            columns = task.predict(strategy.evaluation_model, batch)
        lists = [v.tolist() if hasattr(v, "tolist") else v for v in columns.values()]
        for index, *values in zip(request.indices, *lists, strict=True):
            row = dict(zip(columns, values, strict=True))
            row = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()}
            if label_names and isinstance(row.get("label"), int):
                row["label"] = label_names[row["label"]]
            if request.num_samples:  # a rank without a share reads a sample of another's
                rows[index] = {"input": names[index], **row}
    parts = gather_objects(rows)
    strategy.close()
    if parts is not None:  # rank 0
        found = {index: row for part in parts for index, row in part.items()}
        directory = run_directory(config.name)
        lines = write_predictions(directory, [found[index] for index in sorted(found)])
        path = directory / "predictions.jsonl"
        logger.info("%s\n%d rows: %s", "\n".join(lines[:20]), len(lines), path)

"""`python run.py predict INPUT`: applies a trained model to new inputs, and writes predictions.jsonl.

read_inputs() in dataset.py reads the inputs, and predict() in model.py computes the predictions.
"""

import logging
from functools import partial
from typing import Any

import torch

from ..config import Config
from ..core.data import EvaluationLoader
from ..core.ranks import gather_objects
from ..core.task import Function, find_task
from ..data import create_evaluation_loader
from ..errors import ConfigError
from ..files import run_directory, write_predictions
from ..launching.distributed import rank_context
from ..strategies.base import Strategy
from ..tracking import rank_logs
from ..training.stopping import beat, hang_watch
from . import CommandLine
from .evaluate import find_checkpoint, restore

logger = logging.getLogger(__name__)


def main(line: CommandLine) -> int:
    if len(line.rest) != 1:
        raise ConfigError(
            f"{' '.join(['predict', *line.rest])}: takes one input: a FILE, or 'a sentence in quotes'."
        )
    task = find_task()
    for file, name in (("dataset.py", "read_inputs"), ("model.py", "predict")):
        if getattr(task, name) is None:
            raise ConfigError(
                f"predict: {file} has no {name}(). Write it; README.md says what it takes and returns."
            )
    return line.launch(partial(predict_fn, line.rest[0]))


def predict_fn(source: str, rank: int, world_size: int, config: Config) -> None:
    """Compute predictions for this rank's share of the inputs. Rank 0 writes all predictions, in the inputs' order."""
    context, directory, task = (
        rank_context(rank, world_size),
        run_directory(config.name),
        find_task(),
    )
    checkpoint = find_checkpoint(config, directory)
    with rank_logs(directory, context):
        read = partial(task.read_inputs, source, config.data)
        _, strategy, (dataset, names) = restore(checkpoint, config, context, task, read)
        with hang_watch(context, config.launch, directory):
            loader = create_evaluation_loader(dataset, task, config.loader, context, "prediction")
            sizes = config.evaluation.micro_batch_size, config.training.micro_batch_size
            size = next((int(size) for size in sizes if size != "auto"), 64)  # 64 if both are auto
            parts = gather_objects(_predict_part(task.predict, strategy, loader, size))
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
    predict: Function, strategy: Strategy, loader: EvaluationLoader, size: int
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

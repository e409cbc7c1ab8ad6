"""`python run.py predict INPUT`: what a saved model says of new inputs, on any number of devices, in predictions.jsonl.

What an input is, `read_inputs` in dataset.py says; what is predicted of it, `predict` in model.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .. import dataset as user_data
from .. import model as user_model
from ..config import Config
from ..launching.distributed import RankContext, current_context, gather_objects
from ..launching.launcher import find_node, launch
from ..strategies.base import Strategy
from ..training.checkpoint import write_whole
from ..training.evaluation_loader import EvaluationLoader
from ..training.logs import get_logger, rank_logs
from ..training.report import align
from ..training.run_files import run_directory, to_json
from ..training.watchdog import beat, hang_watched
from ..validation import ConfigError, one_line
from .evaluate import find_checkpoints, restore

_data: Any = user_data
_model: Any = user_model
"""Any: what this command calls of yours is optional."""
NUM_SHOWN = 20
"""Rows that are printed; the file holds all."""


def main(config: Config, source: str) -> int:
    """The exit code of predicting on the devices of the config."""
    for file, module, name in (("dataset.py", user_data, "read_inputs"), ("model.py", user_model, "predict")):
        if not hasattr(module, name):
            raise ConfigError(f"predict: {file} has no {name}(). Write it; README.md says what it takes and returns.")
    node = find_node(config)
    return launch(partial(predict_fn, source), config, node, sum(node.num_ranks))


def predict_fn(source: str, rank: int, world_size: int, config: Config) -> None:
    """What each rank does: predict its part of the inputs; rank 0 puts the rows in the order of the inputs."""
    context, directory = current_context(), run_directory(config)
    checkpoint = find_checkpoints(config, directory)[0]
    with rank_logs(directory, context):
        read = partial(_data.read_inputs, source, config.data)
        _, strategy, (dataset, names) = restore(checkpoint, config, context, read)
        with hang_watched(context, config.launch, directory):
            parts = gather_objects(_predict_part(strategy, dataset, config, context))
        if parts is not None:  # rank 0
            rows = {index: row for part in parts for index, row in part.items()}
            _write([{"input": names[index], **rows[index]} for index in sorted(rows)], directory / "predictions.jsonl")


@torch.no_grad()
def _predict_part(
    strategy: Strategy, dataset: Dataset[Any], config: Config, context: RankContext
) -> dict[int, dict[str, Any]]:
    """{index: row} of this rank's inputs."""
    loader = EvaluationLoader(
        dataset,
        config.loader,
        context,
        micro_batch_size=config.evaluation.micro_batch_size,
        name="prediction",
        collate=getattr(user_data, "collate", None),
    )
    label_names, rows = getattr(dataset, "label_names", None), {}
    strategy.module.eval()
    for batch, request in loader:
        beat()
        with strategy.autocast():
            columns = _model.predict(strategy.evaluation_model, batch)
        lists = [column.tolist() for column in columns.values()]
        for index, *values in zip(request.indices, *lists, strict=True):
            if request.num_samples:
                row = dict(zip(columns, values, strict=True))
                if label_names is not None and "label" in row:
                    row["label"] = label_names[row["label"]]
                rows[index] = row
    return rows


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    text = "".join(to_json(row) + "\n" for row in rows)
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    columns = [*(key for key in rows[0] if key != "input"), "input"]  # the longest last
    shown = [[f"{v:.4f}" if isinstance(v := row[key], float) else one_line(v) for key in columns] for row in rows]
    table = align([columns, *shown[:NUM_SHOWN]])
    get_logger().info("%s", "\n".join(table))
    get_logger().info("%d rows: %s", len(rows), path)

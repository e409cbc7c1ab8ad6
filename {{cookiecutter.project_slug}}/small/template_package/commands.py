"""The commands besides training: evaluate, predict and smoke."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .core.checkpoint import CheckpointFolder, check_same, load_checkpoint, read_once
from .core.config import Config, differing_keys
from .core.data import EvaluationLoader, Plan
from .core.evaluation import Evaluator
from .core.group import StopRequest
from .core.random_states import seed_generators
from .core.ranks import Rank, from_main, gather_objects
from .core.strategies import Strategy, settle_precision
from .core.task import Task
from .errors import ConfigError
from .files import write_json, write_predictions

logger = logging.getLogger(__name__)


def evaluate(config: Config, rank: Rank, directory: Path, task: Task, stop: StopRequest) -> None:
    """Evaluate the chosen checkpoint. Rank 0 writes evaluation.json."""
    path, split = find_checkpoint(config, directory), config.evaluation.split
    build = partial(task.build_datasets, config.data)
    state, strategy, datasets = restore(path, config, rank, task, build)
    for key, change in differing_keys(state["config"], config).items():
        if key.startswith("data."):
            message = "warning: %s was trained with another %s (%s). It may have seen this split."
            logger.warning(message, path, key, change)
    splits = dict(zip(("train", "validation", "test"), datasets, strict=False))
    if split not in splits:
        names = ", ".join(splits)
        raise ConfigError(f"evaluation.split={split}: build_datasets() returns {names} only.")
    evaluator = Evaluator(splits[split], split, config, rank, task)
    values = evaluator.run(strategy, stop.beat)
    num_samples, step = evaluator.num_samples, state["step"]
    if rank.is_main:
        result = {"split": split, "checkpoint": str(path), "step": step, "epoch": state["epoch"]}
        content = {**result, **values, "num_samples": num_samples}
        write_json(directory / "evaluation.json", content)
        figures = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        message = "%s (step %d), %s split (%d samples): %s"
        logger.info(message, path, step, split, num_samples, figures)


@torch.no_grad()
def predict(
    source: str, config: Config, rank: Rank, directory: Path, task: Task, stop: StopRequest
) -> None:
    """Apply the chosen checkpoint to new inputs. Rank 0 writes predictions.jsonl, in their order."""
    if task.read_inputs is None or task.predict is None:
        names = "read_inputs() in dataset.py and predict() in model.py"
        raise ConfigError(f"predict: needs {names}. README.md says what they return.")
    path = find_checkpoint(config, directory)
    read = partial(task.read_inputs, source, config.data)
    _, strategy, (dataset, names) = restore(path, config, rank, task, read)
    loader = EvaluationLoader(Plan(dataset, task, "prediction"), config.loader, rank, 0)
    sizes = config.evaluation.micro_batch_size, config.training.micro_batch_size
    size = next((int(size) for size in sizes if size != "auto"), 64)
    label_names = getattr(dataset, "label_names", None)
    strategy.module.eval()
    rows: dict[int, dict[str, Any]] = {}
    for batch, request in loader.read(size):
        stop.beat()
        with strategy.autocast():
            columns = task.predict(strategy.module, batch)
        for number, index in enumerate(request.indices[: request.num_samples]):
            row = {name: column[number] for name, column in columns.items()}
            row = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()}
            if label_names and isinstance(row.get("label"), int):
                row["label"] = label_names[row["label"]]
            rows[index] = {"input": names[index], **row}
    parts = gather_objects(rows)
    if parts is not None:  # rank 0
        found = {index: row for part in parts for index, row in part.items()}
        lines = write_predictions(directory, [found[index] for index in sorted(found)])
        path = directory / "predictions.jsonl"
        logger.info("%s\n%d rows: %s", "\n".join(lines[:20]), len(lines), path)


def restore(
    path: Path, config: Config, rank: Rank, task: Task, build: Callable[[], Any]
) -> tuple[dict[str, Any], Strategy, Any]:
    """Return the saved state, a strategy with its weights, and build()'s result."""
    state = read_once(lambda: {**load_checkpoint(path), "optimizer": {}})
    settle_precision(config, rank)
    seed = state["config"]["seed"]  # a split that build_datasets() draws is that of the training
    seed_generators(seed)
    with rank.local_rank_first("data"):
        data = build()  # it may set data.fingerprint
    check_same(state["config"], config, ("model", "data.fingerprint"), f"checkpoint {path}")
    seed_generators(seed)  # as in training: a model may keep drawn numbers
    with rank.local_rank_first("model"):
        model = task.build_model(config.model)
    strategy = Strategy(config, rank)  # whole on each rank: nothing is shared in an evaluation
    strategy.prepare(model, None)
    strategy.set_weights(state.get("average", state["model"]))  # the average is of size=full
    return state, strategy, data


def find_checkpoint(config: Config, directory: Path) -> Path:
    """Return the path that evaluation.checkpoint selects. All ranks must call this."""

    def find() -> Path:
        folder, choice = CheckpointFolder(directory / "checkpoints"), config.evaluation.checkpoint
        last = next(iter(folder.newest_first()), folder.folder / "step_*.pt")
        path = {"best": folder.best, "last": last}.get(choice, Path(choice))
        if not path.exists():
            remedy = "Train first, choose another name=…, or set evaluation.checkpoint=last"
            raise ConfigError(f"evaluation.checkpoint={choice}: there is no {path}. {remedy}.")
        return path

    return Path(from_main(find))

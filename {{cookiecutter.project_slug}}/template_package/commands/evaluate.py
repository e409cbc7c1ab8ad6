"""`python run.py evaluate`: evaluates a checkpoint on any number of devices, and writes evaluation.json."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..core.checkpoint import check_same, read_once
from ..core.config import differing_keys, to_dict
from ..core.group import StopRequest
from ..core.random_states import seed_generators
from ..core.ranks import Rank, from_main
from ..core.settings import CommandLine
from ..core.strategies import Strategy, settle_precision
from ..core.task import Task
from ..errors import ConfigError
from ..files import run_directory, write_json
from ..trainer import Checkpoints, Config, Evaluator, create_strategy

logger = logging.getLogger(__name__)


def check(config: Config, _task: Task) -> Path:
    """Return the checkpoint's path, before anything is written. All ranks must call this."""

    def find() -> Path:
        checkpoints = Checkpoints(run_directory(config.name) / "checkpoints", config.checkpoint)
        choice = config.evaluation.checkpoint
        last = next(iter(checkpoints.newest_first()), checkpoints.folder / "step_*.pt")
        path = {"best": checkpoints.best, "last": last}.get(choice, Path(choice))
        if not path.exists():
            remedy = "Train first, choose another name=…, or set evaluation.checkpoint=last"
            raise ConfigError(f"evaluation.checkpoint={choice}: there is no {path}. {remedy}.")
        return path

    return Path(from_main(find))


def work(
    path: Path, _: CommandLine, config: Config, rank: Rank, task: Task, stop: StopRequest
) -> None:
    """Evaluate the checkpoint on this rank's share. Rank 0 writes the combined result."""
    split, directory = config.evaluation.split, run_directory(config.name)
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
    stop.beat()  # the first batch may never come
    values = evaluator.run(strategy, stop.beat)
    table = evaluator.write_report(directory, path.stem, state["step"])
    strategy.close()
    if rank.is_main:
        result: dict[str, Any] = {"split": split, "checkpoint": str(path)}
        result |= {"step": state["step"], "epoch": state["epoch"], **values}
        write_json(directory / "evaluation.json", {**result, "num_samples": evaluator.num_samples})
        figures = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        message = "%s%s (step %d), %s split (%d samples): %s"
        logger.info(message, table, path, state["step"], split, evaluator.num_samples, figures)


def restore(
    path: Path, config: Config, rank: Rank, task: Task, build: Callable[[], Any]
) -> tuple[dict[str, Any], Strategy, Any]:
    """Return the saved state, a strategy with its weights, and build()'s result. All ranks call it."""
    checkpoints = Checkpoints(path.parent, config.checkpoint)
    state = read_once(partial(checkpoints.load_to_evaluate, path))
    # A split that build_datasets() draws is that of the training.
    config.seed = state.get("config", {}).get("seed", config.seed)
    settle_precision(config, rank)
    seed_generators(config.seed)
    with rank.local_rank_first("data"):
        data = build()  # it may set data.fingerprint
    stored = state.setdefault("config", to_dict(config))
    settings = f"--config {path.absolute().parents[1]}/config.yaml"
    remedy = f"Type the settings of its training again, or {settings}"
    check_same(stored, config, ("model", "data.fingerprint"), f"checkpoint {path}", remedy)
    seed_generators(config.seed)  # as in training: a model may keep drawn numbers
    with rank.local_rank_first("model"):
        model = task.build_model(config.model)
    weights = checkpoints.weights_of(state, model)
    strategy = create_strategy(config, rank)
    strategy.prepare(model, None)
    strategy.set_weights(weights)
    return state, strategy, data

"""`python run.py evaluate`: evaluates a checkpoint on any number of devices, and writes evaluation.json."""

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import Config
from ..core.checkpoint import check_same, read_once
from ..core.config import differing_keys, to_dict
from ..core.group import StopRequest
from ..core.ranks import Rank, from_main
from ..core.task import Task
from ..data import build_datasets, seed_generators
from ..errors import ConfigError
from ..files import run_directory, write_json
from ..optional_files import available_files
from ..strategies import create_strategy, settle_precision
from ..strategies.base import Strategy
from ..training.checkpoint import load_weights
from ..training.evaluation import Evaluator
from ..training.sharded import Checkpoints, load_any, read_whole
from . import CommandLine

logger = logging.getLogger(__name__)


def check(_line: CommandLine, config: Config, _task: Task) -> None:
    find_checkpoint(config, run_directory(config.name))  # the run may not exist


def work(
    _: CommandLine, config: Config, context: Rank, directory: Path, task: Task, stop: StopRequest
) -> None:
    """Evaluate the chosen checkpoint on this rank's share of the data. Rank 0 writes the combined result."""
    path = find_checkpoint(config, directory)
    state, strategy, datasets = restore(
        path, config, context, task, lambda: build_datasets(task, config, context)
    )
    for key, change in differing_keys(state["config"], config).items():
        if key.startswith("data."):
            message = "%s was trained with another %s (%s). It may have seen this split."
            logger.warning(message, path, key, change)
    splits, split = (
        dict(zip(("train", "validation", "test"), datasets, strict=False)),
        config.evaluation.split,
    )
    if split not in splits:
        raise ConfigError(
            f"evaluation.split={split}: build_datasets() returns {', '.join(splits)} only."
        )
    evaluator = Evaluator(splits[split], split, config, context, task)
    values = evaluator.run(strategy, stop.beat)
    report_path = evaluator.write_report(directory, path.stem, state["step"])
    strategy.close()
    result = {
        "split": split,
        "checkpoint": str(path),
        "step": state["step"],
        "epoch": state["epoch"],
        **values,
    }
    if context.is_main:
        write_json(directory / "evaluation.json", {**result, "num_samples": evaluator.num_samples})
        if report_path is not None and "report" in available_files("commands"):
            logger.info("%s", import_module(".report", __package__).class_table(report_path))
        figures = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        logger.info(
            f"{path} (step {state['step']}), {split} split ({evaluator.num_samples} samples): {figures}"
        )


def restore(
    path: Path, config: Config, context: Rank, task: Task, build: Callable[[], Any]
) -> tuple[Any, Strategy, Any]:
    """Return the saved state, a strategy with the saved weights, and build()'s result. All ranks must call this."""
    # other files: weights of any program
    is_checkpoint = path.name == "best.pt" or path.suffix == ".dcp" or path.stem.startswith("step_")

    def read() -> dict[str, Any]:
        if not is_checkpoint:
            return {"step": 0, "epoch": 0}
        return read_whole(load_any(path) | {"optimizer": {}})

    state = read_once(read)
    # a split that build_datasets() draws is that of the training
    config.seed = state.get("config", {}).get("seed", config.seed)
    settle_precision(config, context)
    data = build()  # it may set data.fingerprint
    name, stored = f"checkpoint {path}", state.setdefault("config", to_dict(config))
    remedy = f"Type the settings of its training again, or --config {path.absolute().parents[1]}/config.yaml"
    check_same(stored, config, ("model", "data.fingerprint"), name, remedy)
    # as in training: a model may keep drawn numbers that no checkpoint holds
    seed_generators(config.seed)
    with context.local_rank_first("model"):
        model = task.build_model(config.model)
    if not is_checkpoint:
        load_weights(model, path)
        state["model"] = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    strategy = create_strategy(config, context)
    strategy.prepare(model)
    strategy.set_weights(state.get("average", state["model"]))
    return state, strategy, data


def find_checkpoint(config: Config, directory: Path) -> Path:
    """Return the path of the checkpoint that `evaluation.checkpoint` selects. All ranks must call this function."""

    def find() -> Path:
        checkpoints = Checkpoints(directory / "checkpoints", config)
        choice = config.evaluation.checkpoint
        last = next(iter(checkpoints.newest_first()), checkpoints.folder / "step_*.pt")
        path = {"best": checkpoints.best, "last": last}.get(choice, Path(choice))
        if not path.exists():
            remedy = "Train first, or choose another name=…; without evaluations set evaluation.checkpoint=last."
            raise ConfigError(f"evaluation.checkpoint={choice}: there is no {path}. {remedy}")
        return path

    return Path(from_main(find))

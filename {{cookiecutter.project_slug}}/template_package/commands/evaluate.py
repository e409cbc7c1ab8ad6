"""`python run.py evaluate`: loss and metrics of saved checkpoints, on any number of devices, into evaluation.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .. import dataset as user_data
from .. import model as user_model
from ..config import Config, differing_keys, to_dict
from ..launching.distributed import RankContext, current_context, from_main, pack, unpack
from ..launching.launcher import find_node, launch
from ..strategies import create_strategy
from ..strategies.base import Strategy
from ..training.checkpoint import CheckpointFolder, load_checkpoint
from ..training.evaluation import Evaluator
from ..training.logs import get_logger, rank_logs
from ..training.random_state import seed_generators
from ..training.report import align, report_stem, show_report
from ..training.resuming import check_same_values
from ..training.run_files import run_directory, write_json
from ..training.watchdog import hang_watched
from ..training.weights import check_weights, shapes_of
from ..validation import ConfigError

Data = TypeVar("Data")


def main(config: Config) -> int:
    """The exit code of evaluating on the devices of the config."""
    node = find_node(config)
    return launch(evaluate_fn, config, node, sum(node.num_ranks))


def evaluate_fn(rank: int, world_size: int, config: Config) -> None:
    """What each rank does: evaluate each checkpoint of `evaluation.checkpoint` on `evaluation.split`."""
    context, directory = current_context(), run_directory(config)
    paths = find_checkpoints(config, directory)  # before anything is written: the run may not exist
    with rank_logs(directory, context):
        results = [evaluate_checkpoint(path, config, context) for path in paths]
        if context.is_main:
            write_json(directory / "evaluation.json", results[0] if len(results) == 1 else {"evaluations": results})
            for result, path in zip(results, paths, strict=True):
                stem = report_stem(directory, result["split"], path.stem)
                if Path(f"{stem}.json").exists():
                    get_logger().info("%s\n", show_report(stem))
            get_logger().info("%s", _table(results))


def evaluate_checkpoint(path: Path, config: Config, context: RankContext) -> dict[str, Any]:
    """{"split", "checkpoint", "step", "epoch", "loss", <metrics>, "num_samples"}; all ranks call it."""
    state, strategy, datasets = restore(path, config, context, lambda: user_data.build_datasets(config.data))
    if lines := differing_keys({"data": state["config"]["data"]}, {"data": to_dict(config)["data"]}):
        words = "%s was trained with other values: %s. It may have seen samples of this split."
        get_logger().warning(words, path, "; ".join(lines))
    splits = dict(zip(("train", "validation", "test"), datasets, strict=False))
    split = config.evaluation.split
    if split not in splits:
        raise ConfigError(
            f"evaluation.split={split}: build_datasets() in dataset.py returns {', '.join(splits)} only. "
            "Return a third data set for testing, or set evaluation.split=validation."
        )
    evaluator = Evaluator(splits[split], split, config, context)
    with hang_watched(context, config.launch, run_directory(config)):
        values = evaluator.run(strategy)
    evaluator.write_report(run_directory(config), path.stem, state["step"])
    counts = {"split": split, "checkpoint": str(path), "step": state["step"], "epoch": state["epoch"]}
    return {**counts, **values, "num_samples": evaluator.num_samples}


def restore(
    path: Path, config: Config, context: RankContext, build_data: Callable[[], Data]
) -> tuple[dict[str, Any], Strategy, Data]:
    """A checkpoint's state, its weights under the config's strategy, and what build_data gives; all ranks call it."""
    state: dict[str, Any] = unpack(from_main(lambda: pack(load_checkpoint(path))))
    its_config = path.absolute().parent.parent / "config.yaml"
    remedy = "Type the words of its training again" + (f", or --config {its_config}" if its_config.exists() else "")
    check_same_values(state["config"], to_dict(config), ("model",), f"checkpoint {path}", remedy)
    seed_generators(config.seed)
    with context.local_rank_first():
        data = build_data()
    check_same_values(state["config"], to_dict(config), ("data.fingerprint",), f"checkpoint {path}", remedy)
    model = user_model.build_model(config.model)
    check_weights(shapes_of(model), state["model"], f"checkpoint {path}")
    model.load_state_dict(state["model"])
    strategy = create_strategy(config, context)
    strategy.prepare(model)
    return state, strategy, data


def find_checkpoints(config: Config, directory: Path) -> list[Path]:
    """The files that `evaluation.checkpoint` names; all ranks call it."""

    def find() -> list[Path]:
        checkpoints = CheckpointFolder(directory / "checkpoints", keep_last=None)
        named = {"best": checkpoints.best, "last": checkpoints.latest() or checkpoints.folder / "step_*.pt"}
        if not checkpoints.folder.exists() and named.keys() & set(config.evaluation.checkpoint):
            runs = sorted(path.parent.name for path in directory.parent.glob("*/checkpoints"))
            there = f"there are {', '.join(runs)}" if runs else "nothing was trained here yet"
            raise ConfigError(f"name={config.name}: there is no {directory}; {there}. Train first, or name another.")
        return [named.get(word) or Path(word) for word in config.evaluation.checkpoint]

    paths: list[Path] = from_main(find)
    return paths


def _table(results: list[dict[str, Any]]) -> str:
    columns = [key for key in results[0] if key != "split"]
    rows = [[f"{v:.4f}" if isinstance(v := result[key], float) else str(v) for key in columns] for result in results]
    return "\n".join([f"{results[0]['split']} split", *align([columns, *rows])])

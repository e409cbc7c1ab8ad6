"""The commands besides training: evaluate, predict and smoke."""

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .core.checkpoint import CheckpointFolder, check_same, check_shapes, load_checkpoint, read_once
from .core.config import Config, build_config, differing_keys, to_dict
from .core.data import EvaluationLoader
from .core.evaluation import Evaluator
from .core.random_states import seed_generators
from .core.ranks import Rank, StopRequest, from_main, gather_objects
from .core.settings import CommandLine
from .core.strategies import Strategy, set_backends, settle_precision
from .core.task import Task
from .errors import ConfigError
from .files import RUNS_FOLDER, write_json, write_whole

logger = logging.getLogger(__name__)


def evaluate(config: Config, rank: Rank, directory: Path, task: Task, stop: StopRequest) -> None:
    """Evaluate the chosen checkpoint. Rank 0 writes evaluation.json."""
    path = find_checkpoint(config, directory)
    state, strategy, datasets = restore(
        path, config, rank, task, lambda: task.build_datasets(config.data)
    )
    changes = differing_keys(state["config"], to_dict(config))
    if lines := [f"{key}: {change}" for key, change in changes.items() if key[:5] == "data."]:
        message = "%s was trained with other values: %s. It may have seen samples of this split."
        logger.warning(message, path, "; ".join(lines))
    splits = dict(zip(("train", "validation", "test"), datasets, strict=False))
    split = config.evaluation.split
    if split not in splits:
        names = ", ".join(splits)
        raise ConfigError(f"evaluation.split={split}: build_datasets() returns {names} only.")
    evaluator = Evaluator(splits[split], split, config, rank, task)
    values = evaluator.run(strategy, partial(_beat, stop))
    if rank.is_main:
        place = {"split": split, "checkpoint": str(path), "step": state["step"]}
        result = {**place, "epoch": state["epoch"], **values, "num_samples": evaluator.num_samples}
        write_json(directory / "evaluation.json", result)
        figures = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        of_split = f"{split} split ({evaluator.num_samples} samples)"
        logger.info("%s (step %d), %s: %s", path, state["step"], of_split, figures)


@torch.no_grad()
def predict(
    source: str, config: Config, rank: Rank, directory: Path, task: Task, stop: StopRequest
) -> None:
    """Apply the chosen checkpoint to new inputs. Rank 0 writes predictions.jsonl, in their order."""
    for file, name in (("dataset.py", "read_inputs"), ("model.py", "predict")):
        if getattr(task, name) is None:
            raise ConfigError(f"predict: {file} has no {name}(). README.md says what it does.")
    path = find_checkpoint(config, directory)
    read = partial(task.read_inputs, source, config.data)
    _, strategy, (dataset, names) = restore(path, config, rank, task, read)
    loader = EvaluationLoader(dataset, task, config.loader, rank, "prediction")
    sizes = config.evaluation.micro_batch_size, config.training.micro_batch_size
    size = next((int(size) for size in sizes if size != "auto"), 64)
    strategy.module.eval()
    rows: dict[int, dict[str, Any]] = {}
    for batch, request in loader.read(size):
        stop.beat()
        with strategy.autocast():
            columns = task.predict(strategy.module, batch)
        lists = [list(map(_plain, column)) for column in columns.values()]
        for index, *values in zip(request.indices, *lists, strict=True):
            if request.num_samples:
                rows[index] = dict(zip(columns, values, strict=True))
    parts = gather_objects(rows)
    if parts is not None:  # rank 0
        rows = {index: row for part in parts for index, row in part.items()}
        label_names = getattr(dataset, "label_names", None)
        for row in rows.values():
            if label_names and isinstance(row.get("label"), int):
                row["label"] = label_names[row["label"]]
        whole = [{"input": names[index], **rows[index]} for index in sorted(rows)]
        lines = [json.dumps(row, ensure_ascii=False) for row in whole]
        target, text = directory / "predictions.jsonl", "".join(f"{line}\n" for line in lines)
        write_whole(target, lambda beside: beside.write_text(text, encoding="utf-8"))
        logger.info("%s\n%d rows: %s", "\n".join(lines[:20]), len(lines), target)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _beat(stop: StopRequest) -> int:
    stop.beat()
    return 0


def restore(
    path: Path, config: Config, rank: Rank, task: Task, build: Callable[[], Any]
) -> tuple[dict[str, Any], Strategy, Any]:
    """Return the saved state, a strategy with its weights, and build()'s result."""
    state = read_once(lambda: {**load_checkpoint(path), "optimizer": {}})
    config = settle_precision(config, rank)
    set_backends(config)
    seed_generators(config.seed)
    with rank.local_rank_first("data"):
        data = build()  # it may set data.fingerprint
    remedy = "Type the settings of its training again"
    wanted = ("model", "data.fingerprint")
    check_same(state["config"], to_dict(config), wanted, f"checkpoint {path}", remedy)
    seed_generators(config.seed)  # as in training: a model may keep drawn numbers
    with rank.local_rank_first("model"):
        model = task.build_model(config.model)
    strategy = Strategy(config, rank)  # whole on each rank: nothing is shared in an evaluation
    strategy.prepare(model, None)
    check_shapes(strategy.shapes, state["model"], f"checkpoint {path}")
    strategy.set_weights(state.get("average", state["model"]))
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


FOLDER = Path(".smoke")
SAVED_STEP, LAST_STEP = 2, 4
SHORT = f"""
    name=first device_ids=cpu,cpu strategy=ddp launch.nodes=1 launch.backend=gloo
    loader.num_workers=0 training.epochs={LAST_STEP} training.max_steps={LAST_STEP}
    evaluation.every_steps={SAVED_STEP} evaluation.every_epochs=null evaluation.split=validation
    evaluation.checkpoint=last checkpoint.every_steps={SAVED_STEP} checkpoint.every_epochs=null
    checkpoint.keep_last=null checkpoint.resume=auto logging.every_steps=1 logging.tracker=none
    logging.progress_bar=false
"""


def smoke(line: CommandLine) -> int:
    """Train, save, resume and evaluate on two CPU ranks. Print PASSED or FAILED."""
    build_config(line.settings)  # a mistake in it is one line
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    paths = [f"--config={path}" for path in line.config_paths]
    try:
        num_samples = _train_resume_evaluate([*paths, *line.words, *SHORT.split()])
    except (AssertionError, subprocess.TimeoutExpired) as error:
        shutil.rmtree(FOLDER / "runs", ignore_errors=True)
        print(f"{error}\nsmoke test: FAILED ({FOLDER / 'log.txt'} has the whole output)")
        return 1
    shutil.rmtree(FOLDER)
    what = f"2 gloo ranks on CPU trained, saved step {SAVED_STEP}, went on from there"
    print(f"smoke test: PASSED ({what}, evaluated {num_samples} samples)")
    return 0


def _train_resume_evaluate(settings: list[str]) -> int:
    first, second = FOLDER / "runs" / "first", FOLDER / "runs" / "second"
    _run("training on two ranks", settings)
    log = (first / "logs" / "rank_0.log").read_text(encoding="utf-8")
    print(*re.findall("warning: .*\n", log), sep="", end="")
    # The second run finds the checkpoint of a run that was killed after the saved step.
    later = shutil.ignore_patterns(f"step_*{LAST_STEP}.pt", "best.pt", "*.jsonl", "*.safetensors")
    shutil.copytree(first, second, ignore=later)
    _run("resuming from the checkpoint", [*settings, "name=second"])
    before, after = _losses(first), _losses(second)
    expected = [*range(SAVED_STEP + 1, LAST_STEP + 1)]
    _require([*after] == expected, f"the second run did not resume after step {SAVED_STEP}")
    for step, loss in after.items():
        # Some CPU kernels do not add in a fixed order.
        is_equal = math.isclose(loss, before[step], rel_tol=1e-4)
        _require(is_equal, f"step {step}: {loss} after the resume, {before[step]} without it")
    _run("evaluating", [*settings, "name=second"], command="evaluate")
    evaluation = json.loads((second / "evaluation.json").read_text(encoding="utf-8"))
    _require(evaluation["step"] == LAST_STEP, f"evaluated step {evaluation['step']}")
    return int(evaluation["num_samples"])


def _run(task: str, arguments: list[str], command: str = "train") -> None:
    """Run run.py with its output in .smoke/. If it fails, raise AssertionError with its last lines."""
    print(f"smoke test: {task} …", flush=True)
    script, hidden = Path(__file__).parents[1] / "run.py", ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    environment[RUNS_FOLDER] = str(FOLDER / "runs")
    log = FOLDER / "log.txt"
    with log.open("ab") as file:
        words = [sys.executable, str(script), command, *arguments]
        code = subprocess.call(words, env=environment, stdout=file, stderr=file, timeout=300)
    last_lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    _require(code == 0, "\n".join([f"{task}: exit code {code}", *last_lines]))


def _require(is_true: bool, problem: str) -> None:
    if not is_true:  # an assert would check nothing under `python -O`
        raise AssertionError(problem)


def _losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}

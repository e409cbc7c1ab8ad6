"""`python run.py smoke`: two gloo ranks on the CPU train your model, save, are resumed by a second run, and evaluate.

This process only starts them and reads the files they leave: what it says is what is on the disk. Nothing stays when
it passes; when it fails, .smoke/log.txt does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from .. import model as user_model
from ..config import Config, to_dict
from ..launching.environment import RUNS_FOLDER
from ..training.checkpoint import load_checkpoint

FOLDER = Path(".smoke")
SAVED_STEP, LAST_STEP = 2, 4
TIMEOUT_SECONDS = 300.0
RELATIVE_TOLERANCE = 1e-4  # the resumed steps repeat the first run's; some CPU kernels do not add in a fixed order


class SmokeError(Exception):
    """What the smoke test found."""


def main(config: Config) -> int:
    """0 and `smoke test: PASSED`, or 1 and `smoke test: FAILED`, with what was found."""
    started_at = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    (FOLDER / "config.yaml").write_text(yaml.safe_dump(to_dict(_small(config)), allow_unicode=True), encoding="utf-8")
    try:
        for warning in loose_parts(user_model.build_model(config.model)):
            print(f"warning: {warning}")
        num_samples = _train_resume_evaluate()
    except SmokeError as error:
        for entry in FOLDER.iterdir():
            if entry.name != "log.txt":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        print(f"{error}\nsmoke test: FAILED ({FOLDER / 'log.txt'} has the whole output)")
        return 1
    shutil.rmtree(FOLDER)
    seconds = time.monotonic() - started_at
    print(
        f"smoke test: PASSED (2 gloo ranks on CPU trained, saved step {SAVED_STEP}, went on at step {SAVED_STEP + 1}, "
        f"evaluated {num_samples} samples; {seconds:.0f} s)"
    )
    return 0


def loose_parts(model: nn.Module) -> Iterator[str]:
    """A warning for each attribute that holds, in lists or dicts if need be, what PyTorch does not find there: tensors,
    which model.to(device) leaves behind, and modules, whose weights are not even trained.
    """
    known = {id(part) for part in (*model.parameters(), *model.buffers(), *model.modules())}
    internal = vars(nn.Module()).keys()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in internal or isinstance(value, nn.Module):  # one in __dict__ has been hidden on purpose
                continue
            held = [part for part in _held(value) if id(part) not in known]
            place = f"model.{name}.{key}" if name else f"model.{key}"
            if any(isinstance(part, Tensor) for part in held):
                yield (
                    f"{place} {'is' if isinstance(value, Tensor) else 'holds'} a tensor outside parameters and "
                    "buffers: it stays on the CPU when the model moves to a GPU. "
                    f'Use self.register_buffer("{key}", ...), with persistent=False if checkpoints need not hold it.'
                )
            if kinds := sorted({type(part).__name__ for part in held if isinstance(part, nn.Module)}):
                yield (
                    f"{place} holds modules that the model does not know ({', '.join(kinds)}): their weights are not "
                    "trained, not saved and not moved to a GPU. Make it an nn.ModuleList or an nn.ModuleDict."
                )


def _held(value: Any) -> list[Any]:
    """The tensors and modules that are this value or stand in it, however deep its lists, tuples, sets and dicts."""
    parts, waiting, seen = [], [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor | nn.Module):
            parts.append(item)
        elif isinstance(item, list | tuple | set | frozenset | dict) and id(item) not in seen:
            seen.add(id(item))  # a list may hold itself
            waiting += item.values() if isinstance(item, dict) else item
    return parts


def _small(config: Config) -> Config:
    """The user's config with a few steps on two CPU ranks."""
    return replace(
        config,
        name="first",
        device_ids=["cpu", "cpu"],
        strategy="ddp",
        launch=replace(config.launch, nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=0, backend="gloo"),
        loader=replace(config.loader, num_workers=0),
        ddp=replace(config.ddp, gradient_compression="none"),  # it and SyncBatchNorm: not on every CPU
        training=replace(
            config.training, epochs=LAST_STEP, max_steps=LAST_STEP, early_stopping_epochs=None, sync_batchnorm=False
        ),
        evaluation=replace(
            config.evaluation, every_steps=SAVED_STEP, every_epochs=None, checkpoint=["last"], split="validation"
        ),
        checkpoint=replace(config.checkpoint, every_steps=SAVED_STEP, every_epochs=None, keep_last=None, resume="auto"),
        logging=replace(config.logging, every_steps=1, tracker="none", progress_bar=False, profile_steps=None),
    )


def _train_resume_evaluate() -> int:
    """The number of samples evaluated. SmokeError if what the runs leave on the disk is not what it must be."""
    first, second = FOLDER / "runs" / "first", FOLDER / "runs" / "second"
    _run("training on two ranks")
    saved = first / "checkpoints" / f"step_{SAVED_STEP:08d}.pt"
    _require(saved.exists(), f"training left no checkpoint {saved}")

    # The second run finds what a run killed after the saved step would have left.
    shutil.copytree(first, second, ignore=shutil.ignore_patterns(f"step_{LAST_STEP:08d}.pt", "best.pt"))
    _run("resuming from the checkpoint", "name=second")
    before, after = _lines(first), _lines(second)
    _require([line["step"] for line in after] == list(range(1, LAST_STEP + 1)), f"steps in metrics.jsonl: {after}")
    _require(after[:SAVED_STEP] == before[:SAVED_STEP], "the resumed run trained steps that were done already")
    _require(after[SAVED_STEP:] != before[SAVED_STEP:], "the resumed run did not train")
    for ours, theirs in zip(after, before, strict=True):
        is_equal = math.isclose(ours["loss"], theirs["loss"], rel_tol=RELATIVE_TOLERANCE)
        _require(
            is_equal,
            f"step {ours['step']}: the resumed run's loss is {ours['loss']}, the uninterrupted one's {theirs['loss']}",
        )
    last = load_checkpoint(second / "checkpoints" / f"step_{LAST_STEP:08d}.pt")
    _require(last["step"] == LAST_STEP, f"the last checkpoint holds step {last['step']}")

    _run("evaluating", "name=second", command="evaluate")
    evaluation = json.loads((second / "evaluation.json").read_text(encoding="utf-8"))
    _require(evaluation["step"] == LAST_STEP, f"evaluate looked at step {evaluation['step']}")
    _require(math.isfinite(float(evaluation["loss"])), f"evaluation loss is {evaluation['loss']}")
    num_samples: int = evaluation["num_samples"]
    return num_samples


def _run(what: str, *words: str, command: str = "train") -> None:
    """Run run.py where you would, its runs in the scratch folder; SmokeError with its last lines if it fails."""
    print(f"smoke test: {what} …", flush=True)
    script = Path(__file__).parents[2] / "run.py"
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
    environment[RUNS_FOLDER] = str(FOLDER / "runs")
    with (FOLDER / "log.txt").open("a+", encoding="utf-8", errors="replace") as log:
        start = log.seek(0, os.SEEK_END)
        try:
            done = subprocess.run(
                [sys.executable, str(script), command, "--config", str(FOLDER / "config.yaml"), *words],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SmokeError(f"{what}: no end within {TIMEOUT_SECONDS:.0f} s") from None
        log.seek(start)
        output = log.read().splitlines()
    if done.returncode != 0:
        raise SmokeError("\n".join([f"{what}: exit code {done.returncode}", *output[-20:]]))


def _lines(run: Path) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["split"] == "train"]


def _require(is_met: bool, finding: str) -> None:
    if not is_met:
        raise SmokeError(finding)

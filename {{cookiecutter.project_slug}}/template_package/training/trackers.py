"""TensorBoard and Weights & Biases, behind the two calls that a run makes: record and close."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import Config, to_dict
from .checkpoint import write_whole
from .logs import get_logger
from .workers import is_of_worker

Value = float | int | str


def start_tracker(config: Config, run_directory: Path, resumed_step: int) -> Tracker | None:
    """What logging.tracker names; None, with a warning, if it cannot be had."""
    name = config.logging.tracker
    try:
        if name == "tensorboard":
            return Tracker(name, _TensorBoard(run_directory, resumed_step))
        if name == "wandb":
            return Tracker(name, _Wandb(run_directory, to_dict(config)))
    except Exception as error:  # missing, or at odds with another library: no reason to lose a run
        remedy = f" Try: pip install {name}." if isinstance(error, ImportError) else ""
        reason = " ".join(str(error).split())
        get_logger().warning(f"warning: no logging.tracker={name} ({reason}); figures go to metrics.jsonl.{remedy}")
    return None


class Tracker:
    """One that the run does without from its first failure on: metrics.jsonl has all that it would show."""

    def __init__(self, name: str, tracker: _TensorBoard | _Wandb) -> None:
        self._name = name
        self._tracker: _TensorBoard | _Wandb | None = tracker

    def record(self, values: Mapping[str, Value]) -> None:
        self._try(lambda tracker: tracker.record(values))

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, call: Callable[[_TensorBoard | _Wandb], None]) -> None:
        try:
            if self._tracker is not None:
                call(self._tracker)
        except Exception as error:
            if is_of_worker(error):  # torch raises it wherever this process then is
                raise
            self._tracker = None
            words = "warning: logging.tracker=%s has failed (%s): it is left out from here on, metrics.jsonl is not"
            get_logger().warning(words, self._name, " ".join(str(error).split()))


class _TensorBoard:
    def __init__(self, run_directory: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _without_disk_errors
        # TensorBoard hides what a former start wrote of the steps from purge_step on: they come again.
        self._writer = SummaryWriter(str(run_directory / "tensorboard"), purge_step=resumed_step + 1)

    def record(self, values: Mapping[str, Value]) -> None:
        for tag, value in _scalars(values).items():
            self._writer.add_scalar(tag, value, int(values["step"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run_directory: Path, run_config: dict[str, Any]) -> None:
        import wandb

        id_file = run_directory / "wandb_id.txt"  # the same command later continues the same run
        if not id_file.exists():
            write_whole(id_file, lambda beside: beside.write_text(uuid.uuid4().hex, encoding="utf-8"))
        self._run = wandb.init(
            project=wandb.setup().settings.project or run_directory.resolve().parents[1].name,  # WANDB_PROJECT, or ours
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            name=run_directory.name,
            dir=str(run_directory),
            config=run_config,
        )
        # Steps after the checkpoint come again after a resume; wandb's own step cannot go back.
        self._run.define_metric("*", step_metric="step")

    def record(self, values: Mapping[str, Value]) -> None:
        self._run.log({"step": values["step"], **_scalars(values)})

    def close(self) -> None:
        self._run.finish()


def _without_disk_errors(error: threading.ExceptHookArgs) -> None:
    """A full disk ends TensorBoard's thread; the next call to it fails, and is told: a traceback says no more."""
    if not isinstance(error.exc_value, OSError) or not type(error.thread).__module__.startswith("tensorboard"):
        threading.__excepthook__(error)


def _scalars(values: Mapping[str, Value]) -> dict[str, Value]:
    """{"train/loss": 0.1, …}, as the trackers name them."""
    return {f"{values['split']}/{key}": value for key, value in values.items() if key not in ("split", "step")}

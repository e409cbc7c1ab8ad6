"""What people and tools read while a run goes on: metrics.jsonl, TensorBoard or Weights & Biases, the progress bar.

A number that JSON does not know is written as one of the strings "NaN", "Infinity", "-Infinity", which Python's float()
and JavaScript's Number() read back. Where words go is logs.py's.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import LoggingConfig
from .checkpoint import write_whole
from .logs import console, get_logger, print_above
from .progress import Progress

Value = float | int | str
NOT_SHOWN = ("split", "step", "epoch", "learning_rate", "num_samples", "samples_per_second")


class Tracking:
    """Rank 0 writes and shows; on the other ranks each method does nothing."""

    def __init__(
        self,
        run_directory: Path,
        config: LoggingConfig,
        run_config: dict[str, Any],
        is_main: bool,
        *,
        progress: Progress,
        total_steps: int,
    ) -> None:
        self._is_main, self._resumed_step, self._total_steps = is_main, progress.step, total_steps
        self._bar: tqdm | None = None
        self._tracker: _TensorBoard | _Wandb | None = None
        self._epoch_line = ""
        self._started = self._epoch_started = time.perf_counter()
        if not is_main:
            return
        path = run_directory / "metrics.jsonl"
        _cut(path, progress.step + (0.0 if progress.is_evaluation_pending else 0.5))
        self._metrics = path.open("a", encoding="utf-8")
        if progress.step < total_steps:
            self._tracker = _start_tracker(config.tracker, run_directory, run_config, progress.step)
            has_bar = console().isatty() if config.progress_bar == "auto" else config.progress_bar
            self._bar = _make_bar(progress.step, total_steps) if has_bar else None
            print_above(self._bar)

    def record(self, values: Mapping[str, Value]) -> None:
        """Write {"split", "step", "epoch", "loss", ...} down as one JSON line, and show it."""
        if not self._is_main:
            return
        self._metrics.write(json.dumps({key: _for_json(value) for key, value in values.items()}) + "\n")
        self._metrics.flush()
        if self._tracker is not None:
            self._tracker.record(values)
        step, split, figures = values["step"], values["split"], _figures(values)
        if split != "train" and self._epoch_line:
            self._epoch_line += f", {split} {figures}"
        elif split != "train":
            self.message(f"step {step}: {split} {figures}")
        elif self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
        else:
            self.message(f"step {step}/{self._total_steps}: {figures}, {self._time_left(int(step))} left")

    def end_epoch(self, epoch: int, mean_loss: float) -> None:
        """Begin the epoch's line on the console; an evaluation that follows before the next step completes it."""
        if self._is_main:
            self._show_epoch()
            self._epoch_line = f"epoch {epoch}: training loss {mean_loss:.4g}"

    def advance(self, step: int) -> None:
        """Move the bar to `step`. Called at each step: it costs next to nothing unless the bar is due."""
        if self._epoch_line:
            self._show_epoch()
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def message(self, text: str) -> None:
        """One line on the console and in rank 0's log."""
        if self._is_main:
            get_logger().info("%s", text)

    def close(self) -> None:
        """End the bar, the tracker and the file."""
        if not self._is_main:
            return
        self._show_epoch()
        print_above(None)
        if self._bar is not None:
            self._bar.close()
        if self._tracker is not None:
            self._tracker.close()
        self._metrics.close()

    def _show_epoch(self) -> None:
        if self._epoch_line:
            seconds = time.perf_counter() - self._epoch_started
            self._epoch_started += seconds
            self.message(f"{self._epoch_line}, {seconds:.1f} s")
            self._epoch_line = ""

    def _time_left(self, step: int) -> timedelta:
        seconds_a_step = (time.perf_counter() - self._started) / max(1, step - self._resumed_step)
        return timedelta(seconds=round(seconds_a_step * (self._total_steps - step)))


def _make_bar(resumed_step: int, total_steps: int) -> tqdm:
    tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore of the system, which a killed rank would leave behind
    tqdm.monitor_interval = 0  # no thread beside: it might hold the lock while a loader worker is forked
    return tqdm(
        initial=resumed_step,
        total=total_steps,
        file=console(),
        miniters=1,  # the clock alone decides when to draw: steps may become slower
        mininterval=0.2,
        dynamic_ncols=True,
        bar_format="step {n_fmt}/{total_fmt} {percentage:3.0f}%|{bar}| {remaining} left{postfix}",
    )


class _TensorBoard:
    def __init__(self, run_directory: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

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
            id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
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


def _start_tracker(
    name: str, run_directory: Path, run_config: dict[str, Any], resumed_step: int
) -> _TensorBoard | _Wandb | None:
    try:
        if name == "tensorboard":
            return _TensorBoard(run_directory, resumed_step)
        if name == "wandb":
            return _Wandb(run_directory, run_config)
    except Exception as error:  # missing, or at odds with another library: no reason to lose a run
        remedy = f" Try: pip install {name}." if isinstance(error, ImportError) else ""
        reason = " ".join(str(error).split())
        get_logger().warning(f"warning: no logging.tracker={name} ({reason}); figures go to metrics.jsonl.{remedy}")
    return None


def _cut(path: Path, last: float) -> None:
    """Drop the lines that will come again, and one that a killed process left half written."""
    former = path.read_bytes() if path.exists() else b""
    kept = b"".join(line + b"\n" for line in former.split(b"\n") if _place_of(line) <= last)
    if kept != former:
        write_whole(path, lambda beside: beside.write_bytes(kept))


def _place_of(line: bytes) -> float:
    """The step, and a half for the evaluation after it."""
    try:
        values = json.loads(line)
        return float(values["step"]) + (0.0 if values["split"] == "train" else 0.5)
    except (ValueError, TypeError, KeyError):
        return math.inf


def _for_json(value: Value) -> Value:
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(values: Mapping[str, Value]) -> dict[str, Value]:
    """{"train/loss": 0.1, …}, as the trackers name them."""
    return {f"{values['split']}/{key}": value for key, value in values.items() if key not in ("split", "step")}


def _figures(values: Mapping[str, Value]) -> str:
    """`loss 0.1234, 5012 samples/s`, as the console shows them."""
    numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
    shown = [f"{key} {value:.4g}" for key, value in numbers.items() if key not in NOT_SHOWN]
    speed = values.get("samples_per_second")
    return ", ".join(shown + ([f"{speed:.0f} samples/s"] if isinstance(speed, float) else []))

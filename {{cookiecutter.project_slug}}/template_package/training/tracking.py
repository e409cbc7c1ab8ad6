"""What people and tools read while a run goes on: metrics.jsonl, TensorBoard or Weights & Biases, the progress bar.

Where words go is logs.py's.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from ..config import Config
from ..launching.distributed import RankContext
from .checkpoint import keep_trying, write_whole
from .logs import console, get_logger, print_above
from .progress import Progress
from .run_files import to_json
from .trackers import Tracker, Value, start_tracker

NOT_SHOWN = ("split", "step", "epoch", "learning_rate", "num_samples", "samples_per_second")


class Tracking:
    """Rank 0 writes and shows; on the other ranks each method does nothing."""

    def __init__(
        self,
        run_directory: Path,
        config: Config,
        context: RankContext,
        *,
        progress: Progress,
        total_steps: int,
    ) -> None:
        self._is_main, self._resumed_step, self._total_steps = context.is_main, progress.step, total_steps
        self._bar: tqdm | None = None
        self._tracker: Tracker | None = None
        self._epoch_line = ""
        self._started = self._epoch_started = time.perf_counter()
        if not context.is_main:
            return
        path = run_directory / "metrics.jsonl"
        _cut(path, progress.step + (0.0 if progress.is_evaluation_pending else 0.5))
        self._metrics = path.open("a", encoding="utf-8")
        if progress.step < total_steps or progress.is_evaluation_pending:
            self._tracker = start_tracker(config, run_directory, progress.step)
            has_bar = console().isatty() if config.logging.progress_bar == "auto" else config.logging.progress_bar
            self._bar = _make_bar(progress.step, total_steps) if has_bar else None
            print_above(self._bar)

    def record(self, values: Mapping[str, Value]) -> None:
        """Write {"split", "step", "epoch", "loss", ...} down as one JSON line, and show it."""
        if not self._is_main:
            return
        self._metrics.write(to_json(dict(values)) + "\n")
        keep_trying(Path(self._metrics.name), self._metrics.flush)  # what is not written yet stays in its buffer
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

    def sync(self) -> None:
        """What has been recorded is on the disk afterwards."""
        if self._is_main:
            try:
                os.fsync(self._metrics.fileno())
            except OSError as error:  # not again: the second time the system may say yes and have dropped them
                error.filename = self._metrics.name
                raise

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
        return timedelta(seconds=round(min(seconds_a_step * (self._total_steps - step), 1e12)))  # it holds some 8e13


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


def _cut(path: Path, last: float) -> None:
    """Drop the lines that will come again, and one that a killed process left half written."""
    former = path.read_bytes() if path.exists() else b""
    kept, unreadable = list[bytes](), list[bytes]()
    for line in former.split(b"\n"):
        place = _place_of(line)
        if place is None:
            unreadable.append(line)
        elif place <= last:  # so what nobody can read before it is of the run's past too
            kept += [*unreadable, line]
            unreadable = []
    content = b"".join(line + b"\n" for line in kept)
    if content != former:
        write_whole(path, lambda beside: beside.write_bytes(content))


def _place_of(line: bytes) -> float | None:
    """The step, and a half for the evaluation after it; None if the line does not tell."""
    try:
        values = json.loads(line)
        return float(values["step"]) + (0.0 if values["split"] == "train" else 0.5)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _figures(values: Mapping[str, Value]) -> str:
    """`loss 0.1234, 5012 samples/s`, as the console shows them."""
    numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
    shown = [f"{key} {value:.4g}" for key, value in numbers.items() if key not in NOT_SHOWN]
    speed = values.get("samples_per_second")
    return ", ".join(shown + ([f"{speed:.0f} samples/s"] if isinstance(speed, float) else []))

"""How far a run is, and how much time its steps took."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..config import CheckpointConfig, EvaluationConfig


@dataclass
class Progress:
    """Counts of one run; what comes next follows from them and the seed."""

    num_samples: int
    """Of the training set."""
    global_batch_size: int
    step: int = 0
    epoch: int = 0
    """Completed epochs."""
    position: int = 0
    """Samples of the current epoch already seen."""
    best: dict[str, Any] | None = None
    """{<evaluation.metric>: value, "step": step}"""
    best_epoch: int = 0
    epochs_without_improvement: int = 0
    is_evaluation_pending: bool = False
    """An evaluation after this step was begun and not ended."""
    saved_step: int | None = None
    """Of the last checkpoint in this run's folder, best.pt aside."""

    def describe(self) -> str:
        """`260 steps, 13 epochs, best accuracy 0.9889 at step 100`"""
        counts = f"{self.step} steps, {self.epoch} epoch{'s' * (self.epoch != 1)}"
        if self.best is None:
            return counts
        (name, value), (_, step) = self.best.items()
        return f"{counts}, best {name} {value:.4f} at step {step}"

    def count_step(self) -> None:
        """One global batch more; the last of an epoch may be shorter."""
        self.step += 1
        self.position += self.global_batch_size
        if self.position >= self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0

    @property
    def is_epoch_end(self) -> bool:
        """Whether the last step ended an epoch."""
        return self.position == 0

    @property
    def current_epoch(self) -> int:
        """The epoch of the last step, counted from 1."""
        return self.epoch if self.is_epoch_end else self.epoch + 1

    @property
    def num_samples_seen(self) -> int:
        """Training samples seen since step 1, over all ranks."""
        return self.epoch * self.num_samples + self.position

    def is_due(self, section: EvaluationConfig | CheckpointConfig, *, at_end: bool = False) -> bool:
        """Whether every_steps or every_epochs of the section falls on the last step, or, at the end, either is set."""
        if section.every_steps and (at_end or self.step % section.every_steps == 0):
            return True
        if at_end:
            return bool(section.every_epochs)
        return section.every_epochs is not None and self.is_epoch_end and self.epoch % section.every_epochs == 0

    def judge(self, value: float, config: EvaluationConfig) -> bool:
        """Take down an evaluation; True if it is the best so far."""
        former = (self.best or {}).get(config.metric)  # None too if another metric decided so far
        is_better = math.isfinite(value) and (
            former is None or (value > former if config.mode == "max" else value < former)
        )
        if is_better:
            self.best, self.best_epoch = {config.metric: value, "step": self.step}, self.current_epoch
        self.epochs_without_improvement = self.current_epoch - self.best_epoch
        return is_better

    def place(self, split: str) -> dict[str, Any]:
        """What a line of metrics.jsonl begins with."""
        return {"split": split, "step": self.step, "epoch": self.current_epoch}

    def state_dict(self) -> dict[str, Any]:
        """The part of a checkpoint that is the run's own."""
        early_stopping = {
            "best_epoch": self.best_epoch,
            "epochs_without_improvement": self.epochs_without_improvement,
            "is_evaluation_pending": self.is_evaluation_pending,
            "num_samples": self.num_samples,  # here, since a checkpoint's own keys are agreed upon
        }
        counts = {"step": self.step, "epoch": self.epoch, "position": self.position}
        return {**counts, "best": self.best, "early_stopping": early_stopping}

    def summary(self) -> dict[str, Any]:
        """The part of summary.json that is the run's own."""
        return {
            "steps": self.step,
            "epochs": self.epoch,
            "global_batch_size": self.global_batch_size,
            "best": self.best,
        }

    def count_anew(self) -> None:
        """After another run's checkpoint, whose steps may be others: its place in the epochs holds."""
        size = self.global_batch_size
        self.position -= self.position % size
        self.step = self.epoch * -(-self.num_samples // size) + self.position // size

    def is_stale(self, patience: int | None) -> bool:
        """Whether no evaluation has been better for so many epochs."""
        return patience is not None and self.epochs_without_improvement >= patience

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.step, self.epoch, self.position = state["step"], state["epoch"], state["position"]
        if self.position >= self.num_samples:  # the file of a run on more data
            self.epoch, self.position = self.epoch + 1, 0
        self.best = state["best"]
        self.best_epoch = state["early_stopping"]["best_epoch"]
        self.epochs_without_improvement = state["early_stopping"]["epochs_without_improvement"]
        self.is_evaluation_pending = state["early_stopping"].get("is_evaluation_pending", False)


class StepClock:
    """Seconds spent in training steps, without start-up, evaluation and saving."""

    def __init__(self, process_started_at: float) -> None:
        self._process_started_at = process_started_at
        self.startup_seconds: float | None = None
        """From the process's start to the end of the first step."""
        self._seconds = 0.0
        self._running_since: float | None = None
        self._lap, self._first_sample = (0, 0.0), 0

    def start(self, num_samples_seen: int) -> None:
        """Begin to count."""
        self._lap, self._first_sample = (num_samples_seen, 0.0), num_samples_seen
        self._running_since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Counted so far."""
        return self._seconds + (time.perf_counter() - self._running_since if self._running_since else 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The body does not count."""
        was_running = self._running_since is not None
        self._seconds, self._running_since = self.seconds, None
        yield
        if was_running:
            self._running_since = time.perf_counter()

    def end_first_step(self) -> bool:
        """True once, after the first step of this process, which ends the start-up."""
        if self.startup_seconds is not None:
            return False
        self.startup_seconds = time.time() - self._process_started_at
        return True

    def samples_per_second(self, num_samples_seen: int) -> float:
        """Since the call before."""
        (former_samples, former_seconds), seconds = self._lap, self.seconds
        self._lap = (num_samples_seen, seconds)
        return (num_samples_seen - former_samples) / max(seconds - former_seconds, 1e-9)

    def summary(self, num_samples_seen: int) -> dict[str, Any]:
        """The part of summary.json that depends on the machine, for this start of the run."""
        return {
            "startup_seconds": self.startup_seconds,
            "train_seconds": self.seconds,
            "samples_per_second": (num_samples_seen - self._first_sample) / max(self.seconds, 1e-9),
        }

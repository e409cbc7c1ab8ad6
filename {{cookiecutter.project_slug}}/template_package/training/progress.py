"""Counts the steps and epochs of a run, remembers the best evaluation."""

import math
from dataclasses import dataclass
from typing import Any

from ..config import CheckpointConfig
from ..core.config import EvaluationConfig


@dataclass
class Progress:
    """The counters of one run. Together with the seed, they determine the next samples and the next learning rate."""

    num_samples: int  # in the training set
    global_batch_size: int
    drop_last: bool
    step: int = 0
    epoch: int = 0  # completed epochs
    position: int = 0  # samples of the current epoch already seen
    best: dict[str, Any] | None = None  # {<evaluation.metric>: value, "step": step}
    best_epoch: int = 0
    # as of the last evaluation: early stopping waits for the next one
    epochs_without_improvement: int = 0
    # evaluations since the best one, or since the last drop of the learning rate
    num_stale: int = 0
    num_drops: int = 0  # of the learning rate so far (schedule.name=plateau)
    is_evaluation_pending: bool = False  # an evaluation is due after this step and has not ended
    loss_sum: float = 0.0  # of this epoch's steps, each times its samples

    def count_step(self) -> None:
        """Count one more optimizer step and its samples. The last global batch of an epoch can have fewer samples."""
        self.step += 1
        self.position += self.global_batch_size
        if self.position >= self.epoch_size:
            self.epoch, self.position = self.epoch + 1, 0

    @property
    def epoch_size(self) -> int:
        """Return how many samples an epoch trains on."""
        return self.num_samples - self.drop_last * (self.num_samples % self.global_batch_size)

    @property
    def batch_size(self) -> int:
        """Return how many samples the most recent step had."""
        size = self.global_batch_size
        return self.epoch_size % size or size if self.is_epoch_end else size

    @property
    def is_epoch_end(self) -> bool:
        return self.position == 0

    @property
    def current_epoch(self) -> int:
        """Return the epoch of the most recent step. Epochs count from 1."""
        return self.epoch if self.is_epoch_end else self.epoch + 1

    @property
    def num_samples_seen(self) -> int:
        return self.epoch * self.epoch_size + self.position

    def is_due(self, section: EvaluationConfig | CheckpointConfig, *, at_end: bool = False) -> bool:
        """Return True if an evaluation or checkpoint is due. If at_end, it is due whenever it is enabled."""
        is_epoch_due = (
            self.is_epoch_end and section.every_epochs and self.epoch % section.every_epochs == 0
        )
        is_step_due = section.every_steps and self.step % section.every_steps == 0
        return bool(
            is_epoch_due
            or is_step_due
            or (at_end and (section.every_epochs or section.every_steps))
        )

    def judge(self, value: float, config: EvaluationConfig, patience: int) -> bool:
        """Record an evaluation's result. Return True if it is the best so far. If more than `patience` results in a
        row set no new best, increase num_drops for schedule.name=plateau.
        """
        former = (self.best or {}).get(config.metric)  # None too if another metric decided so far
        is_better = former is None or (value > former if config.mode == "max" else value < former)
        if is_better := is_better and math.isfinite(value):
            self.best, self.best_epoch = (
                {config.metric: value, "step": self.step},
                self.current_epoch,
            )
        self.epochs_without_improvement = self.current_epoch - self.best_epoch
        self.num_stale = 0 if is_better else self.num_stale + 1
        if self.num_stale > patience:
            self.num_drops, self.num_stale = self.num_drops + 1, 0
        return is_better

    def is_logged(self, every_steps: int) -> bool:
        """Return True if this step is logged, which happens every `every_steps` steps and at the end of each epoch."""
        return self.step % every_steps == 0 or self.is_epoch_end

    def describe(self) -> str:
        """Return a summary, for example `260 steps, 13 epochs, best accuracy 0.9889 at step 100`."""
        counts = f"{self.step} steps" + f", {self.epoch} epoch{'s' * (self.epoch != 1)}" * (
            self.epoch > 0
        )
        if self.best is None:
            return counts
        (name, value), (_, step) = self.best.items()
        return f"{counts}, best {name} {value:.4f} at step {step}"

    def state_dict(self) -> dict[str, Any]:
        others = dict(vars(self))
        return {key: others.pop(key) for key in ("step", "epoch", "position", "best")} | {
            "early_stopping": others
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.epoch, self.position, self.best = (
            state[key] for key in ("step", "epoch", "position", "best")
        )
        # unknown if another run, or an older version, began the epoch
        self.loss_sum = 0.0 if self.is_epoch_end else math.nan
        vars(self).update(state["early_stopping"])

"""The trainer with a stopwatch. Its steps are the ones that `python run.py` makes: only marks are set between them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import Config
from ..launching.distributed import RankContext, all_reduce, barrier, current_context, gather_objects
from ..training.logs import rank_logs
from ..training.run_files import write_json
from ..training.trainer import Trainer

WARM_UP_STEPS = 5
LOSS_STEPS = 10
"""The first and the final loss are means over so many global batches: one alone says little."""
WATCHED_STEPS = 20


def measure(directory: Path, rank: int, world_size: int, config: Config) -> None:
    """What each rank does."""
    context = current_context()
    with rank_logs(directory, context):
        MeasuredTrainer(config, context, directory).fit()


class Mark(NamedTuple):
    """Where a rank stands between two steps."""

    time: float
    seconds_waited: float
    num_samples: int


class MeasuredTrainer(Trainer):
    """Warm-up steps, then `benchmark.steps` that are timed.

    On a GPU some steps follow that wait for the device before they read data: a rank that is ahead of its GPU waits
    for data without any loss of time, and would else be taken for slow.
    """

    def __init__(self, config: Config, context: RankContext, directory: Path) -> None:
        super().__init__(config, context, directory)
        num_steps, steps_per_epoch = config.benchmark.steps, self.loader.steps_per_epoch
        self.num_warm_up_steps = WARM_UP_STEPS
        if self.loader.num_samples % self.loader.global_batch_size and steps_per_epoch < WARM_UP_STEPS + num_steps:
            # An epoch's last batch is shorter, and torch.compile compiles again for it: that too is warm-up.
            self.num_warm_up_steps = max(WARM_UP_STEPS, steps_per_epoch)
        self.last_timed_step = self.num_warm_up_steps + num_steps
        self.is_on_gpu = context.device.type == "cuda"
        self.total_steps = self.last_timed_step + (min(WATCHED_STEPS, num_steps) if self.is_on_gpu else 0)
        self.marks: list[Mark] = []
        self.losses: list[Tensor] = []

    def train_step(self) -> tuple[Tensor, Tensor | None]:
        """As the trainer's, which is what is measured."""
        former_step = self.progress.step
        if former_step in (self.num_warm_up_steps, self.last_timed_step):
            self._mark()
        if former_step >= self.last_timed_step:
            torch.cuda.synchronize()
        figures = super().train_step()
        self.losses.append(figures[0])  # on the device, which nothing here waits for
        return figures

    def save(self, *, is_best: bool = False) -> None:
        """Nothing: no checkpoint is wanted."""

    def finish(self) -> None:
        """As the trainer's, and measured.json if the run came to its end."""
        self._mark()
        super().finish()
        if not self.is_complete:
            return
        losses = all_reduce(torch.stack(self.losses).double()) / self.context.world_size
        start, end = self.marks[:2]
        former, last = self.marks[-2:]
        ranks = gather_objects(
            {
                "world_size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
                "device": str(self.context.device),
                "strategy": type(self.strategy).__module__.rpartition(".")[2],  # its file
                "wrapper": self.strategy.wrapper,
                "waiting_share": (last.seconds_waited - former.seconds_waited) / (last.time - former.time),
            }
        )
        if ranks is not None:
            measured = {
                "ranks": ranks,
                "is_compiled": getattr(self.strategy.module, "_compiled_call_impl", None) is not None,
                "num_warm_up_steps": self.num_warm_up_steps,
                "seconds_per_step": (end.time - start.time) / self.config.benchmark.steps,
                "samples_per_second": (end.num_samples - start.num_samples) / (end.time - start.time),
                "first_step_at": self.context.started_at + (self.clock.startup_seconds or 0.0),
                "first_loss": losses[:LOSS_STEPS].mean().item(),
                "final_loss": losses[: self.last_timed_step][-LOSS_STEPS:].mean().item(),
            }
            write_json(self.directory / "measured.json", measured)

    def _mark(self) -> None:
        if self.is_on_gpu:
            torch.cuda.synchronize()
        barrier()
        self.marks.append(Mark(time.perf_counter(), self.loader.seconds_waited, self.progress.num_samples_seen))

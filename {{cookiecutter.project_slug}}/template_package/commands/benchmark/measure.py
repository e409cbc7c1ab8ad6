"""The trainer with a stopwatch. Its steps are those of `python run.py`, with marks between some of them."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import Config
from ...files import write_json
from ...launching.distributed import RankContext, all_reduce, gather_objects, rank_context
from ...tracking import rank_logs
from ...trainer import Trainer

WARM_UP_STEPS = 5
WATCHED_STEPS = 20
LOSS_STEPS = 10  # the first and the final loss are means over so many global batches: one alone says little


def run_fn(directory: Path, rank: int, world_size: int, config: Config) -> None:
    """Train as rank `rank`; rank 0 leaves measured.json and summary.json in `directory`."""
    context = rank_context(rank, world_size)
    with rank_logs(directory, context):
        MeasuredTrainer(config, context, directory).fit()


class MeasuredTrainer(Trainer):
    """Warm-up steps, then `benchmark.steps` that are timed.

    On a GPU some steps follow that wait for the device before they read data: a rank ahead of its GPU waits for data
    without losing time, and would look slow.
    """

    def __init__(self, config: Config, context: RankContext, directory: Path) -> None:
        super().__init__(config, context, directory)
        self.num_steps = vars(config)["benchmark"].steps
        # An epoch's last batch may be shorter, and torch.compile compiles again for it: that too is warm-up.
        steps = self.loader.steps_per_epoch if self.loader.num_samples % self.loader.global_batch_size else 0
        self.num_warm_up_steps = max(WARM_UP_STEPS, steps if steps < WARM_UP_STEPS + self.num_steps else 0)
        self.last_timed_step = self.total_steps = self.num_warm_up_steps + self.num_steps
        if context.device.type == "cuda":
            self.total_steps += min(WATCHED_STEPS, self.num_steps)
        self.marks: list[tuple[float, float, int]] = []  # time, seconds waited for data, samples seen
        self.losses: list[Tensor] = []

    def train_step(self) -> tuple[dict[str, Tensor], Tensor | None]:
        if self.progress.step in (self.num_warm_up_steps, self.last_timed_step):
            self._mark()
        if self.progress.step >= self.last_timed_step:
            torch.cuda.synchronize()
        means, norm = super().train_step()
        self.losses.append(means["loss"])  # on the device, which nothing here waits for
        return means, norm

    def save(self, *, is_best: bool = False) -> None:
        """Save nothing."""

    def finish(self) -> None:
        """End as the trainer does, and write measured.json."""
        self._mark()
        super().finish()
        losses = all_reduce(torch.stack(self.losses).to(self.context.sum_dtype)) / self.context.world_size
        (start, _, first_sample), (end, _, last_sample) = self.marks[:2]
        (former, former_wait, _), (last, last_wait, _) = self.marks[-2:]
        waiting_shares = gather_objects((last_wait - former_wait) / (last - former))
        if waiting_shares is not None:  # rank 0
            measured = {
                "waiting_share": max(waiting_shares),
                "num_warm_up_steps": self.num_warm_up_steps,
                "seconds_per_step": (end - start) / self.num_steps,
                "samples_per_second": (last_sample - first_sample) / (end - start),
                "first_step_at": self.context.started_at + (self.clock.startup_seconds or 0.0),
                "first_loss": losses[:LOSS_STEPS].mean().item(),
                "final_loss": losses[: self.last_timed_step][-LOSS_STEPS:].mean().item(),
            }
            write_json(self.directory / "measured.json", measured)

    def _mark(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        self.marks.append((time.perf_counter(), self.loader.seconds_waited, self.progress.num_samples_seen))

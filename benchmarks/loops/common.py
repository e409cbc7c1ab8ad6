"""What all loops share, so that they differ in nothing but the loop: the data in order, the optimizer, the log."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Sampler
from workload.dataset import make_dataset

from loops.settings import LEARNING_RATE, WEIGHT_DECAY, Settings


class OrderedBatches(Sampler[list[int]]):
    """A batch sampler: part `rank` of `num_ranks` of each global batch; each iteration is the next epoch."""

    def __init__(self, settings: Settings, rank: int, num_ranks: int) -> None:
        size = settings.global_batch_size
        self._first, self._last = -(-size * rank // num_ranks), -(-size * (rank + 1) // num_ranks)
        self._settings, self._epoch = settings, 0
        self.batch_size, self.drop_last = self._last - self._first, False  # Accelerate asks for these

    def __iter__(self) -> Iterator[list[int]]:
        settings = self._settings
        num_read = (self._epoch + 1) * settings.num_samples
        orders = torch.from_file(settings.orders, size=num_read, dtype=torch.int64)
        order = orders[-settings.num_samples :].tolist()
        self._epoch += 1
        for start in range(0, settings.num_samples, settings.global_batch_size):
            yield order[start + self._first : start + self._last]

    def __len__(self) -> int:
        return self._settings.num_samples // self._settings.global_batch_size


def make_loader(settings: Settings, rank: int, num_ranks: int) -> DataLoader[Any]:
    """A DataLoader as most people write it, or (tuned) one that gets whole batches from the data set."""
    batches = OrderedBatches(settings, rank, num_ranks)
    samples = (settings.work, settings.num_samples, settings.data, settings.images)
    if settings.data == "batches" and not settings.is_tuned:
        return DataLoader(make_dataset(*samples[:2], "tuples", ""), batch_sampler=batches)
    dataset = make_dataset(*samples, is_tuned=settings.is_tuned)
    collate = as_it_is if hasattr(dataset, "__getitems__") and settings.is_tuned else None
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate, num_workers=settings.num_workers)


def as_it_is(batch: Any) -> Any:
    """The collate function of batches that are whole already."""
    return batch


def make_optimizer(model: nn.Module, settings: Settings) -> AdamW:
    """AdamW, with weight decay on matrices alone as the generated trainer has it, so that the losses can be equal."""
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=LEARNING_RATE, fused=True if settings.is_tuned else None)


class Recorder:
    """The log of one rank, a line every `log_every` steps, and the time of each line."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings, self._rank, self._loss = settings, rank, float("nan")
        self._lines = (settings.output / f"log_{rank}.jsonl").open("w", encoding="utf-8")
        self._times = [time.perf_counter()]

    def log(self, step: int, loss: Tensor) -> None:
        """Write the step's mean loss over ranks down."""
        self._loss = mean_over_ranks(loss)
        if self._rank == 0:
            self._lines.write(json.dumps({"step": step, "loss": self._loss}) + "\n")
            self._lines.flush()
        self.mark()

    def mark(self) -> None:
        """A line was just written, by whomever."""
        self._times.append(time.perf_counter())

    def finish(self, last_loss: Tensor | None = None) -> None:
        """Write the rank's results. last_loss: of the last step, if log() has not had it."""
        result = {
            "lap_seconds": [end - start for start, end in pairwise(self._times)],
            "final_loss": self._loss if last_loss is None else mean_over_ranks(last_loss),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        path = self._settings.output / f"result_{self._rank}.json"
        path.write_text(json.dumps(result), encoding="utf-8")


def leave() -> None:
    """End this process at once: gloo's threads abort about one interpreter exit in ten (torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def mean_over_ranks(loss: Tensor) -> float:
    """The mean of each rank's loss; a collective."""
    value = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()

"""Code that all loops share, so that only the loops differ: the model, the data's order, the optimizer and the log."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Sampler
from workload.dataset import make_dataset
from workload.model import ModelConfig, build_model

from loops.settings import LEARNING_RATE, WEIGHT_DECAY, Settings


class OrderedBatches(Sampler[list[int]]):
    """A batch sampler that yields part `rank` of `num_ranks` of each global batch. Each iteration is the next epoch."""

    def __init__(self, settings: Settings, rank: int, num_ranks: int) -> None:
        size = settings.global_batch_size
        self._first, self._last = -(-size * rank // num_ranks), -(-size * (rank + 1) // num_ranks)
        self._settings, self._epoch = settings, 0
        # Accelerate asks for these
        self.batch_size, self.drop_last = (
            self._last - self._first,
            False,
        )

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


def make_model(settings: Settings) -> nn.Module:
    """Return the model on its device, compiled if the settings say so."""
    if settings.device != "cpu":  # as in the generated trainer
        torch.set_float32_matmul_precision("high")  # TF32
        torch.backends.cudnn.benchmark = True
    model = build_model(ModelConfig(settings.work, settings.size)).to(settings.device)
    if settings.is_compiled:
        model.compile()
    return model


def autocast(settings: Settings) -> AbstractContextManager[Any]:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if settings.precision == "fp32":
        return nullcontext()
    return torch.autocast(settings.device, dtypes[settings.precision])


def move(batch: Any, settings: Settings) -> Any:
    """Return the batch on the device. A tuned loop does not wait for the copy."""
    if settings.device == "cpu":
        return batch
    return [tensor.to(settings.device, non_blocking=settings.is_tuned) for tensor in batch]


def make_loader(settings: Settings, rank: int, num_ranks: int) -> DataLoader[Any]:
    """Return a DataLoader as most people write it or, if tuned, one that gets whole batches from data sets that can."""
    batches = OrderedBatches(settings, rank, num_ranks)
    data = "tuples" if settings.data == "batches" and not settings.is_tuned else settings.data
    samples = (settings.work, settings.num_samples, data, settings.images, settings.size)
    dataset = make_dataset(*samples, is_tuned=settings.is_tuned)
    collate = as_it_is if hasattr(dataset, "__getitems__") and settings.is_tuned else None
    pin = settings.is_tuned and settings.device != "cpu"
    workers = settings.num_workers
    return DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers, pin_memory=pin
    )


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged. This is the collate function for data sets that return whole batches."""
    return batch


def make_optimizer(model: nn.Module, settings: Settings) -> AdamW:
    """Return AdamW with weight decay on matrices only, as in the generated trainer, so that losses can be equal."""
    parameters = list(model.parameters())
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim >= 2],
            "weight_decay": WEIGHT_DECAY,
        },
        {
            "params": [parameter for parameter in parameters if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    return AdamW(groups, lr=LEARNING_RATE, fused=True if settings.is_tuned else None)


class Recorder:
    """One rank's log: every `log_every` steps, rank 0 writes the loss, and each rank keeps the time."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings, self._rank, self._loss = settings, rank, float("nan")
        self._lines = (settings.output / f"log_{rank}.jsonl").open("w", encoding="utf-8")
        self._times = [time.perf_counter()]

    def log(self, step: int, loss: Tensor) -> None:
        """Log the step's loss, averaged over the ranks."""
        self._loss = mean_over_ranks(loss)
        if self._rank == 0:
            self._lines.write(json.dumps({"step": step, "loss": self._loss}) + "\n")
            self._lines.flush()
        self.mark()

    def mark(self) -> None:
        """Note the time of a log line that was just written, by log() or by a library."""
        self._times.append(time.perf_counter())

    def finish(self, last_loss: Tensor | None = None) -> None:
        """Write the rank's results. `last_loss` is the loss of the last step, for a loop that does not call log()."""
        is_on_gpu = self._settings.device != "cpu"
        peak = (
            torch.cuda.max_memory_allocated()
            if is_on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        result = {
            "lap_seconds": [end - start for start, end in pairwise(self._times)],
            "final_loss": self._loss if last_loss is None else mean_over_ranks(last_loss),
            "peak_memory_mib": peak / (2**20 if is_on_gpu else 2**10),
        }
        path = self._settings.output / f"result_{self._rank}.json"
        path.write_text(json.dumps(result), encoding="utf-8")


def leave() -> None:
    """End this process at once. In about one normal exit in ten, gloo's threads abort the interpreter (torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of the ranks' losses. All ranks must call this function together."""
    value = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()

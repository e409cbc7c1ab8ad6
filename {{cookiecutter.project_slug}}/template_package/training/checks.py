"""Lowers the micro-batch size when memory runs out."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ..core.checks import rehearse
from ..core.launch import OUT_OF_MEMORY
from ..core.ranks import Rank, all_reduce
from ..core.task import Task
from ..data import TimedLoader
from ..errors import FailureError, StopRun
from ..files import write_whole
from ..strategies.base import Strategy

logger = logging.getLogger(__name__)


class MemoryLimit:
    """Lowers this rank's micro-batch size if memory runs out. A file in the run's folder stores the size."""

    def __init__(self, directory: Path, rank: Rank, loader: TimedLoader) -> None:
        self._path = directory / f"micro_batch_size_rank_{rank.rank}.txt"
        self._rank, self._loader = rank, loader
        size = (
            int(self._path.read_text(encoding="utf-8"))
            if self._path.exists() and not loader.plan.task.compares_samples
            else loader.micro_batch_size
        )
        if size < loader.micro_batch_size:
            logger.info(
                "micro-batches of %d: memory ran out with more (remove %s to try again)",
                size,
                self._path,
            )
            loader.micro_batch_size = size

    def fit(self, strategy: Strategy, task: Task, micro_batch_size: int | str, epoch: int) -> None:
        """If micro_batch_size is `auto`, try to find a size that fits in memory. All ranks use the smallest result."""
        # If forward passes hold collectives, a trial on one rank alone would wait forever.
        may_try = micro_batch_size == "auto" and not (
            strategy.has_collective_forward or strategy.config.training.sync_batchnorm
        )
        while may_try:
            try:  # an epoch's last batch may be shorter than its first
                rehearse(strategy, self._loader.read_first(epoch, 0), task, is_trial=True)
                may_try = False
            except RuntimeError as error:
                self._halve(error)
            if self._rank.device.type == "cuda":
                torch.cuda.empty_cache()  # now that the error, and the frames it holds, are gone
        size = torch.tensor(self._loader.micro_batch_size, device=self._rank.device)
        self._loader.micro_batch_size = int(all_reduce(size, dist.ReduceOp.MIN))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If memory runs out in the `with` block, halve the micro-batch size for the restart and raise StopRun(75)."""
        try:
            yield
        except RuntimeError as error:
            self._halve(error)
            size = str(self._loader.micro_batch_size)
            write_whole(self._path, lambda beside: beside.write_text(size, encoding="utf-8"))
            raise StopRun(OUT_OF_MEMORY) from error

    def _halve(self, error: RuntimeError) -> None:
        phrases = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
        if not isinstance(error, torch.OutOfMemoryError) and not any(
            phrase in str(error) for phrase in phrases
        ):
            raise error
        if self._loader.plan.task.compares_samples:
            problem = "memory ran out, and the loss compares all samples, which smaller micro-batches would not"
            remedy = "Cut the share inside of forward (README: loss_over), or lower training.global_batch_size"
            raise FailureError(f"{problem}. {remedy}.") from None
        former = self._loader.micro_batch_size
        if former == 1:
            raise torch.OutOfMemoryError(
                "training.micro_batch_size=1 does not fit: use a smaller model or samples"
            )
        self._loader.micro_batch_size = smaller = -(-former // 2)
        logger.warning("out of memory with micro-batches of %d samples, trying %d", former, smaller)

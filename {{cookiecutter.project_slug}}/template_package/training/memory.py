"""micro_batch_size: auto. Finds the largest micro-batch that fits, before step 1 and after memory has run out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from .. import model as user_model
from ..launching.distributed import RankContext, all_reduce
from ..launching.processes import OUT_OF_MEMORY
from ..launching.starting import RunEnds
from ..strategies.base import Strategy
from .checkpoint import write_whole
from .fetching import MicroBatch
from .loader import TrainLoader
from .logs import get_logger
from .random_state import get_random_states, set_random_states


class MemoryLimit:
    """This rank's largest micro-batch: runs/<name>/micro_batch_size_rank_<r>.txt, once memory has run out."""

    def __init__(self, directory: Path, context: RankContext, loader: TrainLoader) -> None:
        self._path = directory / f"micro_batch_size_rank_{context.rank}.txt"
        self._context, self._loader = context, loader
        text = self._path.read_text(encoding="utf-8", errors="replace").strip() if self._path.exists() else ""
        if re.fullmatch("[1-9][0-9]{0,15}", text):
            limit = int(text)
            if limit < loader.micro_batch_size:
                words = "micro-batches of %d on this rank: memory ran out with more (%s; remove it to try again)"
                get_logger().info(words, limit, self._path)
                loader.micro_batch_size = limit

    def fit(self, strategy: Strategy, micro_batch_size: int | str, epoch: int) -> None:
        """For `auto`: halve the loader's size until forward and backward fit, the optimizer's state being allocated.

        Nothing is communicated, so ranks may end with different sizes. Weights, buffers, optimizer and random states
        are as before afterwards.
        """
        if strategy.has_collective_forward or strategy.config.sync_batchnorm:
            # A trial on one rank would wait for ever; and all need the same size.
            size = torch.tensor(self._loader.micro_batch_size, device=self._context.device)
            self._loader.micro_batch_size = int(all_reduce(size, dist.ReduceOp.MIN))
            return
        if micro_batch_size != "auto":
            return
        random_states = get_random_states(*self._context.devices)
        tensors = [*strategy.module.parameters(), *strategy.module.buffers()]
        kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]  # not on the device, which is measured here
        with strategy.allocated_state():
            while not self._fits(strategy, self._loader.read_first(epoch, 0)):  # an epoch's last batch may be shorter
                self._halve()
        with torch.no_grad():
            for tensor, former in zip(tensors, kept, strict=True):
                tensor.copy_(former)
        set_random_states(random_states, *self._context.devices)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If memory runs out in the body, write half the size down, end this attempt; the launcher makes another."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error) or self._loader.micro_batch_size == 1:
                raise
            self._halve()
            size = str(self._loader.micro_batch_size)
            write_whole(self._path, lambda beside: beside.write_text(size, encoding="utf-8"))
            raise RunEnds(OUT_OF_MEMORY) from error

    def _halve(self) -> None:
        former = self._loader.micro_batch_size
        if former == 1:
            raise torch.OutOfMemoryError("training.micro_batch_size=1 does not fit: use a smaller model or samples")
        self._loader.micro_batch_size = smaller = -(-former // 2)
        words = "rank %d: out of memory with micro-batches of %d samples, trying %d"
        get_logger().warning(words, self._context.rank, former, smaller)

    def _fits(self, strategy: Strategy, micro_batch: MicroBatch) -> bool:
        try:
            with strategy.accumulate(is_last_micro_batch=False):
                with strategy.autocast():
                    loss, _ = user_model.compute_loss(strategy.model, micro_batch.batch)
                strategy.backward(loss, 0.0)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            strategy.optimizer.zero_grad()
            if self._context.device.type == "cuda":
                torch.cuda.empty_cache()
        return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory, or on CPU the allocator's, was too small."""
    words = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)

"""Forward and backward passes before the first step, whose gradients are dropped.

They find the largest micro-batch that fits, and faults that would show later. And DDP settles its buckets: it orders
them anew after its first backward, and from three ranks up sums in another order differ in the last bit, so a resumed
run would differ from an uninterrupted one.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from .. import model as user_model
from ..data.loader import TrainLoader
from ..data.random_state import generators_restored
from ..data.reading import MicroBatch
from ..errors import ConfigError, StopRun
from ..files import write_whole
from ..launching.distributed import RankContext, all_reduce
from ..launching.processes import OUT_OF_MEMORY
from ..strategies.base import Strategy

logger = logging.getLogger(__name__)


def rehearse(strategy: Strategy, micro_batch: MicroBatch, context: RankContext) -> None:
    """Run one pass on `micro_batch` with weight 0; random states and buffers are as before afterwards.

    ConfigError if compute_loss does not call the model it is given exactly once, if the strategy lacks gradients, or if
    the model's state could not be saved.
    """
    for name, value in strategy.module.state_dict().items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            words = f"its state_dict() holds {name}, a {type(value).__name__} that a checkpoint cannot hold"
            raise ConfigError(f"model: {words}. Register a dense tensor as a buffer, or one with persistent=False.")
    calls: list[None] = []
    hook = strategy.model.register_forward_pre_hook(lambda *_: calls.append(None))
    with _undone(strategy, context), strategy.accumulate(is_last_micro_batch=True):
        with strategy.autocast():
            loss, _ = user_model.compute_loss(strategy.model, micro_batch.batch)
        hook.remove()
        if len(calls) != 1:
            rule = "its wrapper shares the gradients, so call it once, and no part of it such as model.module"
            raise ConfigError(f"compute_loss in model.py called model(...) {len(calls)} times: {rule}.")
        if loss.dim() != 0 or not loss.requires_grad:
            found = f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            rule = "it must be a scalar that depends on the parameters. Return the micro-batch's mean, not detached."
            raise ConfigError(f"compute_loss in model.py returned a loss of {found}: {rule}")
        strategy.backward(loss, 0.0)
        strategy.check_gradients()


class MemoryLimit:
    """This rank's largest micro-batch: runs/<name>/micro_batch_size_rank_<r>.txt, once memory has run out."""

    def __init__(self, directory: Path, context: RankContext, loader: TrainLoader) -> None:
        self._path = directory / f"micro_batch_size_rank_{context.rank}.txt"
        self._context, self._loader = context, loader
        size = int(self._path.read_text(encoding="utf-8")) if self._path.exists() else loader.micro_batch_size
        if size < loader.micro_batch_size:
            words = "micro-batches of %d on this rank: memory ran out with more (%s; remove it to try again)"
            logger.info(words, size, self._path)
            loader.micro_batch_size = size

    def fit(self, strategy: Strategy, micro_batch_size: int | str, epoch: int) -> None:
        """For `auto`: halve the loader's size until forward and backward fit. Ranks may end with different sizes."""
        if strategy.has_collective_forward or strategy.config.sync_batchnorm:
            # A trial on one rank would wait for ever; and all need the same size.
            size = torch.tensor(self._loader.micro_batch_size, device=self._context.device)
            self._loader.micro_batch_size = int(all_reduce(size, dist.ReduceOp.MIN))
        elif micro_batch_size == "auto":
            while not self._fits(strategy, self._loader.read_first(epoch, 0)):  # an epoch's last batch may be shorter
                self._halve()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If memory runs out in the body, write half the size down and end this start; the launcher starts again."""
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._halve()
            size = str(self._loader.micro_batch_size)
            write_whole(self._path, lambda beside: beside.write_text(size, encoding="utf-8"))
            raise StopRun(OUT_OF_MEMORY) from error

    def _halve(self) -> None:
        former = self._loader.micro_batch_size
        if former == 1:
            raise torch.OutOfMemoryError("training.micro_batch_size=1 does not fit: use a smaller model or samples")
        self._loader.micro_batch_size = smaller = -(-former // 2)
        words = "rank %d: out of memory with micro-batches of %d samples, trying %d"
        logger.warning(words, self._context.rank, former, smaller)

    def _fits(self, strategy: Strategy, micro_batch: MicroBatch) -> bool:
        try:
            with _undone(strategy, self._context), strategy.accumulate(is_last_micro_batch=False):
                with strategy.autocast():
                    loss, _ = user_model.compute_loss(strategy.model, micro_batch.batch)
                strategy.backward(loss, 0.0)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            return False
        finally:
            if self._context.device.type == "cuda":
                torch.cuda.empty_cache()
        return True


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device's memory, or on CPU the allocator's, was too small."""
    words = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


@contextmanager
def _undone(strategy: Strategy, context: RankContext) -> Iterator[None]:
    """Drop the gradients of the body; random states and buffers are as before."""
    buffers = [buffer.clone() for buffer in strategy.module.buffers()]
    with generators_restored(*context.devices):
        try:
            yield
        finally:
            strategy.optimizer.zero_grad()
            with torch.no_grad():
                for buffer, former in zip(strategy.module.buffers(), buffers, strict=True):
                    buffer.copy_(former)

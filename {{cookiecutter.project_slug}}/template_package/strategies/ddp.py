"""Trains with DistributedDataParallel. Each rank holds the whole model. Gradients are averaged during backward."""

import warnings
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ..config import DdpConfig, TrainingConfig
from ..launching.distributed import RankContext
from .base import ShowsModule, Strategy


class DistributedDataParallelStrategy(Strategy):
    model: DistributedDataParallel

    def __init__(self, config: TrainingConfig, context: RankContext, options: DdpConfig) -> None:
        super().__init__(config, context)
        self._options = options
        # A trial of memory would be recorded as the graph, or broadcast on some ranks only.
        self.has_collective_forward = options.static_graph or options.broadcast_buffers
        self.needs_all_gradients = not (options.find_unused_parameters or options.static_graph)

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module in DDP. For a training run, this copies rank 0's weights to all ranks."""
        # its successor is new in torch 2.13
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        model = Wrapper(
            module,
            device_ids=[self.context.device] if self.context.device.type == "cuda" else None,
            init_sync=self._build_optimizer
            is not None,  # without one, set_weights() alone shares them
            find_unused_parameters=self._options.find_unused_parameters,
            static_graph=self._options.static_graph,
            gradient_as_bucket_view=True,  # no second copy of the gradients
            broadcast_buffers=self._options.broadcast_buffers,  # each costs more than a small model's step
        )
        # DDP needs it only with several devices a rank; it would hide the module's own
        del model.dim
        if self._options.gradient_compression != "none":
            hooks = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
            model.register_comm_hook(None, hooks[self._options.gradient_compression])
        return model

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Return DDP's no_sync(), or a do-nothing context for the last micro-batch so that gradients are averaged."""
        return nullcontext() if is_last_micro_batch else self.model.no_sync()

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Let torch check that DDP has averaged all gradients, then step the optimizer."""
        # False if another library averages the gradients
        if isinstance(self.model, DistributedDataParallel):
            self.model._check_reducer_finalized()  # type: ignore[no-untyped-call]  # DDP asks in the next forward only
        return super().optimizer_step(max_gradient_norm)


class Wrapper(ShowsModule, DistributedDataParallel):
    """Wraps the user's module in torch's DDP."""


STRATEGY = DistributedDataParallelStrategy

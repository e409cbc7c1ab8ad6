"""Trains with DistributedDataParallel, with the options that size=full adds."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ..config import Config
from ..core.ranks import Rank
from ..core.strategies import DdpStrategy
from .base import Strategy

HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


class DistributedDataParallelStrategy(Strategy, DdpStrategy):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__(config, rank)
        if config.ddp.static_graph:  # a trial of memory would be taken for the graph
            self.options["static_graph"] = self.has_collective_forward = True
            self.needs_all_gradients = False

    def wrap(self, module: nn.Module) -> Any:
        model = super().wrap(module)
        if hook := HOOKS.get(self.config.ddp.gradient_compression):
            model.register_comm_hook(None, hook)
        return model

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Let torch check that DDP has averaged all gradients, then step the optimizer."""
        # False if another library averages the gradients
        if isinstance(self.model, DistributedDataParallel):
            self.model._check_reducer_finalized()  # type: ignore[no-untyped-call]  # DDP asks in the next forward only
        return super().optimizer_step(max_gradient_norm)


STRATEGY = DistributedDataParallelStrategy

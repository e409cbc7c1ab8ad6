"""Trains with FSDP (core/strategies.py), with the options that size=full adds."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from ..config import Config
from ..core.strategies import FsdpStrategy
from ..launching.distributed import RankContext, join_group
from .base import Strategy


class FullyShardedStrategy(Strategy, FsdpStrategy):
    can_rebuild = False

    def __init__(self, config: Config, context: RankContext) -> None:
        super().__init__(config, context)
        join_group(context, "auto", timedelta(minutes=10))  # a single rank has none yet
        self.options = {"reshard_after_forward": config.fsdp.reshard_after_forward}
        if config.fsdp.cpu_offload:
            policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            self.options["offload_policy"] = policy

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """In this context, each rank holds the full weights, so ranks may run different numbers of forward passes."""
        for unit in self._sharded():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
        self.drop_gathered()
        for unit in self._sharded():
            unit.set_reshard_after_forward(self.options["reshard_after_forward"], recurse=False)

    def drop_gathered(self) -> None:
        for unit in self._sharded():
            unit.reshard()

    def _sharded(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]


STRATEGY = FullyShardedStrategy

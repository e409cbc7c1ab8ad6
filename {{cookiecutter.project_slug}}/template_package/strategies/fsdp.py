"""Trains with FSDP (core/strategies.py), with the options that size=full adds."""

from datetime import timedelta

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from ..config import Config
from ..core.strategies import FsdpStrategy
from ..launching.distributed import RankContext, join_group
from .base import Strategy


class FullyShardedStrategy(Strategy, FsdpStrategy):
    can_rebuild = False

    def __init__(self, config: Config, context: RankContext) -> None:
        super().__init__(config, context)
        join_group(context, "auto", timedelta(minutes=10))  # a single rank has none yet
        self.options["reshard_after_forward"] = config.fsdp.reshard_after_forward
        if config.fsdp.cpu_offload:
            policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            self.options["offload_policy"] = policy

    def drop_gathered(self) -> None:
        for unit in self.units():
            unit.reshard()


STRATEGY = FullyShardedStrategy

"""Trains with FSDP (core/strategies.py), with the options that size=full adds."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from ..config import Config
from ..core.ranks import Rank
from ..core.strategies import FsdpStrategy
from ..errors import ConfigError
from .base import Strategy, join_alone


class FullyShardedStrategy(Strategy, FsdpStrategy):
    can_rebuild = False

    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__(config, rank)
        join_alone(rank)
        self.options["reshard_after_forward"] = config.fsdp.reshard_after_forward
        if (replicas := config.fsdp.replicas) > 1:
            if rank.world_size % replicas:
                rule = f"must divide the {rank.world_size} ranks"
                raise ConfigError(
                    f"fsdp.replicas={replicas}: {rule}. Set it to the number of nodes."
                )
            self.mesh = {"replicate": replicas, "shard": rank.world_size // replicas}
        if config.fsdp.cpu_offload:
            policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            self.options["offload_policy"] = policy

    def place(self, tensor: Tensor) -> None:
        if tensor.is_meta:  # training/meta_build.py
            empty = torch.empty_like(tensor, device=self.rank.device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]
        super().place(tensor)

    def drop_gathered(self) -> None:
        for unit in self.units():
            unit.reshard()


STRATEGY = FullyShardedStrategy

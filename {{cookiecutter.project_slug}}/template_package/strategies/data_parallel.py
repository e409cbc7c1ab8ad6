"""Trains with nn.DataParallel: one process drives several GPUs, which is slower than strategy=ddp.

Each forward pass copies the model to all GPUs, splits its inputs along their first dimension, and joins the outputs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..core.ranks import Rank
from ..core.strategies import ShowsModule
from ..errors import ConfigError
from .base import Strategy


class DataParallelStrategy(Strategy):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__(config, rank)
        for key in ("compile", "activation_checkpointing", "sync_batchnorm"):
            if len(rank.devices) > 1 and getattr(config.training, key):
                raise ConfigError(
                    f"training.{key}=true: nn.DataParallel cannot do it. Set false, or strategy=ddp."
                )

    def wrap(self, module: nn.Module) -> nn.Module:
        if len(self.rank.devices) == 1:
            return module
        wrapper = _DataParallel(
            module, device_ids=self.rank.devices, output_device=self.rank.device
        )
        self.evaluation_model = wrapper  # all devices evaluate too
        return wrapper


class _DataParallel(ShowsModule, nn.DataParallel[nn.Module]):
    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each model copy in its own thread with the caller's autocast dtype. New threads do not inherit it."""
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            calls: Any = [
                partial(torch.autocast("cuda", dtype)(type(copy).__call__), copy)
                for copy in replicas
            ]
            replicas = calls
        return super().parallel_apply(replicas, inputs, kwargs)


STRATEGY = DataParallelStrategy

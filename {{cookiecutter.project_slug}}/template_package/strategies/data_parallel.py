"""Trains with nn.DataParallel: one process drives several GPUs, which is slower than strategy=ddp.

Each forward pass copies the model to all GPUs, splits its inputs along their first dimension, and joins the outputs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config import DdpConfig, TrainingConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext
from .base import ShowsModule, Strategy


class DataParallelStrategy(Strategy):
    def __init__(self, config: TrainingConfig, context: RankContext, _: DdpConfig) -> None:
        super().__init__(config, context)
        for key in ("compile", "activation_checkpointing", "sync_batchnorm"):
            if len(context.devices) > 1 and getattr(config, key):
                raise ConfigError(
                    f"training.{key}=true: nn.DataParallel cannot do it. Set false, or strategy=ddp."
                )

    def wrap(self, module: nn.Module) -> nn.Module:
        if len(self.context.devices) == 1:
            return module
        wrapper = _DataParallel(
            module, device_ids=self.context.devices, output_device=self.context.device
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

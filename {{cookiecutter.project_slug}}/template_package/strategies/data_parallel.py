"""nn.DataParallel: one process drives several GPUs, with a thread and a copy of the model for each in every forward.

For trying things out where processes cannot be started: all threads share one Python interpreter, so ddp is faster.
A batch is cut along the first dimension of what model(...) gets, and the outputs are put together on the first GPU,
where compute_loss sees the whole micro-batch: its mean weighs every sample alike, however uneven the parts are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..config import DdpConfig, TrainingConfig
from ..launching.distributed import RankContext
from ..validation import ConfigError
from .base import BuildOptimizer, Strategy


class DataParallelStrategy(Strategy):
    """torch's DataParallel over the devices of this process; with a single one, the plain module."""

    def __init__(self, config: TrainingConfig, context: RankContext, _: DdpConfig) -> None:
        super().__init__(config, context)
        assert context.world_size == 1, "config and launcher refuse others"

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """As the base. ConfigError for what copies of a model cannot do."""
        if self.num_devices > 1:
            for key in ("compile", "activation_checkpointing", "sync_batchnorm"):
                if getattr(self.config, key):
                    raise ConfigError(
                        f"training.{key}=true: the copies of a model that data_parallel makes in each forward cannot "
                        "do it. Set it to false, or set strategy=ddp."
                    )
            if build_optimizer is not None:
                self._check_sizes()
        super().prepare(model, build_optimizer)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module in DataParallel, with its weights and the outputs on the first device."""
        if self.num_devices == 1:
            return module
        return _DataParallel(module, device_ids=self.context.devices, output_device=self.context.device)

    @property
    def num_devices(self) -> int:
        """Devices of this process."""
        return len(self.context.devices)

    @property
    def evaluation_model(self) -> nn.Module:
        """All devices evaluate too."""
        return self.model

    def _check_sizes(self) -> None:
        """ConfigError if not every device gets a sample."""
        for key in ("micro_batch_size", "global_batch_size"):
            size = getattr(self.config, key)
            if size != "auto" and size < self.num_devices:
                raise ConfigError(
                    f"training.{key}={size}: must be at least {self.num_devices}, a sample for each device of "
                    f"data_parallel. Set training.{key}={self.num_devices} or more, or name fewer in device_ids."
                )
        size, whole = self.config.micro_batch_size, self.config.global_batch_size
        if size != "auto" and (least := whole // -(-whole // int(size))) < self.num_devices:  # cut evenly
            raise ConfigError(
                f"training.micro_batch_size={size}: cuts training.global_batch_size={whole} into pieces of {least} "
                f"samples too, for {self.num_devices} devices of data_parallel. Set training.micro_batch_size=auto, or "
                f"training.global_batch_size to a multiple of {size}."
            )


class _DataParallel(nn.DataParallel[nn.Module]):
    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """As torch's, in the caller's precision: torch hands its threads autocast, but not whether to bf16 or fp16."""
        if not torch.is_autocast_enabled("cuda"):
            return super().parallel_apply(replicas, inputs, kwargs)
        dtype = torch.get_autocast_dtype("cuda")

        def in_autocast(replica: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **named: Any) -> Any:
                with torch.autocast("cuda", dtype):
                    return replica(*args, **named)

            return forward

        calls: list[Any] = [in_autocast(replica) for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)

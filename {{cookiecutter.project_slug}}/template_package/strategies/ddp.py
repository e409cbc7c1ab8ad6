"""DistributedDataParallel: each rank holds the whole model; gradients are averaged while backward still runs."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ..config import DdpConfig, TrainingConfig
from ..launching.distributed import RankContext
from ..validation import ConfigError
from .base import Strategy
from .numerics import own_statistics


class DistributedDataParallelStrategy(Strategy):
    """torch's DDP over the process group."""

    model: DistributedDataParallel

    def __init__(self, config: TrainingConfig, context: RankContext, options: DdpConfig) -> None:
        super().__init__(config, context)
        self._options = options
        if options.gradient_compression == "bf16" and not dist.is_nccl_available():
            raise ConfigError(
                "ddp.gradient_compression=bf16: torch has it with NCCL only, which this build has not. Set it to fp16."
            )

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        """The module in DDP, which copies rank 0's weights to all."""
        model = DistributedDataParallel(
            module,
            device_ids=[self.context.device] if self.context.device.type == "cuda" else None,
            find_unused_parameters=self._options.find_unused_parameters,
            static_graph=self._options.static_graph,
            gradient_as_bucket_view=True,  # no second copy of the gradients
            forward_sync_buffers=False,  # a broadcast per forward costs more than the step of a small model
        )
        if self._options.gradient_compression != "none":
            hooks = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
            model.register_comm_hook(None, hooks[self._options.gradient_compression])
        return model

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """no_sync() on all but the last micro-batch, whose backward averages the sum."""
        return nullcontext() if is_last_micro_batch else self.model.no_sync()

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """As the base, once DDP has averaged all gradients: it has not if a parameter got none in this step."""
        self._check_averaged()
        return super().optimizer_step(max_gradient_norm)

    def synchronize_buffers(self) -> None:
        """Rank 0's buffers on every rank."""
        if self.context.world_size > 1:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)

    def check_gradients(self) -> None:
        """ConfigError that names the parameters without a gradient, if DDP would wait for them in every step."""
        unused = [n for n, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if unused and not (self._options.find_unused_parameters or self._options.static_graph):
            raise _no_gradient(unused)

    def replicas(self, *, with_buffers: bool) -> dict[str, Tensor]:
        """Parameters, and buffers but for BatchNorm's statistics: each rank's own until they are synchronised."""
        if not with_buffers:
            return dict(self.module.named_parameters())
        own = own_statistics(self.module)
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: tensor for name, tensor in tensors.items() if name not in own}

    def _check_averaged(self) -> None:
        """ConfigError that names the parameters for whose gradients DDP still waits, so that it has averaged none."""
        if not isinstance(self.model, DistributedDataParallel):  # another library averages, or there is one rank
            return
        try:
            self.model._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            indices = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
            if indices is None:
                raise
            names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            raise _no_gradient([names[int(index)] for index in indices[1].split()]) from None


def _no_gradient(names: list[str]) -> ConfigError:
    return ConfigError(
        f"ddp.find_unused_parameters=false: {', '.join(names)} got no gradient, and DDP waits for every parameter's. "
        "Freeze them (requires_grad=False), use them in the loss, or set ddp.find_unused_parameters=true."
    )

"""Fully sharded data parallelism (FSDP2): each rank keeps a part of every weight, gradient and optimizer state.

A block's weights are gathered for its forward and backward pass and dropped after it, so memory falls with the number
of ranks, for more communication (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..config import FsdpConfig, TrainingConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext, join_alone
from .base import Strategy
from .numerics import blocks


class FullyShardedStrategy(Strategy):
    """torch's fully_shard over all ranks: one unit per block, and one for the remaining parameters."""

    has_collective_forward = True
    needs_all_gradients = True

    def __init__(self, config: TrainingConfig, context: RankContext, options: FsdpConfig) -> None:
        super().__init__(config, context)
        if options.cpu_offload and self.precision == "fp16":
            raise ConfigError("fsdp.cpu_offload=true: does not go with training.precision=fp16. Set bf16 or fp32.")
        if context.world_size == 1:
            join_alone(context)
        self._mesh = init_device_mesh(context.device.type, (context.world_size,))
        self._reshard_after_forward = options.reshard_after_forward
        is_pinned = context.device.type == "cuda"
        self._offload = CPUOffloadPolicy(pin_memory=is_pinned) if options.cpu_offload else OffloadPolicy()

    def place(self, model: nn.Module) -> nn.Module:
        return model  # wrap() moves it unit by unit, since the whole may not fit on a device

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, of whose weights each rank now holds its part of rank 0's."""
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(
                    f"strategy=fsdp: parameter {name} is a scalar, which cannot be cut into parts. "
                    "Give it the shape (1,) in model.py, or set strategy=ddp."
                )
        for unit in [*self._units(module), module]:
            for tensor in (*unit.parameters(), *unit.buffers()):
                if not isinstance(tensor, DTensor):  # of no inner unit
                    tensor.data = tensor.data.to(self.context.device).contiguous()
                    dist.broadcast(tensor.data, src=0)
            self._root = fully_shard(
                unit,
                mesh=self._mesh,
                reshard_after_forward=self._reshard_after_forward,
                mp_policy=self._policy(unit),
                offload_policy=self._offload,
            )
        return module

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Before the last micro-batch, whose backward averages the sum, each rank adds up whole gradients."""
        self._root.set_requires_gradient_sync(is_last_micro_batch)
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip to the norm over all ranks' parts, and return it."""
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # a collective; nothing waits for the device
        clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The whole state, once the weights that evaluation left gathered are parts again."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().state_dict()

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self.module.state_dict().items():
            value = weights[name]
            if isinstance(tensor, DTensor):  # torch's own function fails on offloaded weights beside GPU buffers
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(value)

    def check_gradients(self) -> None:
        """From now on, a rank without a gradient sends zeros: the others would take its next one in its place."""
        super().check_gradients()
        self._root.set_reduce_scatter_unused_params(True)

    def _units(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules that are gathered as a whole: blocks that hold a matrix and share no weight with others."""
        num_uses = _count_uses(module)
        for unit in dict.fromkeys(blocks(module)):
            is_big = any(p.dim() > 1 for p in unit.parameters())
            is_called = type(unit).forward is not nn.Module.forward
            if is_big and is_called and all(num_uses[key] == count for key, count in _count_uses(unit).items()):
                yield unit

    def _policy(self, unit: nn.Module) -> MixedPrecisionPolicy:
        """16 bits for units whose weights autocast would round itself: so a step computes what it does under ddp."""
        owners = [m for m in unit.modules() if any(not isinstance(p, DTensor) for p in m.parameters(recurse=False))]
        if self.precision == "fp32" or not all(map(_is_rounded, owners)):
            return MixedPrecisionPolicy()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _is_rounded(module: nn.Module) -> bool:
    """Whether autocast rounds the weights, as it does in torch's own forward of these."""
    is_torchs = type(module).forward.__module__.startswith("torch.nn.")
    return is_torchs and isinstance(module, nn.Linear | _ConvNd | nn.MultiheadAttention)


def _count_uses(module: nn.Module) -> Counter[int]:
    """The number of names under which the module holds each of its parameters."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


STRATEGY = FullyShardedStrategy

"""Fully sharded data parallelism (FSDP2): each rank keeps a part of every weight, gradient and optimizer state.

A block's weights are gathered for its forward and backward pass and dropped after it, so memory falls with the number
of ranks, for more communication (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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
from ..launching.distributed import RankContext, join_alone
from ..validation import ConfigError
from .base import Strategy
from .numerics import blocks, own_statistics
from .sharding.building import build_once
from .sharding.gradients import BlockWatch


class FullyShardedStrategy(Strategy):
    """torch's fully_shard over all ranks: per block, and for what is left."""

    has_collective_forward = True

    def __init__(self, config: TrainingConfig, context: RankContext, options: FsdpConfig) -> None:
        super().__init__(config, context)
        if options.cpu_offload and self.precision == "fp16":
            raise ConfigError(
                "fsdp.cpu_offload=true: the loss scaling of training.precision=fp16 is not offered with it. "
                "Set training.precision=bf16 or fp32, or fsdp.cpu_offload=false."
            )
        if context.world_size == 1:
            join_alone(context)
        self._mesh = init_device_mesh(context.device.type, (context.world_size,))
        self._reshard_after_forward = options.reshard_after_forward
        is_pinned = context.device.type == "cuda"
        self._offload = CPUOffloadPolicy(pin_memory=is_pinned) if options.cpu_offload else OffloadPolicy()

    def build(self, build_model: Callable[[], nn.Module]) -> nn.Module:
        """The user's model: whole on rank 0, elsewhere with parameters that have a shape and no memory."""
        return build_once(build_model, self.context)

    def place(self, model: nn.Module) -> nn.Module:
        """As it is: wrap() moves it block by block, since the whole may not fit on a device."""
        return model

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, of whose weights each rank now holds its part of rank 0's."""
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(
                    f"strategy=fsdp: parameter {name} is a scalar, which cannot be cut into parts. "
                    "Give it the shape (1,) in model.py, or set strategy=ddp."
                )
        for unit in [*self._units(module), module]:
            self._receive(unit)
            self._root = fully_shard(
                unit,
                mesh=self._mesh,
                reshard_after_forward=self._reshard_after_forward,
                mp_policy=self._policy(unit),
                offload_policy=self._offload,
            )
        # A rank without a gradient sends zeros for it: the others would take its next one, before its watch ends it.
        self._root.set_reduce_scatter_unused_params(True)
        self._watch = BlockWatch(module) if self.context.world_size > 1 else None
        self.synchronize_buffers()
        return module

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Before the last micro-batch, whose backward averages the sum, each rank adds up whole gradients."""
        self._root.set_requires_gradient_sync(is_last_micro_batch)
        self._is_last_micro_batch = is_last_micro_batch
        if self._watch is not None:
            self._watch.begin_micro_batch()
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """As the base. ConfigError for a block that was not called, or, in the last, a parameter without a gradient."""
        if self._watch is not None:
            self._watch.look_after(loss, is_last_micro_batch=self._is_last_micro_batch)
        super().backward(loss, weight)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip to the norm over all ranks' parts, and return it."""
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # a collective; nothing waits for the device
        clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm

    def synchronize_buffers(self) -> None:
        """Rank 0's buffers on every rank."""
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)

    def replicas(self, *, with_buffers: bool) -> dict[str, Tensor]:
        """Buffers alone, but for BatchNorm's statistics: of the weights each rank has another part."""
        own = own_statistics(self.module)
        return {name: b for name, b in self.module.named_buffers() if with_buffers and name not in own}

    def local_weights(self) -> list[Tensor]:
        """This rank's part of every weight."""
        return [p.to_local().detach() for p in self._parameters if isinstance(p, DTensor)]

    def state_dict(self) -> dict[str, Any]:
        """As the base, when no weights are left gathered, as evaluation does without reshard_after_forward."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().state_dict()

    def get_weights(self) -> dict[str, Tensor]:
        """As the base, gathered one by one: all of them may not fit on a device."""
        weights = {}
        for name, tensor in self.module.state_dict().items():
            whole = _whole(tensor, self.context.device)
            if self.context.is_main:
                weights[name] = whole.detach().cpu()
        return weights

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """As the base; each rank takes its part."""
        for name, tensor in self.module.state_dict().items():
            value = weights[name]
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(value)

    def _units(self, module: nn.Module) -> Iterator[nn.Module]:
        """What is gathered together: blocks that hold a matrix and share no weight with others."""
        num_uses = _count_uses(module)
        for unit in dict.fromkeys(blocks(module)):
            is_big = any(p.dim() > 1 for p in unit.parameters())
            is_called = type(unit).forward is not nn.Module.forward
            if is_big and is_called and all(num_uses[key] == count for key, count in _count_uses(unit).items()):
                yield unit

    def _policy(self, unit: nn.Module) -> MixedPrecisionPolicy:
        """Autocast says what is computed in 16 bits, as under every strategy, and all else in the type of the weights:
        so only a unit whose weights autocast would round itself is gathered so.
        """
        owners = [module for module in unit.modules() if any(map(_is_plain, module.parameters(recurse=False)))]
        if self.precision == "fp32" or not all(map(_is_rounded, owners)):
            return MixedPrecisionPolicy()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def _receive(self, unit: nn.Module) -> None:
        """Put rank 0's weights of one unit on this rank's device, whole."""
        received: dict[Tensor, nn.Parameter] = {}  # of a tied weight once, under each of its names
        for submodule in unit.modules():
            for name, parameter in [*submodule.named_parameters(recurse=False, remove_duplicate=False)]:
                if not _is_plain(parameter):
                    continue
                if parameter not in received:
                    value = torch.empty_like(parameter, device=self.context.device).contiguous()
                    if self.context.is_main:
                        value.copy_(parameter.detach())
                    dist.broadcast(value, src=0)
                    received[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                setattr(submodule, name, received[parameter])


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.to(device).full_tensor()  # type: ignore[attr-defined]
    return whole


def _is_plain(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor)  # of no inner unit


def _is_rounded(module: nn.Module) -> bool:
    """Whether autocast rounds the weights, as it does in torch's own forward of these."""
    of_torch = type(module).forward.__module__.startswith("torch.nn.")
    return of_torch and isinstance(module, nn.Linear | _ConvNd | nn.MultiheadAttention)


def _count_uses(module: nn.Module) -> Counter[int]:
    """Under how many names the module holds each of its parameters."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))

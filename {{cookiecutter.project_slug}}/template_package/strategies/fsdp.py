"""Fully sharded data parallelism (FSDP2): each rank keeps a part of every weight, gradient and optimizer state.

A block's weights are gathered for its forward and backward pass and dropped after it, so memory falls with the number
of ranks, for more communication (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..config import FsdpConfig, TrainingConfig
from ..launching.distributed import RankContext, join_alone
from ..validation import ConfigError
from .base import Strategy
from .numerics import blocks, own_statistics, synchronize_batchnorm


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
        if self.context.is_main:
            return build_model()
        with _parameters_without_memory():
            return build_model()

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
        if self.config.sync_batchnorm:
            self.module = module = synchronize_batchnorm(module, self.context.device)
        for unit in [*self._units(module), module]:
            self._receive(unit)
            self._root = fully_shard(
                unit,
                mesh=self._mesh,
                reshard_after_forward=self._reshard_after_forward,
                mp_policy=self._policy(unit),
                offload_policy=self._offload,
            )
        self.synchronize_buffers()
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
        self.synchronize_buffers()
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
        """What is gathered together, inner modules first: blocks that hold a matrix and share no weight with others."""
        num_uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        # torch has no batch normalization with an input in fp32 and weights in bf16, so these keep theirs in fp32.
        norms = [m for m in module.modules() if isinstance(m, _NormBase)] if self.precision != "fp32" else []
        callable_blocks = [block for block in blocks(module) if type(block).forward is not nn.Module.forward]
        for unit in dict.fromkeys([*norms, *callable_blocks]):
            inside = Counter(id(p) for _, p in unit.named_parameters(remove_duplicate=False))
            is_big = any(p.dim() > 1 for p in unit.parameters()) or unit in norms
            if inside and is_big and all(num_uses[key] == count for key, count in inside.items()):
                yield unit

    def _policy(self, unit: nn.Module) -> MixedPrecisionPolicy:
        if self.precision == "fp32" or isinstance(unit, _NormBase):
            return MixedPrecisionPolicy()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        # Gathered in 16 bits; autocast says what is computed in them, as under every strategy.
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def _receive(self, unit: nn.Module) -> None:
        """Put rank 0's weights of one unit on this rank's device, whole."""
        received: dict[Tensor, nn.Parameter] = {}  # of a tied weight once, under each of its names
        for submodule in unit.modules():
            for name, parameter in [*submodule.named_parameters(recurse=False, remove_duplicate=False)]:
                if isinstance(parameter, DTensor):  # of an inner unit
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


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """In the body, parameters lose their storage as soon as a module registers them; buffers keep theirs."""

    def lighten(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:  # registered again, under another name: still the same one
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    def fill(_: nn.Module, __: str, buffer: Tensor | None) -> Tensor | None:
        return torch.empty_like(buffer, device="cpu") if buffer is not None and buffer.is_meta else None

    of_parameters: Any = register_module_parameter_registration_hook
    of_buffers: Any = register_module_buffer_registration_hook
    hooks = [of_parameters(lighten), of_buffers(fill)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*which is a no-op.*")  # weights that are loaded into nothing
            yield
    finally:
        for hook in hooks:
            hook.remove()

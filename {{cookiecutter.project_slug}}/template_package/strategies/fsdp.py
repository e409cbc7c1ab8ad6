"""Fully sharded data parallelism (FSDP2): each rank keeps a part of every weight, gradient and optimizer state.

A block's weights are gathered before its forward and backward passes and dropped after them (Rajbhandari et al. 2020,
arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277). With training.precision=bf16 or fp16, they are gathered in 16
bits, except those of norm layers. Gradients are averaged over ranks after every micro-batch, not once per step.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..config import FsdpConfig, TrainingConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext, join_group
from .base import Strategy
from .common import bits, blocks

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
# Without it (before torch 2.13), ranks that leave out different parameters add up gradients of different weights.
SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
logger = logging.getLogger(__name__)


class FullyShardedStrategy(Strategy):
    has_collective_forward = True
    needs_all_gradients = True
    can_rebuild = False

    def __init__(self, config: TrainingConfig, context: RankContext, options: FsdpConfig) -> None:
        super().__init__(config, context)
        join_group(context, "auto", timedelta(minutes=10))  # a single rank has none yet
        mean, ones = (
            torch.ones(1, device=context.device),
            torch.ones(context.world_size, device=context.device),
        )
        # with torch 2.8, gloo's mean is a sum, so the gradients would be too large
        if context.world_size > 1:
            # the name before 2.13
            reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            reduce_scatter(mean, ones, dist.ReduceOp.AVG)
        if mean.item() > 1.5:  # NCCL's mean of ones may be off by rounding
            problem = f"torch {torch.__version__} adds up gradients on this backend, where FSDP wants their mean"
            raise ConfigError(
                f"strategy=fsdp: {problem}. Install torch 2.11 or newer, or set strategy=ddp."
            )
        self._mesh = init_device_mesh(context.device.type, (context.world_size,))
        offload = (
            CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
            if options.cpu_offload
            else OffloadPolicy()
        )
        self._memory: Any = {
            "reshard_after_forward": options.reshard_after_forward,
            "offload_policy": offload,
        }

    def move(self, model: nn.Module) -> nn.Module:
        return model  # wrap() moves it unit by unit, since the whole may not fit on a device

    def wrap(self, module: nn.Module) -> nn.Module:
        """Shard the module: rank 0's weights are split among all ranks, so that each rank holds one part."""
        units = [
            unit
            for unit in dict.fromkeys(blocks(module))
            if _is_big(unit) and _is_alone(unit, module)
        ]
        if not units:
            problem = "no block of the model is in an nn.ModuleList, ModuleDict or Sequential"
            logger.warning("strategy=fsdp: %s, so each rank gathers all weights at once", problem)
        dtype, norms = (
            {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision],
            [],
        )
        # BatchNorm fails with 16-bit weights, and autocast computes in fp32 with others
        if dtype is not None:
            norms = [
                m
                for m in module.modules()
                if isinstance(m, NORMS) and m is not module and _is_alone(m, module)
            ]
            # it reads the weights of norms around their forward
            torch.backends.mha.set_fastpath_enabled(False)
        for unit in [*norms, *(unit for unit in units if unit not in norms), module]:
            own = None if unit in norms else dtype
            together = {
                p
                for p in unit.parameters()
                if not isinstance(p, DTensor) and (p.requires_grad or not p.dim())
            }
            kinds = {
                p.dtype if p.dim() else "a scalar": name
                for name, p in module.named_parameters()
                if p in together
            }
            if len(kinds) > 1 or "a scalar" in kinds:
                found = ", ".join(f"{name} ({kind})" for kind, name in kinds.items())
                problem = f"it gathers weights of one dtype together, and no scalars, but there are {found}"
                raise ConfigError(
                    f"strategy=fsdp: {problem}. Give scalars the shape (1,), or set strategy=ddp."
                )
            policy = MixedPrecisionPolicy(own, own and torch.float32, cast_forward_inputs=False)
            for tensor in (*unit.parameters(), *unit.buffers()):
                if not isinstance(tensor, DTensor):  # not sharded yet, as inner units are
                    tensor.data = tensor.data.to(self.context.device).contiguous()
                    dist.broadcast(bits(tensor.data), src=0)
            self._root = fully_shard(unit, mesh=self._mesh, mp_policy=policy, **self._memory)
        return module

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients if their norm over all ranks exceeds `max_norm`. Return the norm before clipping."""
        parameters = self.stepped()
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # a collective; nothing waits for the device
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """In this context, each rank holds the full weights, so ranks may run different numbers of forward passes."""
        for unit in self._sharded():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
        self.drop_gathered()
        for unit in self._sharded():
            unit.set_reshard_after_forward(self._memory["reshard_after_forward"], recurse=False)

    def drop_gathered(self) -> None:
        for unit in self._sharded():
            unit.reshard()

    def _sharded(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add gradients as the base class does. Raise ConfigError if one is missing and this torch sends no zeros."""
        former = (
            [] if SENDS_ZEROS else [(parameter, parameter.grad) for parameter in self._parameters]
        )
        for parameter, _ in former:
            parameter.grad = None
        super().backward(loss, weight)
        if former:
            self.check_gradients()
        for parameter, grad in former:
            if grad is not None:
                parameter.grad = grad.add_(cast(Tensor, parameter.grad))

    def check_gradients(self) -> None:
        """Run the base class's check. Then make FSDP send zeros for missing gradients, so no rank waits for them."""
        super().check_gradients()
        if SENDS_ZEROS:
            self._root.set_reduce_scatter_unused_params(True)


def _is_big(unit: nn.Module) -> bool:
    """Return True if the unit has a weight matrix and defines forward()."""
    return (
        any(p.dim() > 1 for p in unit.parameters()) and type(unit).forward is not nn.Module.forward
    )


def _is_alone(unit: nn.Module, module: nn.Module) -> bool:
    """Return True if the unit has parameters, and no other part of `module` shares any of them."""
    own, all_uses = (
        Counter(id(p) for _, p in m.named_parameters(remove_duplicate=False))
        for m in (unit, module)
    )
    return bool(own) and all(all_uses[key] == count for key, count in own.items())


STRATEGY = FullyShardedStrategy

"""Contains what size=full adds to the strategies of core/strategies.py, and every strategy here inherits."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ..config import Config
from ..core import strategies as core
from ..core.optimizer import load_group
from ..core.ranks import Rank
from ..core.strategies import blocks, broadcast
from ..errors import ConfigError

BuildOptimizer = Callable[[nn.Module], Optimizer]


class Strategy(core.Strategy):
    """Trains on one device. Other strategies inherit from this class and from one of core/strategies.py."""

    config: Config
    has_gradients = True  # False: it shows no averaged gradients before the optimizer's step
    can_rebuild = True  # True: on_epoch_begin() may change which parameters are trained

    def prepare(self, module: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Move the model to the device, wrap it, and build the optimizer. For evaluation, pass build_optimizer=None."""
        self._build_optimizer: Any = build_optimizer
        is_trained = build_optimizer is not None
        super().prepare(adapt(module, self.config, self.rank, is_trained), build_optimizer)

    def rebuild(self) -> None:
        """Wrap the model and build the optimizer again after requires_grad has changed. Keep the optimizer's state."""
        if not self.can_rebuild:
            problem = (
                "it changed requires_grad after the first step, which this strategy cannot follow"
            )
            raise ConfigError(
                f"on_epoch_begin in model.py: {problem}. Set strategy=ddp, or freeze for the whole run."
            )
        former, groups = self.optimizer, self._first_groups
        del self.model
        gc.collect()  # DDP's hooks on the parameters end with it
        self.model = self.wrap(self.module)
        self.optimizer = self._build_optimizer(self.module)
        self._first_groups = [{**group} for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            for other, first in zip(former.param_groups, groups, strict=False):
                if {*group["params"]} & {*other["params"]}:
                    # what steps have changed; a tensor, perhaps in place
                    is_count = {
                        k: isinstance(v, Tensor) or v != first.get(k) for k, v in other.items()
                    }
                    load_group(group, {k: other[k] for k in other if is_count[k]})
            for parameter in group["params"]:
                if parameter in former.state:
                    self.optimizer.state[parameter] = former.state[parameter]

    def local_weights(self) -> list[Tensor]:
        """Return the parameters as this rank stores them: either whole, or only this rank's shard of each."""
        return [
            (p.to_local() if isinstance(p, DTensor) else p).detach()
            for p in self.module.parameters()
        ]

    def drop_gathered(self) -> None:
        """Drop the gathered weights left over from the last forward pass. Call this before you change the weights."""


def adapt(module: nn.Module, config: Config, rank: Rank, is_trained: bool) -> nn.Module:
    """Return the module with training.sync_batchnorm and training.activation_checkpointing, if they are set."""
    if config.training.sync_batchnorm and rank.world_size > 1:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        has_any = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        if has_any and is_trained and rank.device.type == "cpu":
            raise ConfigError(
                "training.sync_batchnorm=true: torch trains with it on GPUs only. Set it to false."
            )
    if config.training.activation_checkpointing:
        checkpoint_activations(module)
    return module


def checkpoint_activations(module: nn.Module) -> None:
    """Store only each block's input, and rerun the block in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    BatchNorm layers thus update their statistics twice per micro-batch. Raise ConfigError if there are no blocks.
    """
    found = list(blocks(module))
    if not found:
        problem = "the model has no nn.ModuleList, ModuleDict or Sequential of blocks to run again"
        raise ConfigError(
            f"training.activation_checkpointing=true: {problem}. Put its layers in one, or set false."
        )
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def join_alone(rank: Rank) -> None:
    """Make a process group for a single rank, which has none, if this process is one."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if rank.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def share_from_main(module: nn.Module, rank: Rank) -> None:
    """Give all ranks rank 0's weights and buffers. DDP and FSDP do it themselves."""
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast(tensor, rank)

"""How numbers are computed, whatever the strategy: precision, TF32, determinism, BatchNorm, recomputed activations."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..config import Config, TrainingConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext, all_reduce


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` as fp32, bf16 or fp16: bf16 where the GPU computes it itself, fp16 on older ones, fp32 on CPU."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def settle_precision(config: Config, context: RankContext) -> Config:
    """The config with `auto` resolved for all ranks together: by the least able of their devices."""
    choices: tuple[Literal["fp32"], Literal["fp16"], Literal["bf16"]] = ("fp32", "fp16", "bf16")
    own = choices.index(resolve_precision(config.training.precision, context.device))
    common = int(all_reduce(torch.tensor(own, device=context.device), dist.ReduceOp.MIN))
    return replace(config, training=replace(config.training, precision=choices[common]))


def set_numerics(config: TrainingConfig) -> None:
    """Set torch's global switches. TF32: 10 bits of mantissa in fp32 matrix products, on GPUs since Ampere."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and not config.deterministic  # it may choose other kernels
    torch.use_deterministic_algorithms(config.deterministic)


def synchronize_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with BatchNorm's statistics taken over all ranks' samples. ConfigError on CPU ranks."""
    if device.type == "cpu":
        raise ConfigError("training.sync_batchnorm=true: torch has it on GPUs only. Set it to false on CPU ranks.")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def unsynchronized_statistics(model: nn.Module) -> set[str]:
    """The names of BatchNorm's statistics: each rank has its own until buffers are synchronized."""
    return {
        f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for key, _ in module.named_buffers(recurse=False)
    }


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost ModuleLists and Sequentials."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield child
        else:
            yield from blocks(child)


def checkpoint_activations(model: nn.Module) -> None:
    """Let each block keep only its inputs, and run again in backward (Chen et al. 2016, arXiv:1604.06174).

    ConfigError if the model has no blocks.
    """
    found = list(blocks(model))
    if not found:
        raise ConfigError(
            "training.activation_checkpointing=true: the model has no nn.ModuleList or nn.Sequential of blocks to run "
            "again. Put its layers in one, or set training.activation_checkpointing=false."
        )
    for block in found:
        norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=partial(_contexts, norms))


def _contexts(norms: list[_BatchNorm]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(norms)


@contextmanager
def _statistics_kept(norms: list[_BatchNorm]) -> Iterator[None]:
    """In the body, the second forward of a step, BatchNorm's running statistics stay as the first has left them."""
    former = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.track_running_stats]
    counts = [None if count is None else count.clone() for _, _, count in former]
    for norm, _, _ in former:
        norm.momentum = 0.0  # with track_running_stats=False it would keep fewer tensors than in the first forward
    try:
        yield
    finally:
        for (norm, momentum, count), former_count in zip(former, counts, strict=True):
            norm.momentum = momentum
            if count is not None and former_count is not None:
                count.copy_(former_count)

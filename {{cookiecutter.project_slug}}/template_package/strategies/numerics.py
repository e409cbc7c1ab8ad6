"""How numbers are computed, whatever the strategy: precision, TF32, determinism, BatchNorm, recomputed activations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..config import TrainingConfig
from ..validation import ConfigError


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` as fp32, bf16 or fp16: bf16 where the GPU computes it itself, fp16 on older ones, fp32 on CPU."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


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


def own_statistics(model: nn.Module) -> set[str]:
    """The names of BatchNorm's statistics: each rank's own until they are synchronised."""
    return {
        f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for key, _ in module.named_buffers(recurse=False)
    }


def checkpoint_activations(model: nn.Module) -> None:
    """Let each block, an entry of the outermost ModuleList or Sequential, keep only inputs and run again in backward.

    Chen et al. 2016, arXiv:1604.06174. ConfigError if the model has no such blocks.
    """
    found = list(blocks(model))
    if not found:
        raise ConfigError(
            "training.activation_checkpointing=true: the model has no nn.ModuleList or nn.Sequential of blocks to run "
            "again. Put its layers in one, or set training.activation_checkpointing=false."
        )
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost ModuleLists and Sequentials."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield child
        else:
            yield from blocks(child)

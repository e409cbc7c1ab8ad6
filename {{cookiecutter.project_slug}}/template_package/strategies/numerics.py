"""Precision and activation checkpointing, alike for all strategies."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config import Config
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
    own = min(choices.index(resolve_precision(config.training.precision, device)) for device in context.devices)
    common = int(all_reduce(torch.tensor(own, device=context.device), dist.ReduceOp.MIN))
    return replace(config, training=replace(config.training, precision=choices[common]))


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost ModuleLists, ModuleDicts and Sequentials."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield child
        else:
            yield from blocks(child)


def checkpoint_activations(model: nn.Module) -> None:
    """Let each block keep only its inputs, and run again in backward (Chen et al. 2016, arXiv:1604.06174).

    BatchNorm's running statistics then move twice a step. ConfigError if the model has no blocks.
    """
    found = list(blocks(model))
    if not found:
        problem = "the model has no nn.ModuleList, ModuleDict or Sequential of blocks to run again"
        raise ConfigError(f"training.activation_checkpointing=true: {problem}. Put its layers in one, or set false.")
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

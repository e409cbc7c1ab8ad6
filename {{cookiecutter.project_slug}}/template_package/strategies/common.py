"""Functions for all strategies: precision, activation checkpointing, and sending rank 0's state to all ranks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ..config import Config
from ..core.ranks import all_reduce
from ..errors import ConfigError
from ..launching.distributed import RankContext

# what a checkpoint may hold
LEAVES = (
    Tensor,
    numpy.generic,
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
)
# keys of a group that `optimizer:` sets
NOT_LOADED = (
    "params",
    "initial_lr",
    "weight_decay",
    "betas",
    "momentum",
)


def settle_precision(config: Config, context: RankContext) -> Config:
    """Turn precision=auto into fp32 if a rank has no GPU, fp16 if a GPU is older than Ampere, and bf16 otherwise."""
    if config.training.precision != "auto":
        return config
    generations = [
        torch.cuda.get_device_capability(d)[0] if d.type == "cuda" else 0 for d in context.devices
    ]
    oldest = int(all_reduce(torch.tensor(min(generations)), dist.ReduceOp.MIN))
    # 8: Ampere
    precision: Literal["bf16", "fp16", "fp32"] = (
        "bf16" if oldest >= 8 else "fp16" if oldest else "fp32"
    )
    return replace(config, training=replace(config.training, precision=precision))


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the module's outermost ModuleLists, ModuleDicts and Sequentials."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield child
        else:
            yield from blocks(child)


def checkpoint_activations(model: nn.Module) -> None:
    """Store only each block's input, and rerun the block in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    BatchNorm layers thus update their statistics twice per micro-batch. Raise ConfigError if there are no blocks.
    """
    found = list(blocks(model))
    if not found:
        problem = "the model has no nn.ModuleList, ModuleDict or Sequential of blocks to run again"
        raise ConfigError(
            f"training.activation_checkpointing=true: {problem}. Put its layers in one, or set false."
        )
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@torch.no_grad()
def set_optimizer_state(
    module: nn.Module, optimizer: Optimizer, saved: dict[str, Any], context: RankContext
) -> None:
    """Load rank 0's optimizer state on all ranks, without calling step(), which would run the user's hooks."""
    names = {parameter: name for name, parameter in module.named_parameters()}

    def receive_all(value: Any, like: Tensor | None = None) -> Any:
        return tree_map(
            lambda part: receive(part, context, like) if isinstance(part, Tensor) else part, value
        )

    for group in (group for group in optimizer.param_groups if group["params"]):
        # the one of build_optimizer(), before another is loaded
        group.setdefault("initial_lr", group["lr"])
        # then so is the count of steps
        is_on_device = group.get("fused") or group.get("capturable")
        for former in (
            former
            for former in saved["param_groups"]
            if names[group["params"][0]] in former["params"]
        ):
            options = {
                key: receive_all(value) for key, value in former.items() if key not in NOT_LOADED
            }
            group.update(
                {
                    key: value.cpu() if isinstance(value, Tensor) else value
                    for key, value in options.items()
                }
            )
        for parameter in (
            parameter for parameter in group["params"] if names[parameter] in saved["state"]
        ):
            for key, saved_value in saved["state"][names[parameter]].items():
                value = receive_all(saved_value, parameter)
                is_count = key == "step" and isinstance(value, Tensor) and not is_on_device
                optimizer.state[parameter][key] = value.cpu() if is_count else value


def shapes_of(module: nn.Module) -> dict[str, torch.Size | None]:
    """Return the shape of each tensor in the module's state dict, or None for a copy, such as extra state."""
    state = module.state_dict(keep_vars=True)
    memory = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return {name: tensor.shape if id(tensor) in memory else None for name, tensor in state.items()}


@torch.no_grad()
def gather_whole(state: Any, context: RankContext) -> Any:
    """Return a state dict with its tensors whole and on the CPU. All ranks must call this. Only rank 0 gets all of it.

    The other ranks get an empty one.
    """
    # Given a GPU's memory, gloo crashes (https://github.com/pytorch/pytorch/issues/152645).
    is_gloo = dist.is_initialized() and dist.get_backend() == "gloo"

    def gather(value: Any) -> Any:
        # torch.load reads plain containers only: no defaultdict, no namedtuple
        if isinstance(value, dict):
            return {key: gather(item) for key, item in value.items()}
        if isinstance(value, list):
            return [gather(item) for item in value]
        if isinstance(value, tuple):
            return tuple(gather(item) for item in value)
        if not isinstance(value, LEAVES):
            raise TypeError(
                f"Unexpected value type {type(value)} in the model's or the optimizer's state"
            )
        if isinstance(value, DTensor):
            value = cast(DTensor, value.to("cpu" if is_gloo else context.device)).full_tensor()
        return value.cpu() if isinstance(value, Tensor) and context.rank == 0 else value

    whole = gather(state)  # on every rank: its collectives need all of them
    return whole if context.rank == 0 else {}


def receive(value: Tensor, context: RankContext, like: Tensor | None = None) -> Tensor:
    """Copy rank 0's `value` to this rank's device and return it. On other ranks, `value` is a meta tensor.

    If `like` is a DTensor of the same shape, the result is sharded in the same way.
    """
    whole = (
        torch.empty_like(value, device=context.device)
        if value.is_meta
        else value.to(context.device).clone()
    )
    if context.world_size > 1:
        dist.broadcast(bits(whole := whole.contiguous()), src=0)
    if isinstance(like, DTensor) and whole.dim() and whole.shape == like.shape:
        # One whole tensor at a time; torch's own function fails on offloaded ones.
        whole = distribute_tensor(
            whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        )
    return whole


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes. gloo and NCCL send them whatever the dtype; they cannot send int16 or float8."""
    # refuses what is not contiguous, where bytes would be a copy's
    return tensor.detach().view(-1).view(torch.uint8)


@contextmanager
def buffers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """On exit, give these modules the buffers that they have on entry: the same tensors with the same values.

    Caches live on: buffers that no checkpoint holds and that were made, replaced or resized meanwhile. Their modules
    may have noted the new length.
    """
    held = [(module, dict(module._buffers)) for module in modules]
    former = {
        id(buffer): buffer.clone()
        for _, own in held
        for buffer in own.values()
        if buffer is not None
    }
    try:
        yield
    finally:
        for module, own in held:
            for name, buffer in [*module._buffers.items()]:
                is_same = buffer is own.get(name) and (
                    buffer is None or buffer.shape == former[id(buffer)].shape
                )
                if name in module._non_persistent_buffers_set and not is_same:
                    own.pop(name, None)
                else:
                    del module._buffers[name]
            module._buffers.update(own)
            for buffer in (buffer for buffer in own.values() if buffer is not None):
                # copy_() would repeat a single value in an enlarged buffer
                value = former[id(buffer)]
                buffer.data = buffer.data.copy_(value) if buffer.shape == value.shape else value

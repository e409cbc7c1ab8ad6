"""Weights and the optimizer's state between ranks: rank 0's are handed out one tensor at a time."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ..launching.distributed import RankContext

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@torch.no_grad()
def set_optimizer_state(module: nn.Module, optimizer: Optimizer, saved: dict[str, Any], context: RankContext) -> None:
    """Load rank 0's state on every rank. torch's own function would make a step, which a user's step hooks count."""
    names = {parameter: name for name, parameter in module.named_parameters()}

    def receive_all(value: Any, like: Tensor | None = None) -> Any:
        return tree_map(lambda part: receive(part, context, like) if isinstance(part, Tensor) else part, value)

    for group in (group for group in optimizer.param_groups if group["params"]):
        is_on_device = group.get("fused") or group.get("capturable")  # where torch keeps the count of steps
        for former in (former for former in saved["param_groups"] if names[group["params"][0]] in former["params"]):
            options = {key: receive_all(value) for key, value in former.items() if key != "params"}
            group.update({key: value.cpu() if isinstance(value, Tensor) else value for key, value in options.items()})
        for parameter in (parameter for parameter in group["params"] if names[parameter] in saved["state"]):
            for key, saved_value in saved["state"][names[parameter]].items():
                value = receive_all(saved_value, parameter)
                is_count = key == "step" and isinstance(value, Tensor) and not is_on_device
                optimizer.state[parameter][key] = value.cpu() if is_count else value


def receive(value: Tensor, context: RankContext, like: Tensor | None = None) -> Tensor:
    """Rank 0's value, which the others know as meta, on the device; cut as `like` is, if that is a DTensor."""
    whole = torch.empty_like(value, device=context.device) if value.is_meta else value.to(context.device).clone()
    if context.world_size > 1:
        dist.broadcast(whole := whole.contiguous(), src=0)
    if isinstance(like, DTensor) and whole.dim() and whole.shape == like.shape:
        # One whole tensor at a time; torch's own function fails on offloaded ones.
        whole = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return whole

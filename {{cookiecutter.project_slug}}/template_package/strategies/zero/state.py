"""Weights and optimizer state under ZeRO, between the parts that ranks hold and the whole that checkpoints do.

DeepSpeed has its own checkpoints for this, which only DeepSpeed reads. So names are used here that are not its API:
constraints.txt holds the version that they were tested with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from ...launching.distributed import RankContext


def gather_weights(module: nn.Module, context: RankContext) -> dict[str, Tensor]:
    """Stage 3's weights on rank 0's CPU, one after the other; all ranks call it."""
    from deepspeed import zero

    weights = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        with zero.GatheredParameters([tensor]):
            if context.is_main:
                weights[name] = tensor.detach().to("cpu", copy=True)
    return weights


@torch.no_grad()
def scatter_weights(module: nn.Module, weights: dict[str, Tensor], context: RankContext) -> None:
    """Take over a state dict in any stage; what is cut comes from rank 0."""
    from deepspeed import zero

    for name, tensor in module.state_dict(keep_vars=True).items():
        with zero.GatheredParameters([tensor], modifier_rank=0):
            if context.is_main or not hasattr(tensor, "ds_id"):
                tensor.copy_(weights[name])


class Groups:
    """The groups of the user's optimizer, and the names of their parameters."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._all = optimizer.param_groups if optimizer is not None else []
        self._names = [[names[id(parameter)] for parameter in group["params"]] for group in self._all]
        self._trained = [[names[id(p)] for p in group["params"] if p.requires_grad] for group in self._all]

    @property
    def trained(self) -> list[list[str]]:
        """The names of the parameters that each group trains, of the groups that train any."""
        return [names for names in self._trained if names]

    def leave_trained(self, optimizer: Optimizer) -> None:
        """Take the other groups out: stages 1 and 2 fail on them, and stage 3 counts them in one place alone."""
        optimizer.param_groups = [group for group, names in zip(self._all, self._trained, strict=True) if names]

    def saved(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All, as checkpoints have them, of which DeepSpeed's are `groups` now."""
        left = iter(groups)
        of_all = [next(left) if names else group for group, names in zip(self._all, self._trained, strict=True)]
        return [
            {"initial_lr": group["lr"], **group, "params": names}  # as set_learning_rate() has it
            for group, names in zip(of_all, self._names, strict=True)
        ]


class OptimizerParts:
    """optimizer: DeepSpeed's, above stage 0."""

    def __init__(self, optimizer: Any, module: nn.Module, groups: Groups, context: RankContext) -> None:
        self._optimizer, self._module, self._context = optimizer, module, context
        self._all_groups, self._groups = groups, groups.trained
        self._parameters: dict[str, Any] = dict(module.named_parameters())

    def gather(self) -> dict[str, Any]:
        """As torch's get_optimizer_state_dict() gives it; all ranks call it, rank 0's is whole. {} before step 1."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self._optimizer.state:
            return {}
        self._link()
        part = next(iter(self._optimizer.state.values()))  # any: all have the same keys and numbers
        state: dict[str, dict[str, Tensor]] = {}
        for name in (name for group in self._groups for name in group):
            of_parameter = state.setdefault(name, {})
            for key, value in part.items():
                whole = safe_get_full_optimizer_state(self._parameters[name], key) if value.dim() else value
                if self._context.is_main:
                    of_parameter[key] = whole.to("cpu", copy=True)
        groups = self._all_groups.saved(self._optimizer.param_groups)
        return {"state": state, "param_groups": groups} if self._context.is_main else {}

    def scatter(self, saved: dict[str, Any]) -> None:
        """Take this rank's parts of what gather() gave, under any strategy; before the first step."""
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            for former in saved["param_groups"]:
                if names[0] in former["params"]:
                    group.update({key: value for key, value in former.items() if key != "params"})
        names = [name for group in self._groups for name in group if name in saved["state"]]
        pattern: dict[str, Tensor] = saved["state"][names[0]] if names else {}
        options = self._optimizer.param_groups[0]
        is_counted_there = options.get("fused") or options.get("capturable")  # as torch's load_state_dict()
        for part in self._flat_parts():
            device = part.device if is_counted_there else torch.device("cpu")
            self._optimizer.state[part] = {
                key: torch.zeros_like(part) if value.dim() else value.to(device, copy=True)
                for key, value in pattern.items()
            }
        self._link()
        for name in names:
            for key, value in saved["state"][name].items():
                if value.dim():
                    self._set(self._parameters[name], key, value)

    def local_weights(self) -> list[Tensor]:
        """This rank's part of every parameter that is cut, without what fills up the last."""
        rank = self._context.rank
        cut: list[Any] = [parameter for parameter in self._module.parameters() if hasattr(parameter, "ds_id")]
        parts = [(parameter.ds_tensor.detach(), parameter.ds_numel) for parameter in cut]
        return [part[: max(0, numel - rank * part.numel())] for part, numel in parts]

    @property
    def _is_cut(self) -> bool:
        return hasattr(next(iter(self._parameters.values())), "ds_id")  # stage 3

    def _flat_parts(self) -> list[Tensor]:
        """What the optimizer steps: one tensor for many parameters' parts."""
        name = "fp32_partitioned_groups_flat" if self._is_cut else "single_partition_of_fp32_groups"
        parts: list[Tensor] = getattr(self._optimizer, name)
        return parts

    def _link(self) -> None:
        """Tell each parameter where its part is, which DeepSpeed does for the first group alone."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        if not self._is_cut:
            for parameters, part in zip(self._optimizer.bit16_groups, self._flat_parts(), strict=True):
                lazy_init_hp_params_optimizer_state(parameters, part, self._optimizer.state)

    def _set(self, parameter: Any, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not self._is_cut:
            safe_set_full_optimizer_state(parameter, value, key)
            return
        size = parameter.ds_tensor.numel()
        filled = pad(value.flatten(), (0, size * self._context.world_size - value.numel()))
        safe_set_local_optimizer_state(parameter, filled[size * self._context.rank :][:size], key)

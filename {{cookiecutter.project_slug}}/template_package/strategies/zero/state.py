"""Gathers ZeRO's shards of weights and optimizer state for checkpoints, and cuts loaded states into shards again.

DeepSpeed's own checkpoints can be read only by DeepSpeed. To write portable checkpoints, this file uses names that are
not part of DeepSpeed's public API, but that exist in the version that constraints.txt pins.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from ...core.optimizer import NOT_LOADED
from ...core.ranks import Rank
from ...errors import ConfigError


def gather_weights(module: nn.Module, rank: Rank) -> dict[str, Tensor]:
    """Gather the weights of stage 3 in rank 0's CPU memory, one after the other. All ranks must call this."""
    from deepspeed import zero

    weights = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        with zero.GatheredParameters([tensor]):
            if rank.is_main:
                weights[name] = tensor.detach().to("cpu", copy=True)
    return weights


@torch.no_grad()
def scatter_weights(module: nn.Module, weights: dict[str, Tensor], rank: Rank) -> None:
    """Load whole weights in any stage. If the model's weights are sharded, each rank gets its shards from rank 0.

    Raise ConfigError if their names or shapes are not the model's.
    """
    from deepspeed import zero

    memory = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    own: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    held = {name: tensor for name, tensor in own.items() if id(tensor) in memory}
    shapes = {name: getattr(tensor, "ds_shape", tensor.shape) for name, tensor in held.items()}
    for name in own.keys() | weights.keys():
        found = weights[name].shape if name in weights else None
        if found is None or name not in own or found != shapes.get(name, found):
            problem = f"{name}: {found} in the file, {shapes.get(name)} in the model"
            raise ConfigError(f"{problem}. Change the model back, or choose another name=…")
    for name, tensor in held.items():
        with zero.GatheredParameters([tensor], modifier_rank=0):
            if rank.is_main or not hasattr(tensor, "ds_id"):
                tensor.copy_(weights[name])
    # such as extra state, which is no memory of the module
    others = {name: weights[name] for name in own.keys() - held.keys()}
    module.load_state_dict(others, strict=False)


class Groups:
    """Keeps the parameter groups of the user's optimizer, and the names of the parameters in each group."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._groups = optimizer.param_groups if optimizer is not None else []
        self._names = [[names[p] for p in group["params"]] for group in self._groups]
        self._trained = [
            [names[p] for p in group["params"] if p.requires_grad] for group in self._groups
        ]
        self.trained = [name for group in self._trained for name in group]

    def leave_trained(self, optimizer: Optimizer) -> None:
        """Remove groups without trained parameters. Stages 1 and 2 fail on such groups, and stage 3 miscounts them."""
        optimizer.param_groups = [
            group for group, names in zip(self._groups, self._trained, strict=True) if names
        ]

    def saved(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return all groups in the format of checkpoints. `groups` are DeepSpeed's groups, without the frozen ones."""
        left = iter(groups)
        present = [
            next(left) if names else group
            for group, names in zip(self._groups, self._trained, strict=True)
        ]
        return [
            {"initial_lr": group["lr"], **group, "params": names}  # as set_learning_rate() does
            for group, names in zip(present, self._names, strict=True)
        ]

    def load(self, groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
        """For each of DeepSpeed's groups, load the settings of the saved group that has the same parameters."""
        for group, names in zip(groups, filter(None, self._trained), strict=True):
            # the one of build_optimizer(), before another is loaded
            group.setdefault("initial_lr", group["lr"])
            former = next((former for former in saved if names[0] in former["params"]), {})
            group.update({key: value for key, value in former.items() if key not in NOT_LOADED})


class OptimizerParts:
    """Gathers and scatters the sharded state of DeepSpeed's optimizer, in stages 1 to 3."""

    def __init__(self, optimizer: Any, module: nn.Module, groups: Groups, rank: Rank) -> None:
        self._optimizer, self._groups, self._rank = optimizer, groups, rank
        self._parameters: dict[str, Any] = dict(module.named_parameters())
        # stage 3
        self._is_cut = any(hasattr(parameter, "ds_id") for parameter in self._parameters.values())

    def gather(self) -> dict[str, Any]:
        """Return the whole state on rank 0, in the format of get_optimizer_state_dict(). All ranks must call this."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self._optimizer.state:  # before the first step
            return {}
        self._link()
        part = next(iter(self._optimizer.state.values()))  # any: all have the same keys and numbers
        state: dict[str, dict[str, Tensor]] = {name: {} for name in self._groups.trained}
        for name, values in state.items():
            for key, value in part.items():
                whole = (
                    safe_get_full_optimizer_state(self._parameters[name], key)
                    if value.dim()
                    else value
                )
                if self._rank.is_main:
                    values[key] = whole.to("cpu", copy=True)
        groups = self._groups.saved(self._optimizer.param_groups)
        return {"state": state, "param_groups": groups} if self._rank.is_main else {}

    def scatter(self, saved: dict[str, Any]) -> None:
        """Load this rank's shards of a whole state, saved by any strategy. Call this before the first step."""
        self._groups.load(self._optimizer.param_groups, saved["param_groups"])
        states = {
            name: saved["state"][name] for name in self._groups.trained if name in saved["state"]
        }
        pattern: dict[str, Tensor] = next(iter(states.values()), {})
        # as torch
        is_counted_there = any(
            self._optimizer.param_groups[0].get(key) for key in ("fused", "capturable")
        )
        flat_parts = (
            "fp32_partitioned_groups_flat" if self._is_cut else "single_partition_of_fp32_groups"
        )
        for part in getattr(self._optimizer, flat_parts):  # each holds the parts of many parameters
            device = part.device if is_counted_there else torch.device("cpu")
            self._optimizer.state[part] = {
                key: torch.zeros_like(part) if value.dim() else value.to(device, copy=True)
                for key, value in pattern.items()
            }
        self._link()
        for name, values in states.items():
            for key, value in values.items():
                if value.dim():
                    self._set(self._parameters[name], key, value)

    def local_weights(self) -> list[Tensor]:
        """In stage 3, return this rank's shard of every parameter, without the padding at the end of the last shard."""
        rank = self._rank.rank
        parts = [
            (parameter.ds_tensor.detach(), parameter.ds_numel)
            for parameter in self._parameters.values()
        ]
        return [part[: max(0, numel - rank * part.numel())] for part, numel in parts]

    def _link(self) -> None:
        """In stages 1 and 2, link parameters to their optimizer states. DeepSpeed itself links only the first group."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        optimizer = self._optimizer
        if not self._is_cut:
            for parameters, part in zip(
                optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
            ):
                lazy_init_hp_params_optimizer_state(parameters, part, optimizer.state)

    def _set(self, parameter: Any, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self._is_cut:
            size = parameter.ds_tensor.numel()
            filled = pad(value.flatten(), (0, size * self._rank.world_size - value.numel()))
            safe_set_local_optimizer_state(parameter, filled[size * self._rank.rank :][:size], key)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

"""Collects and restores all that a checkpoint holds, and reads the weights of other programs."""

import re
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..config import Config
from ..core.checkpoint import CONTINUE, FORMAT_VERSION
from ..core.config import to_dict
from ..core.ranks import gather_objects, pack, unpack
from ..errors import ConfigError, one_line
from ..strategies.base import Strategy
from . import sharded
from .optimization import WeightAverage
from .progress import Progress
from .sharded import load_any, read_parts, read_whole


class Checkpoints(sharded.Checkpoints):
    """Evaluates weights that other programs have written, too."""

    def load_to_evaluate(self, path: Path) -> dict[str, Any]:
        if path.name == "best.pt" or path.suffix == ".dcp" or path.stem.startswith("step_"):
            return read_whole(super().load_to_evaluate(path))
        return {"step": 0, "epoch": 0, "file": str(path)}

    def weights_of(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        if "file" not in state:
            return super().weights_of(state, model)
        load_weights(model, Path(state["file"]))
        return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def load_run(
    state: dict[str, Any],
    strategy: Strategy,
    progress: Progress,
    config: Config,
    average: WeightAverage | None,
) -> None:
    """Restore `state`, if any. Raise ConfigError if it does not match the model or the data size."""
    if state:
        # older files lack it
        former = state["early_stopping"].get("num_samples", progress.num_samples)
        if former != progress.num_samples:
            problem = f"was begun with {former} training samples, and there are {progress.num_samples} now"
            raise ConfigError(f"name={config.name}: {problem}. {CONTINUE}")
        state = read_parts(state, strategy)
        strategy.load_state_dict(state)
        if average is not None:  # if ema_decay is new, the average begins with the weights
            average.set_weights(state.get("average", state["model"]))
        progress.load_state_dict(state)


def collect_state(
    strategy: Strategy,
    progress: Progress,
    config: Config,
    average: WeightAverage | None,
    cursor: Any,
) -> dict[str, Any]:
    """Return what a checkpoint holds, as strategy.collect() leaves it to the ranks. All must call this."""
    state = {"format_version": FORMAT_VERSION, "config": to_dict(config), **progress.state_dict()}
    state |= strategy.state_dict()
    state |= {} if average is None else {"average": average.get_weights()}
    # of each rank; generators have no state to keep: each micro-batch seeds what it draws
    packed = gather_objects(pack({"cursor": cursor}))
    return state | {"random_states": [unpack(content) for content in packed or []]}


def load_weights(model: nn.Module, path: Path, source: str = "checkpoint ") -> None:
    """Copy weights into `model` from a .safetensors, .pt, .pth or .bin file, which another program may have written.

    The file may hold a state dict or a checkpoint, as a .dcp folder does. Raise ConfigError if a name or a shape does
    not fit the model.
    """
    source += str(path)
    try:
        if path.is_dir():
            content: Any = read_whole(load_any(path) | {"optimizer": {}})
        elif path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, "cpu", weights_only=True)
        for key in ("average", "model", "state_dict", "model_state_dict", "net"):
            content = content[key] if isinstance(content.get(key), dict) else content
        weights = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    except Exception as error:
        raise ConfigError(
            f"{source}: no state dict ({one_line(error)}). Name a file of model.state_dict()."
        ) from None
    own = model.state_dict(keep_vars=True)
    if not weights.keys() & own.keys():  # compile and DDP, nested either way
        weights = {
            re.sub(r"^(_orig_mod\.|module\.)+", "", name): value for name, value in weights.items()
        }
    names = {id(tensor): name for name, tensor in own.items() if name in weights}
    # safetensors holds a tied tensor under one of its names.
    weights |= {
        name: weights[names[id(tensor)]] for name, tensor in own.items() if id(tensor) in names
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        problem = shorten(str(error), 500, placeholder="…")
        remedy = "Change model.* or model.py, or choose another file"
        raise ConfigError(f"{source}: does not fit the model: {problem} {remedy}.") from None

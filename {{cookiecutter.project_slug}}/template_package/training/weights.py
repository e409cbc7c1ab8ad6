"""A model's weights as files: anyone's to begin with, ours for anyone to use."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from .. import model as user_model
from ..model import ModelConfig
from ..validation import ConfigError, one_line
from .checkpoint import write_whole

MAX_NAMES = 20
"""Of one kind that an error lists."""


def build_model(config: ModelConfig, initial_weights: str | None) -> nn.Module:
    """The user's model, with the weights of that file if one is named."""
    model = user_model.build_model(config)
    if initial_weights is not None:
        load_initial_weights(model, Path(initial_weights))
    return model.train()  # a pretrained model comes in evaluation mode


def load_initial_weights(model: nn.Module, path: Path) -> None:
    """Copy anyone's weights into `model`: .safetensors, or .pt, .pth, .bin with a state dict, bare or in a checkpoint.

    ConfigError lists names that are missing, unexpected or of another shape.
    """
    weights = _read_weights(path)
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):  # compile and DDP, nested either way
        if not weights.keys() & model.state_dict().keys():
            consume_prefix_in_state_dict_if_present(weights, prefix)
    _fill_tied(weights, model)
    check_weights(shapes_of(model), weights, f"checkpoint.initial_weights={path}")
    model.load_state_dict(weights)


def _save_model(model: nn.Module, path: Path) -> None:
    """safetensors.torch.save_model, which tells of a full disk in words alone."""
    try:
        save_model(model, str(path))
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fill_tied(weights: dict[str, Tensor], model: nn.Module) -> None:
    """safetensors holds a tensor that has two names once: give it the other name too."""
    places = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items() if name in weights}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in weights and id(tensor) in places:
            weights[name] = weights[places[id(tensor)]]


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """The shape of each tensor in the model's state dict."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def check_weights(shapes: dict[str, torch.Size], weights: dict[str, Tensor], source: str) -> None:
    """ConfigError that lists the names in which `weights` do not fit a model of these shapes."""
    problems = {
        "missing": [one_line(name) for name in shapes if name not in weights],
        "unexpected": [one_line(name) for name in weights if name not in shapes],
        "misshapen": [
            f"{name} {tuple(weights[name].shape)} instead of {tuple(shape)}"
            for name, shape in shapes.items()
            if name in weights and weights[name].shape != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise ConfigError(
            f"{source}: does not fit the model: {listed}. Change model.* or model.py, or choose another file or name=…"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def export_weights(model: nn.Module, path: Path) -> None:
    """Write the model's weights as safetensors, with plain names; tied weights once."""
    write_whole(path, lambda beside: _save_model(model, beside))
    path.chmod(0o666 & ~_umask())  # safetensors keeps its files to their owner; colleagues may read the others


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not os.path.isfile(path):  # unlike Path's, it raises nothing
        raise ConfigError(
            f"checkpoint.initial_weights={path}: no such file. Name a .pt, .pth, .bin or .safetensors file."
        )
    try:
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"checkpoint.initial_weights={path} cannot be read ({reason}). "
            "Save it as safetensors or as a plain state dict (torch.save(model.state_dict(), path))."
        ) from None
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content or not all(map(_is_weight, content.items())):
        raise ConfigError(f"checkpoint.initial_weights={path} holds no state dict. Save model.state_dict() in it.")
    return dict(content)


def _is_weight(item: tuple[object, object]) -> bool:
    """A name, and a tensor whose numbers are there, one by one."""
    name, value = item
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized

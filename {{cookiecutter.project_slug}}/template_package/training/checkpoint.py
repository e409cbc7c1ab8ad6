"""Checkpoints, written whole and refused if damaged; and weights as files: to begin with, and for others to use."""

import errno
import logging
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils._pytree import tree_map

from ..errors import ConfigError, one_line
from ..files import write_whole

FORMAT_VERSION = 1
KEYS = {"model", "optimizer", "step", "epoch", "position", "random_states", "best", "early_stopping", "config"}
logger = logging.getLogger(__name__)


class CheckpointFolder:
    """runs/<name>/checkpoints: step_00000120.pt …, of which the last `keep_last` stay, and best.pt, which stays."""

    def __init__(self, folder: Path, keep_last: int | None = None) -> None:
        self.folder, self.best, self._keep_last = folder, folder / "best.pt", keep_last
        self._is_verified = False

    def newest_first(self) -> list[Path]:
        """The checkpoints that a run can continue from; best.pt last, which may be the only one."""
        if not os.path.lexists(self.folder):  # a link may lead to a disk that is away: then listdir raises
            return []
        names = [name for name in os.listdir(self.folder) if re.fullmatch(r"best\.pt|step_\d{8}\.pt", name)]
        return [self.folder / name for name in sorted(names, reverse=True)]

    def save(self, state: dict[str, Any], *, is_best: bool = False) -> None:
        """Write one checkpoint, and drop those that are no longer among the last."""
        path = self.best if is_best else self.folder / f"step_{state['step']:08d}.pt"
        path.parent.mkdir(exist_ok=True)
        # torch.load refuses NumPy's numbers: rates of a user's optimizer, say.
        state = tree_map(lambda value: value.item() if isinstance(value, numpy.generic) else value, state)
        write_whole(path, lambda beside: _save(state, beside))
        if not self._is_verified:  # a state that torch.load refuses could never be continued
            load_checkpoint(path)
            self._is_verified = True
        if self._keep_last is not None and not is_best:
            # Not those of later steps: they could not be read at the last start, and say nothing of what is old.
            former = [other for other in self.newest_first() if other != self.best and other.name <= path.name]
            for old in former[self._keep_last :]:
                old.unlink(missing_ok=True)

    def load_first(self, paths: list[Path]) -> tuple[Path, dict[str, Any]] | None:
        """The first of these checkpoints that can be read, and its state; None without any."""
        for path in paths:
            try:
                return path, load_checkpoint(path)
            except ConfigError as error:
                logger.warning("%s Another one is tried.", error)
        return None


def _save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's words for a full disk do not say so
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint of ours, on the CPU. Nothing in the file is executed. ConfigError if it is damaged, or
    not a checkpoint; OSError if the disk does not answer: an older one would be taken for the newest.
    """
    try:
        with zipfile.ZipFile(path) as file:  # torch.load reads flipped bits without a word; the CRC-32 tells
            if damaged := file.testzip():
                raise ValueError(f"the bits of {damaged} have changed")
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or state.get("format_version") != FORMAT_VERSION or not state.keys() >= KEYS:
            raise ValueError(f"no checkpoint of format_version {FORMAT_VERSION}; try checkpoint.initial_weights")
    except FileNotFoundError:
        raise ConfigError(f"checkpoint {path} does not exist. Name an existing file, or train first.") from None
    except Exception as error:  # a damaged file fails anywhere in the readers; a foreign one may hold anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a flipped bit can make an impossible offset
            raise
        raise ConfigError(f"checkpoint {path} cannot be used ({one_line(error)}). Remove it or name another.") from None
    return state


def load_initial_weights(model: nn.Module, path: Path) -> None:
    """Copy anyone's weights into `model`: .safetensors, or .pt, .pth, .bin with a state dict, bare or in a checkpoint.

    ConfigError lists names that are missing, unexpected or of another shape.
    """
    source = f"checkpoint.initial_weights={path}"
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        for key in ("model", "state_dict", "model_state_dict"):
            content = content[key] if isinstance(content.get(key), dict) else content
        weights = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    except Exception as error:
        raise ConfigError(f"{source}: no state dict ({one_line(error)}). Name a file of model.state_dict().") from None
    own = model.state_dict(keep_vars=True)
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):  # compile and DDP, nested either way
        if not weights.keys() & own.keys():
            consume_prefix_in_state_dict_if_present(weights, prefix)
    names = {id(tensor): name for name, tensor in own.items() if name in weights}
    for name, tensor in own.items():  # safetensors holds a tied tensor under one of its names
        if id(tensor) in names:
            weights.setdefault(name, weights[names[id(tensor)]])
    check_weights({name: tensor.shape for name, tensor in own.items()}, weights, source)
    model.load_state_dict(weights)


def check_weights(shapes: dict[str, torch.Size], weights: dict[str, Tensor], source: str) -> None:
    """ConfigError that lists the names in which `weights` do not fit a model of these shapes."""
    problems = [f"{name} is missing" for name in shapes if name not in weights]
    problems += [f"{name} is unexpected" for name in weights if name not in shapes]
    for name, shape in shapes.items():
        if name in weights and weights[name].shape != shape:
            problems.append(f"{name} is {tuple(weights[name].shape)} instead of {tuple(shape)}")
    if problems:
        more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
        remedy = "Change model.* or model.py, or choose another file or name=…"
        raise ConfigError(f"{source}: does not fit the model: {'; '.join(problems[:20])}{more}. {remedy}")


def export_weights(weights: dict[str, Tensor], module: nn.Module, path: Path) -> None:
    """Write weights as safetensors under their plain names; a tensor that `module` has under two names once."""
    names = {id(tensor): name for name, tensor in reversed(module.state_dict(keep_vars=True).items())}  # first one wins
    tensors = {name: weights[name].clone(memory_format=torch.contiguous_format) for name in names.values()}
    write_whole(path, lambda beside: beside.write_bytes(to_safetensors(tensors)))

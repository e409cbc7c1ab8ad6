"""The files of a run that must survive: written beside, flushed and renamed, so that a killed job leaves the old ones
whole.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from .. import model as user_model
from ..model import ModelConfig
from ..validation import ConfigError
from .checksum import checksum
from .logs import get_logger

FORMAT_VERSION = 1
PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT)
"""What may be over in a moment: a network disk that stumbles, a full one that somebody clears."""


class CheckpointFolder:
    """runs/<name>/checkpoints: step_00000120.pt …, of which the last `keep_last` stay, and best.pt, which always
    stays.
    """

    def __init__(self, folder: Path, keep_last: int | None) -> None:
        self.folder, self._keep_last = folder, keep_last

    def steps(self) -> list[Path]:
        """The checkpoints in the order of their steps."""
        return sorted(path for path in self.folder.glob("step_*.pt") if re.fullmatch(r"step_\d{8,}", path.stem))

    def latest(self) -> Path | None:
        """The checkpoint of the last saved step."""
        return max(self.steps(), key=lambda path: int(path.stem[5:]), default=None)

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation."""
        return self.folder / "best.pt"

    def save(self, state: dict[str, Any], *, is_best: bool = False) -> None:
        """Write one checkpoint; drop those that are no longer among the last."""
        path = self.best if is_best else self.folder / f"step_{state['step']:08d}.pt"
        content = {**state, "checksum": checksum(state)}
        write_whole(path, lambda beside: _save(content, beside))
        if self._keep_last is not None and not is_best:
            # A later one is what could not be read at the last start: no reason to drop what is written now.
            own = [path for path in self.steps() if int(path.stem[5:]) <= state["step"]]
            for old in own[: -self._keep_last]:
                old.unlink()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, flush it to the disk, give it the name; OSError if the disk refuses."""
    for seconds in (1.0, 2.0, None):
        try:
            return _write_whole(path, write)
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(path)
            if seconds is None or error.errno not in PASSING:
                raise
            get_logger().warning("cannot write %s (%s): trying again in %.0f s", path, error.strerror, seconds)
            time.sleep(seconds)


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
    except FileNotFoundError:  # the run's own folder has been there: to make it anew would hide that the disk is gone
        raise OSError(errno.ESTALE, "its folder has vanished", str(path)) from None
    beside = path.with_name(f".{path.name}.tmp")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)  # a full disk would stay full
        raise
    beside.replace(path)  # rename is atomic


def _save(content: dict[str, Any], path: Path) -> None:
    """torch.save, whose own words for a full disk do not say so."""
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint of ours, on the CPU. Nothing in the file is executed. ConfigError if it is not one."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"checkpoint {path} does not exist. Name an existing file, or train first.") from None
    except Exception as error:  # a damaged file fails anywhere in torch's reader
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"checkpoint {path} cannot be read ({reason}). Remove it, or name another.") from None
    if not isinstance(state, dict) or state.get("format_version") != FORMAT_VERSION:
        version = state.get("format_version") if isinstance(state, dict) else None
        raise ConfigError(
            f"checkpoint {path} has format_version {version}, and this code reads {FORMAT_VERSION}. "
            "For weights alone use checkpoint.initial_weights."
        )
    if state.pop("checksum", None) != checksum(state):
        raise ConfigError(f"checkpoint {path} is damaged (its checksum is wrong). Remove it, or name another.")
    return state


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
        "missing": [name for name in shapes if name not in weights],
        "unexpected": [name for name in weights if name not in shapes],
        "misshapen": [
            f"{name} {tuple(weights[name].shape)} instead of {tuple(shape)}"
            for name, shape in shapes.items()
            if name in weights and weights[name].shape != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
        raise ConfigError(
            f"{source}: does not fit the model: {listed}. Change model.* or model.py, or choose another file or name=…"
        )


def export_weights(model: nn.Module, path: Path) -> None:
    """Write the model's weights as safetensors, with plain names; tied weights once."""
    write_whole(path, lambda beside: save_model(model, str(beside)))
    path.chmod(0o666 & ~_umask())  # safetensors keeps its files to their owner; colleagues may read the others


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
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
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()) or not content:
        raise ConfigError(f"checkpoint.initial_weights={path} holds no state dict. Save model.state_dict() in it.")
    return dict(content)

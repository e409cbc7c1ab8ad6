"""Writes and checks checkpoints, finds the checkpoint that a run continues from, and reads and writes weights."""

import errno
import logging
import os
import re
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..config import Config
from ..core.config import all_keys, differing_keys, to_dict
from ..core.random_states import derive_seed, get_random_states, seed_generators, set_random_states
from ..core.ranks import from_main, gather_objects, pack, unpack
from ..errors import ConfigError, one_line
from ..files import write_whole
from ..strategies.base import Strategy
from ..strategies.common import shapes_of
from .optimization import WeightAverage
from .progress import Progress

FORMAT_VERSION = 1
KEYS = {
    "model",
    "optimizer",
    "step",
    "epoch",
    "position",
    "random_states",
    "best",
    "early_stopping",
    "config",
}
DECISIVE = (
    "model",
    "data",
    "optimizer",
    "schedule",
    "seed",
    "training.global_batch_size",
    "training.precision",
)
"""Config keys that must not change when a run continues. Fields with metadata decisive=False are exempt."""
CONTINUE = "Put them back to continue, or choose another name=… (checkpoint.resume=PATH begins it from here)."
logger = logging.getLogger(__name__)


class CheckpointFolder:
    """The folder of a run's checkpoints: best.pt and the latest `keep_last` checkpoints, such as step_00000120.pt."""

    def __init__(self, folder: Path, keep_last: int | None = None) -> None:
        self.folder, self.best, self._keep_last = folder, folder / "best.pt", keep_last
        self._is_verified = False

    def newest_first(self) -> list[Path]:
        """Return the checkpoints that a run can continue from, the latest step first and best.pt last."""
        # a link may lead to a disk that is away: then listdir raises
        if not os.path.lexists(self.folder):
            return []
        names = sorted(os.listdir(self.folder), reverse=True)
        return [
            self.folder / name for name in names if re.fullmatch(r"step_\d{8}\.pt|best\.pt", name)
        ]

    def save(self, state: dict[str, Any], *, is_best: bool = False) -> None:
        """Write a checkpoint. If is_best, write it as best.pt. Otherwise, write it as step_<step>.pt and, if
        `keep_last` is set, delete older files beyond that number.
        """
        path = self.best if is_best else self.folder / f"step_{state['step']:08d}.pt"
        path.parent.mkdir(exist_ok=True)
        # torch.load refuses NumPy's numbers: rates of a user's optimizer, say.
        state = tree_map(
            lambda value: value.item() if isinstance(value, numpy.generic) else value, state
        )
        write_whole(path, lambda beside: _save(state, beside))
        if not self._is_verified:  # a state that torch.load refuses could never be continued
            load_checkpoint(path)
            self._is_verified = True
        if self._keep_last is not None and not is_best:
            # Files of later steps do not count: the last start could not read them, and continued from an older one.
            former = [
                other
                for other in self.newest_first()
                if self.best != other and other.name <= path.name
            ]
            for old in former[self._keep_last :]:
                old.unlink(missing_ok=True)

    def load_first(self, paths: list[Path]) -> dict[str, Any]:
        """Return the state in the first of `paths` that can be read. Raise ConfigError if none can be read."""
        for path in paths:
            try:
                return load_checkpoint(path)
            except ConfigError as error:
                logger.warning("%s Another one is tried.", error)
        raise ConfigError(f"{self.folder}: no checkpoint can be read. Choose another name=….")


def _save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's message does not say that the disk is full
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load_checkpoint(path: Path, source: str = "checkpoint ") -> dict[str, Any]:
    """Return a checkpoint's state on the CPU without running code from the file. Raise ConfigError if the file is
    damaged or is not a checkpoint. Raise OSError if the disk fails.
    """
    try:
        # torch.load reads flipped bits without a word; the CRC-32 tells
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():
                raise ValueError(f"the bits of {damaged} have changed")
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
        if (
            not isinstance(state, dict)
            or state.get("format_version") != FORMAT_VERSION
            or not state.keys() >= KEYS
        ):
            raise ValueError(
                f"no checkpoint of format_version {FORMAT_VERSION}; try checkpoint.initial_weights"
            )
    except Exception as error:  # a damaged file may fail anywhere; a foreign one may hold anything
        # EINVAL: of a flipped bit
        if isinstance(error, OSError) and error.errno not in (
            errno.EINVAL,
            errno.ENOENT,
        ):
            raise  # a failing disk: nobody should continue from an older checkpoint instead
        raise ConfigError(
            f"{source}{path} cannot be used ({one_line(error)}). Remove it or name another."
        ) from None
    return state


def read_once(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `read` on rank 0. Other ranks get its result with meta tensors in place of weights and optimizer state."""
    kept: list[dict[str, Any]] = []

    def outline() -> bytes:
        kept.append(state := read())
        to_meta = partial(
            tree_map, lambda value: value.to("meta") if isinstance(value, Tensor) else value
        )
        return pack(
            state
            | {
                key: to_meta(state[key])
                for key in ("model", "optimizer", "average")
                if key in state
            }
        )

    received: dict[str, Any] = unpack(from_main(outline))
    return kept[0] if kept else received


def find_run(
    config: Config, checkpoints: CheckpointFolder, progress: Progress, attempt: int
) -> dict[str, Any]:
    """Return the state to continue from, or {} for a new run. Raise ConfigError if neither is possible."""
    wanted, paths, run = (
        config.checkpoint.resume,
        checkpoints.newest_first(),
        checkpoints.folder.parent,
    )
    if wanted == "never" and attempt > 0:  # `never` is about files from before the first start
        wanted = "auto"
    if paths:
        state = checkpoints.load_first(paths)
        check_same(state["config"], config, DECISIVE, f"name={config.name}")
        if wanted == "never" or wanted not in ("auto", state["config"]["checkpoint"]["resume"]):
            remedy = "Choose another name=…, or set checkpoint.resume=auto to continue."
            raise ConfigError(f"checkpoint.resume={wanted}: {run} already holds a run. {remedy}")
        return state
    if (weights := run / "model.safetensors").exists():
        raise ConfigError(
            f"name={config.name}: a new run would replace {weights}. Choose another name=…."
        )
    if wanted in ("auto", "never"):
        return {}
    state, source = (
        load_checkpoint(Path(wanted), "checkpoint.resume="),
        f"checkpoint.resume={wanted}",
    )
    remedy = f"Put them back; or take the weights alone, for a new optimizer: checkpoint.initial_weights={wanted}."
    check_same(state["config"], config, ("optimizer.name", "model"), source, remedy)
    return progress.state_for_this_run(state)


def check_same(
    stored: dict[str, Any],
    config: Config,
    keys: Sequence[str],
    source: str,
    remedy: str = CONTINUE,
) -> None:
    """Raise ConfigError if the configs differ in any of `keys`. A section name such as `model` means all its keys."""
    fixed = [k for k, item in all_keys(Config).items() if item.metadata.get("decisive", True)]
    wanted = re.compile(rf"({'|'.join(keys)})([.]|$)")
    found = differing_keys(stored, config).items()
    lines = [f"{key}: {change}" for key, change in found if key in fixed and wanted.match(key)]
    if lines:
        raise ConfigError(f"{source}: was begun with other values: {'; '.join(lines)}. {remedy}")


def load_run(
    state: dict[str, Any],
    strategy: Strategy,
    progress: Progress,
    config: Config,
    average: WeightAverage | None,
) -> None:
    """Seed the RNGs and restore `state`, if any. Raise ConfigError if it does not match the model or the data size."""
    context = strategy.context
    if state:
        # older files lack it
        former = state["early_stopping"].get("num_samples", progress.num_samples)
        if former != progress.num_samples:
            problem = f"was begun with {former} training samples, and there are {progress.num_samples} now"
            raise ConfigError(f"name={config.name}: {problem}. {CONTINUE}")
        check_shapes(strategy.shapes, state["model"], f"name={config.name}")
        strategy.load_state_dict(state)
        if average is not None:  # if ema_decay is new, the average begins with the weights
            average.set_weights(state.get("average", state["model"]))
        progress.load_state_dict(state)
    # Each rank has its own (dropout differs by rank), derived from the step; a checkpoint of as many ranks replaces it.
    seed_generators(derive_seed(config.seed, -1 - context.rank, progress.step))
    if state and len(state["random_states"]) == context.world_size:
        set_random_states(state["random_states"][context.rank], *context.devices)


def collect_state(
    strategy: Strategy,
    progress: Progress,
    config: Config,
    average: WeightAverage | None,
    cursor: Any,
) -> dict[str, Any] | None:
    """Return the content of a checkpoint on rank 0, and None on the other ranks. All ranks must call this function."""
    state = {"format_version": FORMAT_VERSION, "config": to_dict(config), **progress.state_dict()}
    state |= strategy.state_dict()
    state |= {} if average is None else {"average": average.get_weights()}
    packed = gather_objects(pack(get_random_states(*strategy.context.devices) | {"cursor": cursor}))
    return (
        None
        if packed is None
        else state | {"random_states": [unpack(content) for content in packed]}
    )


def load_weights(model: nn.Module, path: Path, source: str = "checkpoint ") -> None:
    """Copy weights into `model` from a .safetensors, .pt, .pth or .bin file, which another program may have written.

    The file may hold a state dict or a checkpoint. Raise ConfigError if a name or a shape does not fit the model.
    """
    source += str(path)
    try:
        content: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, "cpu", weights_only=True)
        )
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
    check_shapes(shapes_of(model), weights, source)
    model.load_state_dict(weights)


def check_shapes(
    shapes: dict[str, torch.Size | None], weights: dict[str, Tensor], source: str
) -> None:
    """Raise ConfigError, with the differences, if the names or shapes of `weights` differ from those of shapes_of()."""
    found = {name: tensor.shape for name, tensor in weights.items()}
    if names := [
        n for n in shapes | found if n not in found or shapes.get(n, "none") not in (None, found[n])
    ]:
        lines = [
            f"{name}: {found.get(name)} in the file, {shapes.get(name)} in the model"
            for name in names[:5]
        ]
        remedy = "Change model.* or model.py, or choose another file or name=…"
        raise ConfigError(
            f"{source}: does not fit the model in {len(names)} tensors: {'; '.join(lines)}. {remedy}"
        )


def export_weights(weights: dict[str, Tensor], module: nn.Module, path: Path) -> None:
    """Write the weights to a safetensors file, under their names in `module`. Write shared tensors only once."""
    own = module.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(own.items())}  # first one wins
    tensors = {
        name: weights[name].to(own[name].dtype).contiguous().clone() for name in names.values()
    }
    write_whole(path, lambda beside: beside.write_bytes(to_safetensors(tensors)))

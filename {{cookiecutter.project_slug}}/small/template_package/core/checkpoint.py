"""Writes checkpoints so that a killed job leaves whole files, and finds the one to continue from.

A checkpoint holds plain dicts, tensors and numbers, whole and under plain names, so it can be
continued on another number of ranks, with another strategy, and with size=full.
"""

import errno
import fcntl
import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from ..errors import ConfigError, one_line
from ..files import write_whole
from .config import Config, all_keys, differing_keys, to_dict
from .ranks import from_main, pack, unpack

FORMAT_VERSION = 1
KEYS = {"model", "optimizer", "step", "epoch", "position", "random_states", "best", "config"}
DECISIVE = (
    "model", "data", "optimizer", "schedule", "seed",
    "training.global_batch_size", "training.precision",
)  # fmt: skip
"""Keys that must not change when a run continues, unless their field says decisive=False."""
CONTINUE = "Put them back to continue, or choose another name=…"
logger = logging.getLogger(__name__)


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the run's folder. Raise ConfigError if another job has it. All ranks must call this."""
    held: list[BinaryIO] = []  # the system releases it when rank 0's process ends

    def lock() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        held.append((directory / ".lock").open("ab"))
        try:
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"name={directory.name}: another process trains this run"
            raise ConfigError(f"{problem}. Wait for its end, or choose another name=…") from None
        except OSError as error:  # some network disks
            logger.warning("%s: this disk has no locks (%s)", directory, error.strerror)
        for left in directory.glob("**/.*.tmp"):  # half written by a killed process
            left.unlink(missing_ok=True)

    from_main(lock)
    try:
        yield
    finally:
        for file in held:
            with suppress(OSError):  # closing it would not do: the loader's workers have it too
                fcntl.flock(file, fcntl.LOCK_UN)


class CheckpointFolder:
    """A run's checkpoints: best.pt, and the latest `keep_last` such as step_00000120.pt."""

    def __init__(self, folder: Path, keep_last: int | None = None) -> None:
        self.folder, self.best, self._keep_last = folder, folder / "best.pt", keep_last
        self._is_verified = False

    def newest_first(self) -> list[Path]:
        """Return the checkpoints to continue from, the latest step first and best.pt last."""
        if not os.path.lexists(self.folder):  # a link may lead to a disk that is away
            return []
        names = sorted(os.listdir(self.folder), reverse=True)
        return [self.folder / name for name in names if re.fullmatch(r"(step_\d{8}|best)\.pt", name)]

    def save(self, state: dict[str, Any], *, is_best: bool = False) -> None:
        """Write a checkpoint, then delete those beyond `keep_last`."""
        path = self.best if is_best else self.folder / f"step_{state['step']:08d}.pt"
        path.parent.mkdir(exist_ok=True)
        write_whole(path, lambda beside: _save(plain(state), beside))
        if not self._is_verified:  # a state that torch.load refuses could never be continued
            load_checkpoint(path)
            self._is_verified = True
        if self._keep_last is not None and not is_best:
            # Files of later steps do not count: this run could not read them when it started.
            former = [p for p in self.newest_first() if p != self.best and p.name <= path.name]
            for old in former[self._keep_last :]:
                old.unlink(missing_ok=True)

    def load_first(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return the state of the first path that can be read. Raise ConfigError if none can."""
        for path in paths:
            try:
                return load_checkpoint(path)
            except ConfigError as error:
                logger.warning("%s Another one is tried.", error)
        raise ConfigError(f"{self.folder}: no checkpoint can be read. Choose another name=…")


def plain(value: Any) -> Any:
    """Turn NumPy's numbers into Python's, as torch.load refuses them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value.item() if isinstance(value, numpy.generic) else value


def _save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's message does not say that the disk is full
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return a state on the CPU, running no code of the file. Raise ConfigError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load reads flipped bits without a word
            if damaged := file.testzip():
                raise ValueError(f"the bits of {damaged} have changed")
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not state.keys() >= KEYS:
            raise ValueError("it is no checkpoint of this project")
        if state["format_version"] != FORMAT_VERSION:
            raise ValueError(f"its format_version is {state['format_version']}")
    except Exception as error:  # a damaged file may fail anywhere
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.ENOENT):
            raise  # a failing disk: nobody should continue from an older checkpoint instead
        problem = f"checkpoint {path} cannot be used ({one_line(error)})"
        raise ConfigError(f"{problem}. Remove it or name another.") from None
    return state


def read_once(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `read` on rank 0. The others get its result with meta tensors for model and optimizer."""
    kept: list[dict[str, Any]] = []

    def to_meta(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: to_meta(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(to_meta(item) for item in value)
        return value.to("meta") if isinstance(value, Tensor) else value

    def outline() -> bytes:
        kept.append(state := read())
        large = {key: to_meta(state[key]) for key in ("model", "optimizer") if key in state}
        return pack({**state, **large})

    received: dict[str, Any] = unpack(from_main(outline))
    return kept[0] if kept else received


def find_run(config: Config, checkpoints: CheckpointFolder) -> dict[str, Any]:
    """Return the state to continue from, or {} for a new run. Raise ConfigError if neither fits."""
    wanted, paths, run = config.checkpoint.resume, checkpoints.newest_first(), checkpoints.folder
    if paths:
        state = checkpoints.load_first(paths)
        check_same(state["config"], to_dict(config), DECISIVE, f"name={config.name}")
        former = state["config"]["checkpoint"]["resume"]  # the run may have begun from a file
        if wanted == "never" or wanted not in ("auto", former):
            remedy = "Choose another name=…, or set checkpoint.resume=auto to continue"
            raise ConfigError(f"checkpoint.resume={wanted}: {run} holds a run. {remedy}.")
        return state
    if (weights := run.parent / "model.safetensors").exists():
        problem = f"name={config.name}: a new run would replace {weights}"
        raise ConfigError(f"{problem}. Choose another name=…")
    if wanted in ("auto", "never"):
        return {}
    state = load_checkpoint(Path(wanted))
    source = f"checkpoint.resume={wanted}"
    check_same(state["config"], to_dict(config), ("optimizer.name", "model"), source)
    return {**state, "is_of_other_run": True}


def check_same(
    stored: dict[str, Any],
    present: dict[str, Any],
    keys: Sequence[str],
    source: str,
    remedy: str = CONTINUE,
) -> None:
    """Raise ConfigError if the configs differ in `keys`. A section such as `model` means its keys."""
    fixed = {key for key, item in all_keys() if item.metadata.get("decisive", True)}
    wanted = re.compile(rf"({'|'.join(keys)})([.]|$)")
    found = differing_keys(stored, present)
    lines = [f"{k}: {change}" for k, change in found.items() if k in fixed and wanted.match(k)]
    if lines:
        raise ConfigError(f"{source}: was begun with other values: {'; '.join(lines)}. {remedy}")


def check_shapes(
    shapes: dict[str, torch.Size | None], weights: dict[str, Tensor], source: str
) -> None:
    """Raise ConfigError if the names or shapes of `weights` are not those of the model."""
    found = {name: tensor.shape for name, tensor in weights.items()}
    wrong = [n for n in shapes | found if n not in found or shapes.get(n, "none") not in (None, found[n])]
    if wrong:
        lines = [f"{n}: {found.get(n)} in the file, {shapes.get(n)} in the model" for n in wrong[:5]]
        problem = f"does not fit the model in {len(wrong)} tensors: {'; '.join(lines)}"
        raise ConfigError(f"{source}: {problem}. Change model.*, or choose another name=…")


def export_weights(weights: dict[str, Tensor], module: nn.Module, path: Path) -> None:
    """Write the weights to a safetensors file, under plain names. A tied tensor stands there once."""
    own = module.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(own.items())}  # the first one wins
    tensors = {name: weights[name].contiguous().clone() for name in names.values()}
    write_whole(path, lambda beside: beside.write_bytes(to_safetensors(tensors)))

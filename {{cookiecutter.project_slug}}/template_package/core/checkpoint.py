"""Writes checkpoints so that a killed job leaves whole files, and finds the one to continue from.

A checkpoint holds plain dicts, tensors and numbers, whole and under plain names, so it can be
continued on another number of ranks, with another strategy, and with size=full.
"""

import errno
import fcntl
import io
import logging
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import ConfigError, one_line
from ..files import write_whole
from .config import CheckpointConfig, Config, all_keys, differing_keys, unread_keys
from .ranks import from_main, pack, unpack

FORMAT_VERSION = 1
DECISIVE = (
    "model", "data", "optimizer", "schedule", "seed",
    "training.global_batch_size", "training.drop_last", "training.precision",
)  # fmt: skip
"""Keys that must not change when a run continues, unless their field says decisive=False or other
schedules."""
CONTINUE = "Put them back to continue, or choose another name=… (checkpoint.resume=PATH begins it from here)"
logger = logging.getLogger(__name__)


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Inside, the run's folder is locked. All ranks must call this.

    Raise ConfigError if another process has locked it.
    """
    held: list[int] = []

    def lock() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        held.append(os.open(directory / ".lock", os.O_CREAT | os.O_RDWR))
        try:
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"name={directory.name}: another process trains this run"
            raise ConfigError(f"{problem}. Wait for its end, or choose another name=…") from None
        except OSError as error:  # some network disks
            logger.warning("warning: %s: this disk has no locks (%s)", directory, error)
        for left in directory.glob("**/.*.tmp"):  # half written by a killed process
            left.unlink()

    from_main(lock)
    try:
        yield
    finally:
        for file in held:
            with suppress(OSError):  # a disk without locks
                fcntl.flock(file, fcntl.LOCK_UN)  # to close it would not do: workers have it too


class WatchedFile(io.BufferedWriter):
    """A file to write to, which calls beat() as it grows: a slow disk is no dead one."""

    beat: Callable[[], object]
    num_unsynced = 0

    def write(self, data: Any) -> int:
        self.beat()
        number = super().write(data)
        self.num_unsynced += number
        if self.num_unsynced > 2**30:  # the system would keep much more, and be silent for long
            self.num_unsynced = 0
            os.fsync(self.fileno())
        return number


class CheckpointFolder:
    """A run's checkpoints: best.pt, and the latest `keep_last` such as step_00000120.pt."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder, self._keep_last = folder, config.keep_last or sys.maxsize
        self.load: Callable[..., dict[str, Any]] = load_checkpoint
        self._is_verified = False

    @property
    def best(self) -> Path:
        return self.folder / "best.pt"

    def newest_first(self) -> list[Path]:
        """Return the checkpoints to continue from, the latest step first and best.pt last."""
        # A link may lead to a disk that is away: then listdir raises.
        # Folders (.dcp) are of size=full.
        names = os.listdir(self.folder) if os.path.lexists(self.folder) else []
        names = [name for name in names if re.fullmatch(r"(step|best)(_\d{8})?\.(pt|dcp)", name)]
        return [self.folder / name for name in sorted(names, reverse=True)]

    def save(
        self,
        state: dict[str, Any],
        *,
        is_best: bool = False,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """Write a checkpoint, then delete those beyond `keep_last`. Call beat() while bytes are written."""
        path = self.folder / ("best.pt" if is_best else f"step_{state['step']:08d}.pt")
        self.folder.mkdir(exist_ok=True)
        self.write(path, state, beat)
        self.delete_old(path)

    def write(self, path: Path, state: dict[str, Any], beat: Callable[[], object]) -> None:
        """Write a file. Of the first one, make sure that it can be read."""
        # torch.load refuses NumPy's numbers: rates of a user's optimizer, say.
        state = apply_to_collection(state, numpy.generic, numpy.generic.item)

        def write(beside: Path) -> None:
            with WatchedFile(io.FileIO(beside, "w")) as file:
                file.beat = beat
                try:
                    torch.save(state, file)
                except RuntimeError as error:  # torch's own message does not tell of a full disk
                    cause = error.__context__
                    raise cause if isinstance(cause, OSError) else error from None

        write_whole(path, write)
        if not self._is_verified:  # a state that torch.load refuses could never be continued
            load_checkpoint(path, beat=beat)
            self._is_verified = True

    def delete_old(self, path: Path) -> None:
        """Delete the checkpoints before `path` that are beyond `keep_last`."""
        # Files of later steps do not count: this run could not read them when it started.
        former = [one for one in self.newest_first() if "step" < one.name <= path.name]
        for old in former[self._keep_last :]:
            self.delete(old)

    def delete(self, path: Path) -> None:
        path.unlink()

    def load_to_evaluate(self, path: Path) -> dict[str, Any]:
        """Return a state without the optimizer's. Raise ConfigError if the file is damaged."""
        return {**self.load(path), "optimizer": {}}

    def weights_of(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Return the weights to evaluate or export: the average, which size=full has, or the model's."""
        weights: dict[str, Any] = state.get("average", state["model"])
        return weights

    def load_first(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return the state of the first path that can be read. Raise ConfigError if none can."""
        for path in paths:
            try:
                return self.load(path)
            except ConfigError as error:
                logger.warning("warning: %s Another one is tried.", error)
        raise ConfigError(f"{self.folder}: no checkpoint can be read. Choose another name=…")


def load_checkpoint(
    path: Path, source: str = "checkpoint ", beat: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return a state on the CPU, running no code of the file. Raise ConfigError if it is damaged.

    Raise OSError if the disk fails: an older checkpoint would not help.
    """
    with readable(path, source):
        with zipfile.ZipFile(path) as file:  # torch.load reads flipped bits without a word
            for name in file.namelist():
                beat()
                file.read(name)
        # Its tensors are read from the file when they are used: none is held in memory before.
        state: dict[str, Any] = torch.load(path, "cpu", mmap=True, weights_only=True)
        if dict(state).get("format_version") != FORMAT_VERSION:
            raise ValueError(f"it is no checkpoint of this project's format {FORMAT_VERSION}")
    return state


@contextmanager
def readable(path: Path, source: str) -> Iterator[None]:
    """Raise ConfigError if the body finds that the checkpoint is damaged."""
    try:
        yield
    except Exception as error:  # a damaged file may fail anywhere
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        problem = f"{source}{path} cannot be used ({one_line(error)})"
        raise ConfigError(f"{problem}. Remove it or name another.") from None


def read_once(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `read` on rank 0. The others get its result with meta tensors for its large entries."""
    kept: list[dict[str, Any]] = []

    def outline() -> bytes:
        state = read()
        kept.append(state)
        large = {key: state[key] for key in ("model", "optimizer", "average") if key in state}
        return pack(state | apply_to_collection(large, Tensor, Tensor.to, "meta"))

    kept.append(unpack(from_main(outline)))
    return kept[0]


def find_run(
    config: Config,
    checkpoints: CheckpointFolder,
    num_devices: int,
    *,
    is_restart: bool = False,
    remedy: str = CONTINUE,
) -> dict[str, Any]:
    """Return the state to continue from, or {} for a new run. Raise ConfigError if neither fits.

    `remedy` is for a file of another run whose model or optimizer is not this one's.
    """
    wanted, paths, run = config.checkpoint.resume, checkpoints.newest_first(), checkpoints.folder
    if wanted == "never" and is_restart:  # it is about files from before the first start
        wanted = "auto"
    if paths:
        state = checkpoints.load_first(paths)
        check_same(state["config"], config, DECISIVE, f"name={config.name}")
        former = state["config"]["checkpoint"]["resume"]  # the run may have begun from a file
        if wanted == "never" or wanted not in ("auto", former):
            remedy = "Choose another name=…, or set checkpoint.resume=auto to continue"
            raise ConfigError(f"checkpoint.resume={wanted}: {run} holds a run. {remedy}.")
        return state
    weights = run.parent / "model.safetensors"
    if weights.exists():
        problem = f"name={config.name}: a new run would replace {weights}"
        raise ConfigError(f"{problem}. Choose another name=…")
    check_policy(config, num_devices)
    if wanted in ("auto", "never"):
        return {}
    source = "checkpoint.resume="
    state = checkpoints.load(Path(wanted), source)
    check_same(state["config"], config, ("optimizer.name", "model"), source + wanted, remedy)
    return state | {"is_of_other_run": True}


def check_policy(config: Config, num_devices: int) -> None:
    """Raise ConfigError if policy.py, a file that a lab may add, refuses this new run.

    With DDP_POLICY=off it is not asked. It is a rule among colleagues, and no lock.
    """
    name = f"{__name__.partition('.')[0]}.policy"
    if os.environ.get("DDP_POLICY") == "off" or not find_spec(name):
        return
    try:
        answer = import_module(name).refuse(config, num_devices)
    except Exception as error:
        answer = f"policy.py: refuse(config, num_devices) fails ({one_line(repr(error))}). Mend it."
    if answer:
        raise ConfigError(answer)


def recount(state: dict[str, Any], num_samples: int, global_batch_size: int) -> dict[str, Any]:
    """Keep another run's place in the data, but count its steps with this run's batch size."""
    epoch, position = state["epoch"], state["position"]
    if position >= num_samples:  # that run had more data
        epoch, position = epoch + 1, 0
    if num_samples == sys.maxsize:  # a stream begins anew
        epoch = position = 0
    done = position // global_batch_size
    step = epoch * -(-num_samples // global_batch_size) + done
    counts = {"step": step, "epoch": epoch, "position": done * global_batch_size}
    return state | counts | {"best": None, "early_stopping": {"best_epoch": epoch}}


def tell_changes(state: dict[str, Any], config: Config, total_steps: int) -> None:
    """Log where a run goes on, and the keys that have changed since the checkpoint."""
    logger.info("resuming after step %d of %d", state["step"], total_steps)
    for key, change in differing_keys(state["config"], config).items():
        if not key.startswith(("device_ids", "launch.")):  # they belong to a start
            logger.info("changed since: %s: %s", key, change)
        if key in ("training.epochs", "training.max_steps"):
            logger.info("the learning rate follows its schedule for %d steps", total_steps)


def check_same(
    stored: dict[str, Any],
    config: Config,
    keys: Sequence[str],
    source: str,
    remedy: str = CONTINUE,
) -> None:
    """Raise ConfigError if the configs differ in `keys`. A section such as `model` means its keys."""
    known, unread = all_keys(type(config)).items(), unread_keys(config)
    fixed = [key for key, item in known if item.metadata.get("decisive", key not in unread)]
    wanted = re.compile(rf"({'|'.join(keys)})([.]|$)")
    found = differing_keys(stored, config).items()
    lines = [f"{key}: {change}" for key, change in found if key in fixed and wanted.match(key)]
    if lines:
        raise ConfigError(f"{source}: was begun with other values: {'; '.join(lines)}. {remedy}")


def tensors_to_export(weights: dict[str, Any], module: nn.Module) -> dict[str, Tensor]:
    """Return the weights under plain names, each with its own memory. A tied tensor stands there once."""
    own = module.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(own.items())}  # the first one wins
    tensors: dict[str, Tensor] = {}
    for name in names.values():
        if isinstance(value := weights[name], Tensor):  # extra state may be anything
            value = value.to(own[name].dtype).contiguous()
            is_view = value.nbytes < value.untyped_storage().nbytes()
            tensors[name] = value.clone() if is_view else value
    return tensors


def export_weights(weights: dict[str, Any], module: nn.Module, path: Path) -> None:
    """Write the weights to a safetensors file."""
    tensors = tensors_to_export(weights, module)
    write_whole(path, lambda beside: save_file(tensors, beside))

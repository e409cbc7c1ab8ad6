"""checkpoint.sharded: under FSDP each rank writes its part of a checkpoint, while the next steps run.

Such a checkpoint is a folder, step_00000120.dcp or best_00000120.dcp. It holds what torch.distributed.checkpoint
wrote, crc.json with a checksum of each of those files, and rest.pt with all else. It gets its name once it is whole.
A run goes on from it with any strategy, on any number of ranks.
"""

import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..config import CheckpointConfig
from ..core.checkpoint import CheckpointFolder, load_checkpoint, readable
from ..core.ranks import all_reduce, from_main
from ..core.strategies import Strategy
from ..errors import ConfigError, StopRun
from ..files import disk_failure, write_json

KNOWN_TYPES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "pathlib",
)
A_DAY = timedelta(days=1)
"""What the thread waits for other ranks. The watch of each rank tells a hang."""
LARGE = ("model", "optimizer", "average")
"""Entries of a state whose tensors the ranks write. In rest.pt, meta tensors stand in their place."""


class Checkpoints(CheckpointFolder):
    """A run's checkpoints, of both kinds. All ranks must call begin(), save(), check() and wait() alike."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        super().__init__(folder, config)
        self.load = load_any
        self.is_sharded = config.sharded
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._num_saved = 0
        # folders of this process with the tensors of step `_step`, which the model still has
        self.current, self._step = list[Path](), -1

    def begin(self, strategy: Strategy) -> None:
        """Prepare to save. Raise ConfigError on all ranks if one does not see what rank 0 writes."""
        if not self.is_sharded:
            return
        rank = strategy.rank
        if rank.world_size == 1:  # it holds all
            self.is_sharded = False
            return
        if not strategy.has_parts:
            rule = f"needs strategy=fsdp, and there is strategy={strategy.config.strategy}"
            raise ConfigError(f"checkpoint.sharded=true: {rule}. Set it to false.")
        strategy.collect = lambda value, rank: value  # each rank keeps its parts
        # for the thread alone: two threads must not share a group or a store
        self._store = rank.store.clone()
        self._group = dist.new_group(backend="gloo", timeout=A_DAY)
        self._rank = rank

        def write() -> str:
            self.folder.mkdir(exist_ok=True)
            for left in self.folder.glob("*.part"):  # by a process that was killed
                shutil.rmtree(left)
            probe = self.folder / f".seen_{time.time_ns()}"
            probe.touch()
            return probe.name

        probe = self.folder / from_main(write)
        deadline = time.monotonic() + 10  # network disks show a new file late
        while not probe.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        num_blind = int(all_reduce(torch.tensor(int(not probe.exists()))))
        if rank.is_main:
            probe.unlink()
        if num_blind:
            problem = f"{num_blind} ranks do not see what rank 0 writes to {self.folder.absolute()}"
            raise ConfigError(f"checkpoint.sharded=true: {problem}. Use a disk that all nodes see.")

    def save(
        self,
        state: dict[str, Any],
        *,
        is_best: bool = False,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """Write a checkpoint. If it is sharded, only copy this rank's parts, and let a thread write them.

        Raise FailureError if the one before could not be written.
        """
        name, step = "best" if is_best else "step", state["step"]
        if not self.is_sharded:
            super().save(state, is_best=is_best, beat=beat)
            if is_best:
                self.delete_old(self.folder / "best.pt")
            return
        self.wait(beat)  # two at a time would take twice the memory
        path = self.folder / f"{name}_{step:08d}.dcp"
        part, parts = path.with_suffix(".part"), {key: state[key] for key in LARGE if key in state}
        former = self.current[:] if step == self._step else []  # a step's tensors are written once
        writing = None
        if not former:
            tensors: dict[str, Tensor] = {}
            walk(parts, lambda place, tensor: tensors.update({"/".join(place): tensor}))
            if not self._rank.is_main:  # of what all have, rank 0's: BatchNorm's statistics differ
                tensors = {k: value for k, value in tensors.items() if isinstance(value, DTensor)}
            writing = dcp.async_save(tensors, checkpoint_id=part, process_group=self._group)
        rest = state | walk(
            parts, lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        )
        self._num_saved += 1
        key = f"sharded/{self._num_saved}"
        work = partial(self._complete, writing, rest, former, path, part, key)
        self._pending, self._part = self._thread.submit(work), part
        self.current, self._step = [*former, path], step

    def check(self) -> None:
        """Raise FailureError if the checkpoint that was being written has failed. Wait for nothing."""
        if self._pending is not None and self._pending.done():
            done, self._pending = self._pending, None
            done.result()

    def wait(self, beat: Callable[[], object] = lambda: None) -> None:
        """Wait until the last checkpoint is whole, on all ranks. Call beat() while its files grow."""
        former = 0
        while self._pending is not None and not self._pending.done():
            with suppress(FileNotFoundError):  # it has got its name meanwhile
                size = sum(file.stat().st_size for file in self._part.iterdir())
                if size != former:
                    beat()
                former = size
            time.sleep(0.05)
        self.check()

    @contextmanager
    def completed(self, beat: Callable[[], object]) -> Iterator[None]:
        """Let the checkpoint that is being written become whole if the body fails, too."""
        try:
            yield
        except (Exception, StopRun):
            with suppress(Exception):
                self.wait(beat)
            raise

    def _complete(
        self, writing: Any, rest: Any, former: list[Path], path: Path, part: Path, key: str
    ) -> None:
        """In the thread: wait until all ranks have written, and give the folder its name."""
        rank, store = self._rank, self._store
        try:
            if writing is not None:
                writing.result()
                own = [*part.glob(f"__{rank.rank}_*"), *([part / ".metadata"] * rank.is_main)]
                store.set(f"{key}/{rank.rank}", json.dumps({file.name: crc(file) for file in own}))
            if not rank.is_main:
                store.wait([f"{key}/done"], A_DAY)
                return
            if path in former:
                self.write(path / "rest.pt", rest, lambda: None)
            else:
                if former:
                    shutil.copytree(former[0], part, copy_function=link)
                else:
                    keys = [f"{key}/{number}" for number in range(rank.world_size)]
                    store.wait(keys, A_DAY)
                    found = [json.loads(store.get(name)) for name in keys]
                    write_json(part / "crc.json", {k: v for own in found for k, v in own.items()})
                self.write(part / "rest.pt", rest, lambda: None)
                aside = path.with_suffix(".old.part")
                if path.exists():  # another process wrote it, and this one could not go on from it
                    path.rename(aside)
                part.rename(path)
                shutil.rmtree(aside, ignore_errors=True)
            self.delete_old(path)
            store.set(f"{key}/done", "")
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, OSError):
                raise disk_failure(path, cause) from error
            raise
        except OSError as error:
            raise disk_failure(path, error) from error

    @property
    def best(self) -> Path:
        found = [path for path in self.newest_first() if path.name.startswith("best")]
        return found[0] if found else super().best

    def delete_old(self, path: Path) -> None:
        if not path.name.startswith("best"):
            return super().delete_old(path)
        for other in self.newest_first():
            if other.name.startswith("best") and other != path:
                self.delete(other)

    def delete(self, path: Path) -> None:
        if path.is_dir():  # what a kill leaves of it must not look like a checkpoint
            shutil.rmtree(path.rename(path.with_suffix(".old.part")))
        else:
            super().delete(path)


class Metadata(pickle.Unpickler):
    """Reads a file of torch.distributed.checkpoint's that could run code, and refuses what does not belong to it."""

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name)
        is_type = isinstance(value, type) and module in KNOWN_TYPES
        if is_type or isinstance(value, torch.dtype) or name in ("Size", "_get_layout"):
            return value
        raise ValueError(f".metadata wants {module}.{name}")


def load_any(path: Path, source: str = "checkpoint ") -> dict[str, Any]:
    """Return the state in a file or a folder. A folder's tensors are left to read_whole() and read_parts()."""
    if not path.is_dir():
        return load_checkpoint(path, source)
    with readable(path, source):
        for name, value in json.loads((path / "crc.json").read_bytes()).items():
            if crc(path / name) != value:
                raise ValueError(f"the bits of {name} have changed")
        with (path / ".metadata").open("rb") as file:
            Metadata(file).load()
    return load_checkpoint(path / "rest.pt", source) | {"folder": str(path)}


def read_whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with its tensors whole, in this process's memory."""
    return _read(state, {}, no_dist=True)


def read_parts(state: dict[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Return a state as strategy.load_state_dict() takes it. Under FSDP each rank reads its own parts."""
    if "folder" in state and strategy.has_parts:
        return _read(state, strategy.module.state_dict(), no_dist=False)
    return read_whole(state) if strategy.rank.is_main else state


def _read(state: dict[str, Any], weights: dict[str, Any], *, no_dist: bool) -> dict[str, Any]:
    folder = state.pop("folder", None)
    if folder is None:
        return state
    parts, tensors = {key: state[key] for key in LARGE if key in state}, dict[str, Tensor]()

    def make(place: tuple[str, ...], one: Tensor) -> None:
        like = weights.get(place[2 if place[0] == "optimizer" else 1])
        empty = torch.empty_like(one, device="cpu")
        if isinstance(like, DTensor) and like.shape == one.shape:
            empty = torch.zeros_like(like, dtype=one.dtype)
        tensors["/".join(place)] = empty

    walk(parts, make)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    dcp.load(tensors, checkpoint_id=folder, no_dist=no_dist)
    return {**state, **walk(parts, lambda place, _: tensors["/".join(place)])}


def walk(value: Any, function: Callable[..., object], place: tuple[str, ...] = ()) -> Any:
    """Return the value with function(place, tensor) instead of each tensor, place being the keys that lead to it."""
    if isinstance(value, Tensor):
        return function(place, value)
    if isinstance(value, dict):
        return {key: walk(item, function, (*place, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = enumerate(value)
        return type(value)([walk(item, function, (*place, str(number))) for number, item in items])
    return value


def crc(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            total = crc32(block, total)
    return total


def link(source: str, target: str) -> None:
    """Give a file a second name or, on a disk that cannot, copy it. rest.pt differs."""
    if Path(source).name != "rest.pt":
        try:
            os.link(source, target)
        except OSError:
            shutil.copy(source, target)
            with open(target, "rb") as file:
                os.fsync(file.fileno())

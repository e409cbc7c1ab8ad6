"""The files of a run that must survive: written beside, flushed and renamed, so that a killed job leaves the old ones
whole.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..validation import ConfigError, FailureError, one_line
from .checksum import checksum, plain
from .logs import get_logger

FORMAT_VERSION = 1
KEYS = {"model", "optimizer", "step", "epoch", "position", "random_states", "best", "early_stopping", "config"}
PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT)
"""What may be over in a moment: a network disk that stumbles, a full one that somebody clears."""
SILENT = (errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""What says nothing of the file."""
claimed_folders: set[Path] = set()
"""Of the runs that this process trains: run_files.py's."""


class CheckpointFolder:
    """runs/<name>/checkpoints: step_00000120.pt …, of which the last `keep_last` stay, and best.pt, which always
    stays.
    """

    def __init__(self, folder: Path, keep_last: int | None) -> None:
        self.folder, self._keep_last = folder, keep_last

    def steps(self) -> list[Path]:
        """The checkpoints in the order of their steps."""
        names = [name for name in self._names() if re.fullmatch(r"step_\d{8,}\.pt", name)]
        return [self.folder / name for name in sorted(names, key=lambda name: int(name[5:-3]))]

    def latest(self) -> Path | None:
        """The checkpoint of the last saved step."""
        return max(self.steps(), key=lambda path: int(path.stem[5:]), default=None)

    def newest_first(self) -> list[Path]:
        """All that a run can continue from; best.pt last, which may be the only one."""
        return [*reversed(self.steps()), *([self.best] if self.best.name in self._names() else [])]

    def _names(self) -> list[str]:
        """OSError if the disk does not tell: Path.glob would say that there are none, and a new run would begin."""
        try:
            names: list[str] = keep_trying(self.folder, lambda: os.listdir(self.folder), "read")
        except FileNotFoundError:
            if self.folder.is_symlink():  # to a disk that is away
                raise
            return []
        return names

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation."""
        return self.folder / "best.pt"

    def save(self, state: dict[str, Any], *, is_best: bool = False) -> None:
        """Write one checkpoint; drop those that are no longer among the last."""
        path = self.best if is_best else self.folder / f"step_{state['step']:08d}.pt"
        state = plain(state)
        content = {**state, "checksum": checksum(state)}

        def write(beside: Path) -> None:  # again, if the folder vanishes meanwhile
            check_claim(self.folder.parent)
            _save(content, beside)

        write_whole(path, write)
        if self._keep_last is not None and not is_best:
            # A later one is what could not be read at the last start: no reason to drop what is written now.
            own = [path for path in self.steps() if int(path.stem[5:]) <= state["step"]]
            for old in own[: -self._keep_last]:
                with suppress(IsADirectoryError):  # whose name is such a file's
                    old.unlink(missing_ok=True)


def claim_text() -> str:
    """What .lock holds in the folder of a run that this process trains."""
    return f"process {os.getpid()} on {platform.node()}"


def check_claim(directory: Path) -> None:
    """FailureError if somebody has removed the folder of a run that this process trains, and started the run anew."""
    lock = directory / ".lock"
    owner = lock.read_text(encoding="utf-8") if lock.exists() else "another process"
    is_lock_alone_gone = not lock.exists() and (directory / "metrics.jsonl").exists()
    if directory in claimed_folders and owner != claim_text() and not is_lock_alone_gone:
        raise FailureError(
            f"name={directory.name}: the folder that this process wrote to was removed, and {owner} trains the run "
            "anew. Choose another name=… to train both."
        )


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, flush it to the disk, give it the name; OSError if the disk refuses."""
    keep_trying(path, lambda: _write_whole(path, write))


def keep_trying(path: Path, use: Callable[[], Any], verb: str = "write") -> Any:
    """What `use` returns, which is called again if the disk stumbles; OSError that names `path` if it refuses."""
    for seconds in (1.0, 2.0, None):
        try:
            return use()
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(path)
            if seconds is None or error.errno not in PASSING:
                raise
            get_logger().warning("cannot %s %s (%s): trying again in %.0f s", verb, path, error.strerror, seconds)
            time.sleep(seconds)


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)  # rename is atomic
    except FileNotFoundError:  # the run's own folder has been there: to make it anew would hide that the disk is gone
        raise OSError(errno.ESTALE, "its folder has vanished", str(path)) from None
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)  # a full disk would stay full
        raise


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
    """The state in a checkpoint of ours, on the CPU. Nothing in the file is executed. ConfigError if it is not one;
    OSError if the disk does not answer: an older one would be taken for the newest.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # unlike Path's these raise nothing
        raise ConfigError(f"checkpoint {path} is no file. Name a checkpoint of a run.")
    try:
        state: dict[str, Any] = keep_trying(
            path, lambda: torch.load(path, map_location="cpu", weights_only=True), "read"
        )
        version = state.get("format_version") if isinstance(state, dict) else None
        is_ours = isinstance(version, int) and version == FORMAT_VERSION
        is_whole = is_ours and state.pop("checksum", None) == checksum(state)
    except FileNotFoundError:
        raise ConfigError(f"checkpoint {path} does not exist. Name an existing file, or train first.") from None
    except Exception as error:  # a damaged file fails anywhere in torch's reader; another's may hold anything
        if isinstance(error, OSError) and error.errno in SILENT:
            raise
        reason = one_line(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise ConfigError(f"checkpoint {path} cannot be read ({reason}). Remove it, or name another.") from None
    if not is_ours:
        raise ConfigError(
            f"checkpoint {path} has format_version {one_line(version)}, and this code reads {FORMAT_VERSION}. "
            "For weights alone use checkpoint.initial_weights."
        )
    if not is_whole:
        raise ConfigError(f"checkpoint {path} is damaged (its checksum is wrong). Remove it, or name another.")
    if missing := KEYS - state.keys():
        raise ConfigError(f"checkpoint {path} holds no {', '.join(sorted(missing))}. Name one that a run has written.")
    return state

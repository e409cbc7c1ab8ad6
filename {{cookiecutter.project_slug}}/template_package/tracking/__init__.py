"""Figures of a run while it goes on: metrics.jsonl, the progress bar or console lines, and the trackers.

A tracker is a file of this folder with a class `Tracker`; media.py writes pictures and texts, logs.py the ranks' logs.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import Config, to_dict
from ..files import disk_failure, write_whole
from ..launching.distributed import RankContext
from .logs import console
from .media import MediaLog

NOT_SHOWN = ("split", "step", "epoch", "learning_rate", "num_samples", "samples_per_second")
logger = logging.getLogger(__name__)


class Tracking:
    """Rank 0 writes and shows; on the other ranks each method does nothing."""

    def __init__(
        self, directory: Path, config: Config, context: RankContext, *, step: int, is_evaluation_pending: bool,
        total_steps: int,
    ) -> None:  # fmt: skip
        self._media = directory / "media" if context.is_main else None
        self._is_main, self._first_step, self._total_steps = context.is_main, step, total_steps
        self._started = time.perf_counter()
        self._trackers: dict[str, Any] = {}
        wanted = config.logging.progress_bar
        is_hidden = None if wanted == "auto" else not wanted  # None: unless the console is a terminal
        tqdm.monitor_interval = 0  # no thread beside: it might hold the lock while a loader worker is forked
        options: dict[str, Any] = {"file": console(), "disable": is_hidden if context.is_main else True, "miniters": 1}
        form = "step {n_fmt}/{total_fmt} {percentage:3.0f}%|{bar}| {remaining} left{postfix}"
        self._bar = tqdm(initial=step, total=total_steps, bar_format=form, dynamic_ncols=True, **options)
        if context.is_main:
            self._path = directory / "metrics.jsonl"
            _drop_repeated_lines(self._path, step, is_evaluation_pending)
            self._metrics = self._path.open("a", encoding="utf-8")
            self._trackers = {name: None for name in config.logging.tracker if name != "none"}
            self._call_trackers("start", directory, to_dict(config), step)

    def record(self, values: Mapping[str, Any], epoch_loss: float | None = None) -> None:
        """Write {"split", "step", "epoch", "loss", ...} as a JSON line, and show it. epoch_loss: at an epoch's end."""
        if not self._is_main:
            return
        self._write(json.dumps(values) + "\n")
        split, step = values["split"], values["step"]
        scalars = {f"{split}/{key}": value for key, value in values.items() if key not in ("split", "step")}
        self._call_trackers("record", step, scalars)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in values.items() if key not in NOT_SHOWN)
        if split != "train":
            logger.info("step %d: %s %s", step, split, figures)
            return
        seconds_per_step = (time.perf_counter() - self._started) / max(1, step - self._first_step)
        time_left = tqdm.format_interval(seconds_per_step * (self._total_steps - step))
        speed = f"{values['samples_per_second']:.0f} samples/s, {time_left} left"
        position = f"step {step}/{self._total_steps}"
        if epoch_loss is not None:
            logger.info("epoch %d (%s): training loss %.4g, %s", values["epoch"], position, epoch_loss, speed)
        elif self._bar.disable:
            logger.info("%s: %s, %s", position, figures, speed)
        else:
            self._bar.set_postfix_str(figures, refresh=False)

    def log(self, step: int) -> MediaLog:
        """The log for pictures and texts of this step, for functions of model.py."""
        return MediaLog(step, self._media, self._call_trackers)

    def sync(self) -> None:
        """Bring all recorded lines to the disk: no checkpoint may be newer than the figures."""
        if self._is_main:
            self._write("", is_synced=True)

    def advance(self, step: int) -> None:
        """Move the bar to `step`. Called at each step: it costs next to nothing unless the bar is due."""
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """End the bar, the trackers and the file."""
        self._bar.close()
        if self._is_main:
            self._call_trackers("close")
            self._metrics.close()

    def _write(self, line: str, *, is_synced: bool = False) -> None:
        try:
            self._metrics.write(line)
            self._metrics.flush()
            if is_synced:
                os.fsync(self._metrics.fileno())
        except OSError as error:
            raise disk_failure(self._path, error) from error

    def _call_trackers(self, action: str, *arguments: Any) -> None:
        """Start or call each tracker. One that fails is left out with a warning: metrics.jsonl has all figures."""
        for name in list(self._trackers):
            try:
                if action == "start":
                    self._trackers[name] = import_module(f".{name}", __package__).Tracker(*arguments)
                else:
                    getattr(self._trackers[name], action)(*arguments)
            except Exception as error:
                del self._trackers[name]
                remedy = f" Try: pip install {name}." if isinstance(error, ImportError) else ""
                words = "warning: logging.tracker=%s has failed (%s) and is left out; metrics.jsonl goes on.%s"
                logger.warning(words, name, " ".join(str(error).split()), remedy)


def _drop_repeated_lines(path: Path, step: int, is_evaluation_pending: bool) -> None:
    """Drop the lines that will come again, and one that a killed process left half written."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        with suppress(ValueError, TypeError, KeyError):  # half a line
            values = json.loads(line)
            comes_again = values["step"] == step and values["split"] != "train" and is_evaluation_pending
            if values["step"] <= step and not comes_again:
                kept.append(line)
    write_whole(path, lambda beside: beside.write_bytes(b"".join(kept)))

"""Shows and records training progress with metrics.jsonl, a progress bar, pictures, trackers and a log per rank.

A tracker is a file in this folder with a class `Tracker`. Rank 0 sends all Python output to the console and its log.
Other ranks send all of stdout and stderr to their logs, including the output of C++ code and NCCL.
"""

import faulthandler
import io
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..config import Config
from ..core.config import to_dict
from ..core.processes import time_limit
from ..errors import ConfigError
from ..files import disk_failure, write_whole
from ..launching.distributed import RankContext

NOT_SHOWN = ("split", "step", "epoch", "learning_rate", "num_samples", "samples_per_second")
TRACKER_SECONDS = 60
"""How long a tracker may take to start, to record or to close. A server that is silent may not hold up the run."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MediaLog:
    """Logs images and text, on rank 0 only. Functions in model.py get this object as `log`. Errors become warnings."""

    step: int
    folder: Path | None  # None on the other ranks
    show: Callable[..., None]  # hands the file to the trackers

    def image(self, name: str, picture: Any) -> None:
        """Save `picture` as PNG. It can be a PIL image, or a tensor or array of uint8 values or floats from 0 to 1.
        A tensor or array should have shape (H, W), (H, W, 3), (3, H, W) or (1, H, W).
        """
        self._write(name, ".png", lambda path: _as_image(picture).save(path, format="PNG"))

    def figure(self, name: str, figure: Any) -> None:
        """Write a matplotlib figure as PNG, and close the figure."""
        self._write(name, ".png", lambda path: figure.savefig(path, format="png"))
        # on each rank: pyplot keeps a figure until it is closed
        with suppress(KeyError, TypeError):
            sys.modules["matplotlib.pyplot"].close(figure)

    def text(self, name: str, text: str) -> None:
        """Save `text` in a .txt file and pass it to the trackers. Some, such as TensorBoard, show it as Markdown."""
        self._write(name, ".txt", lambda path: path.write_text(text, encoding="utf-8"))

    def _write(self, name: str, suffix: str, save: Callable[[Path], object]) -> None:
        if self.folder is not None:
            try:
                self.folder.mkdir(exist_ok=True)
                path = self.folder / f"step_{self.step:08}_{name.replace('/', '_')}{suffix}"
                write_whole(path, save)
                self.show("show", self.step, name, path)
            except Exception as error:  # a failed picture must not end the run
                logger.warning(
                    "warning: log of %r has failed: %s", name, " ".join(str(error).split())
                )


class Tracking:
    """On rank 0, writes metrics.jsonl, shows the progress and calls the trackers. On other ranks, writes nothing."""

    def __init__(
        self, directory: Path, config: Config, context: RankContext, *, step: int, is_evaluation_pending: bool,
        total_steps: int,
    ) -> None:  # fmt: skip
        self._media = directory / "media" if context.is_main else None
        self._is_main, self._first_step, self._total_steps = context.is_main, step, total_steps
        self._started = time.perf_counter()
        self._trackers: dict[str, Any] = {}
        # None: if no terminal
        is_hidden = {"auto": None, True: False, False: True}[config.logging.progress_bar]
        # no extra thread: it might hold a lock while a loader worker is forked
        tqdm.monitor_interval = 0
        options: dict[str, Any] = {
            "disable": is_hidden if context.is_main else True,
            "file": sys.__stderr__,
        }
        form = "step {n_fmt}/{total_fmt} {percentage:3.0f}%|{bar}| {remaining} left{postfix}"
        self._bar = tqdm(
            initial=step,
            total=total_steps,
            bar_format=form,
            dynamic_ncols=True,
            miniters=1,
            **options,
        )
        if context.is_main:
            self._path = directory / "metrics.jsonl"
            _drop_repeated_lines(self._path, step, is_evaluation_pending)
            self._metrics = self._path.open("a", encoding="utf-8", buffering=1)  # each line at once
            self._trackers = {name: None for name in config.logging.tracker if name != "none"}
            self._call_trackers("start", directory, to_dict(config), step)

    def record(self, values: Mapping[str, Any], *, is_epoch_end: bool = False) -> None:
        """Write `values`, which include `split` and `step`, to metrics.jsonl, to the trackers and to the console."""
        if not self._is_main:
            return
        try:
            self._metrics.write(json.dumps(values) + "\n")
        except OSError as error:
            raise disk_failure(self._path, error) from error
        split, step = values["split"], values["step"]
        scalars = {
            f"{split}/{key}": value for key, value in values.items() if key not in ("split", "step")
        }
        self._call_trackers("record", step, scalars)
        figures = ", ".join(
            f"{key} {value:.4g}" for key, value in values.items() if key not in NOT_SHOWN
        )
        if split != "train":
            logger.info("step %d: %s %s", step, split, figures)
            return
        seconds_per_step = (time.perf_counter() - self._started) / max(1, step - self._first_step)
        time_left = tqdm.format_interval(seconds_per_step * (self._total_steps - step))
        speed = f"{values['samples_per_second']:.0f} samples/s, {time_left} left"
        position = f"step {step}/{self._total_steps}"
        if is_epoch_end:
            logger.info(
                "epoch %d (%s): training loss %.4g, %s",
                values["epoch"],
                position,
                values.get("epoch_loss", values["loss"]),
                speed,
            )
        elif self._bar.disable:
            logger.info("%s: %s, %s", position, figures, speed)
        else:
            self._bar.set_postfix_str(figures, refresh=False)

    def log(self, step: int) -> MediaLog:
        """Return a MediaLog for this step. Functions in model.py, such as after_step(), receive it as `log`."""
        return MediaLog(step, self._media, self._call_trackers)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`. This is fast enough to be called at every step."""
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._bar.close()
        if self._is_main:
            self._call_trackers("close")
            self._metrics.close()

    def _call_trackers(self, action: str, *arguments: Any) -> None:
        """If `action` is "start", create the trackers. Otherwise, call that method on each. Drop trackers that fail."""
        for name in list(self._trackers):
            try:
                if action == "start":  # outside the limit: a network disk may be slow
                    call = import_module(f".{name}", __package__).Tracker
                else:
                    call = getattr(self._trackers[name], action)
                with time_limit(TRACKER_SECONDS):
                    result = call(*arguments)
                if action == "start":
                    self._trackers[name] = result
            except Exception as error:
                del self._trackers[name]
                remedy = f" Try: pip install {name}." if isinstance(error, ImportError) else ""
                message = "warning: logging.tracker=%s has failed (%s) and is left out; metrics.jsonl goes on.%s"
                logger.warning(message, name, " ".join(str(error).split()), remedy)


def _drop_repeated_lines(path: Path, step: int, is_evaluation_pending: bool) -> None:
    """Delete any half-written line of metrics.jsonl, and the lines that this run will write again on resuming."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        with suppress(ValueError, TypeError, KeyError):  # half a line
            values = json.loads(line)
            comes_again = (
                values["step"] == step and values["split"] != "train" and is_evaluation_pending
            )
            if values["step"] <= step and not comes_again:
                kept.append(line)
    write_whole(path, lambda beside: beside.write_bytes(b"".join(kept)))


def _as_image(picture: Any) -> Any:
    from PIL import Image

    if isinstance(picture, Image.Image):
        return picture
    pixels = torch.as_tensor(picture).detach().cpu()
    if pixels.is_floating_point():
        pixels = (pixels.clamp(0, 1) * 255).round().byte()
    if pixels.ndim == 3 and len(pixels) in (1, 3):
        pixels = pixels.movedim(0, 2)  # (C, H, W) -> (H, W, C)
    # refuses other shapes
    return Image.fromarray((pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels).numpy())


@contextmanager
def rank_logs(directory: Path, context: RankContext) -> Iterator[None]:
    """Inside the `with` block, save this rank's output, logs and uncaught exceptions to logs/rank_<r>.log."""
    path = directory / "logs" / f"rank_{context.rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        output = _Output(path)
    except OSError as error:
        raise disk_failure(path, error) from error
    # tqdm's own is a system semaphore, which a killed rank would leave behind
    tqdm.set_lock(threading.RLock())
    package = logging.getLogger(__name__.partition(".")[0])
    former_handlers, package.propagate = package.handlers, False
    package.setLevel(logging.INFO)
    # Whole lines: the bar would be drawn over a part of one.
    lines_to = partial(
        io.TextIOWrapper, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    with output as file:
        stdout = stderr = log = lines_to(file)
        package.handlers = [logging.StreamHandler(log)]
        package.handlers[0].setFormatter(
            logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        )
        rank_info = [
            f"{name}={getattr(context, name)}"
            for name in ("rank", "local_rank", "world_size", "device")
        ]
        logger.info("host=%s pid=%d %s", socket.gethostname(), os.getpid(), " ".join(rank_info))
        if context.is_main:
            sys.stdout.flush()
            package.addHandler(logging.StreamHandler(lines_to(_Output(1))))
            stdout, stderr = lines_to(_Output(1, file)), lines_to(_Output(2, file))
        else:
            for descriptor in (1, 2):
                # for good: this process ends soon after the body
                os.dup2(file.fileno(), descriptor)
        faulthandler.enable(file=log)
        try:
            with redirect_stdout(stdout), redirect_stderr(stderr):
                yield
        except Exception as error:
            log.write(
                f"error: {error}\n" if isinstance(error, ConfigError) else traceback.format_exc()
            )
            raise
        finally:
            stdout.flush()
            stderr.flush()
            faulthandler.disable()
            package.handlers = former_handlers


class _Output(io.FileIO):
    """Clears the progress bar before writing text to `file`, and also writes the text to `log` if one is given."""

    def __init__(self, file: Path | int, log: "_Output | None" = None) -> None:
        super().__init__(file, "a", closefd=isinstance(file, Path))
        self._log = log

    def write(self, content: Any) -> int:
        # a full disk is told by the next save
        with (
            suppress(OSError),
            tqdm.external_write_mode(file=sys.__stderr__),
        ):
            super().write(content)
        if self._log is not None:
            self._log.write(content)
        return len(content)

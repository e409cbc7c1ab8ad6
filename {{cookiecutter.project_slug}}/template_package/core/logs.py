"""Shows and records a run: a log per rank, metrics.jsonl, a progress bar, trackers, summary.json."""

import faulthandler
import io
import json
import logging
import os
import platform
import resource
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from ..errors import ConfigError
from ..files import disk_failure, template_facts, write_json, write_whole
from .config import Config, to_dict
from .processes import time_limit
from .ranks import Rank, gather_objects

NOT_SHOWN = ("split", "step", "epoch", "learning_rate", "num_samples", "samples_per_second")
PACKAGE = __name__.partition(".")[0]
LIBRARIES = "torch numpy pydantic torchmetrics safetensors accelerate deepspeed horovod".split()
TRACKER_SECONDS = 60
"""How long a tracker may take to start, to record or to close. A server that is silent may not hold up the run."""
logger = logging.getLogger(__name__)


class Log:
    """What functions of model.py get as `log`: it records numbers and texts, on rank 0 alone."""

    def __init__(self, tracking: "Tracking", step: int) -> None:
        self._tracking, self._step = tracking, step
        # runs/<name>/media; None on the other ranks
        self.folder = tracking.directory / "media" if tracking.is_main else None

    def scalar(self, name: str, value: float | Tensor) -> None:
        """Record a number of rank 0, under this name, in the trackers."""
        if self._tracking.is_main:
            self._tracking.call_trackers("record", self._step, {name: float(value)})

    def text(self, name: str, text: str) -> None:
        """Write the text to media/, and hand it to the trackers."""
        self.write(name, ".txt", lambda path: path.write_text(text, encoding="utf-8"))

    def write(self, name: str, suffix: str, save: Callable[[Path], object]) -> None:
        """Write a file of media/ by save(path), and hand it to the trackers."""
        if self.folder is not None:
            self.folder.mkdir(exist_ok=True)
            path = self.folder / f"step_{self._step:08}_{name.replace('/', '_')}{suffix}"
            write_whole(path, save)
            self._tracking.call_trackers("show", self._step, name, path)


class Tracking:
    """On rank 0, writes metrics.jsonl, shows the progress, and calls the trackers."""

    def __init__(
        self,
        directory: Path,
        config: Config,
        rank: Rank,
        *,
        step: int,
        total_steps: int,
        is_evaluation_pending: bool,
    ) -> None:
        self.directory, self.is_main = directory, rank.is_main
        self._trackers: dict[str, Any] = {}
        is_hidden = {"auto": None, True: False, False: True}[config.logging.progress_bar]
        tqdm.monitor_interval = 0  # no thread that might hold a lock while a worker is forked
        self._bar = tqdm(
            initial=step,
            total=total_steps,
            bar_format="step {n_fmt}/{total_fmt} {percentage:3.0f}%|{bar}| {remaining} left{postfix}",
            dynamic_ncols=True,
            miniters=1,
            disable=is_hidden if rank.is_main else True,  # None: if no terminal
            file=sys.__stderr__,
        )
        if rank.is_main:
            self._path = directory / "metrics.jsonl"
            _drop_repeated_lines(self._path, step, is_evaluation_pending)
            self._metrics = self._path.open("a", encoding="utf-8", buffering=1)
            self._trackers = {name: None for name in config.logging.tracker if name != "none"}
            self.call_trackers("start", directory, to_dict(config), step)

    def record(self, values: Mapping[str, Any]) -> None:
        """Write `values`, with their split and step, to metrics.jsonl, trackers and console."""
        if not self.is_main:
            return
        try:
            self._metrics.write(json.dumps(values) + "\n")
        except OSError as error:
            raise disk_failure(self._path, error) from error
        split, step = values["split"], values["step"]
        numbers = {k: value for k, value in values.items() if k not in ("split", "step")}
        self.call_trackers("record", step, {f"{split}/{k}": v for k, v in numbers.items()})
        shown = ", ".join(f"{k} {value:.4g}" for k, value in numbers.items() if k not in NOT_SHOWN)
        if split == "train" and not self._bar.disable:
            self._bar.set_postfix_str(shown, refresh=False)
            return
        if split == "train":
            shown += f", {values['samples_per_second']:.0f} samples/s"
        logger.info("epoch %d, step %d: %s %s", values["epoch"], step, split, shown)

    def advance(self, step: int) -> None:
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._bar.close()
        if self.is_main:
            self.call_trackers("close")
            self._metrics.close()

    def call_trackers(self, action: str, *arguments: Any) -> None:
        """Create the trackers ("start"), or call a method of each. Leave out one that fails."""
        for name in list(self._trackers):
            try:
                if action == "start":  # outside the limit: a network disk may be slow
                    call = import_module(f"{PACKAGE}.tracking.{name}").Tracker
                else:
                    call = getattr(self._trackers[name], action)
                with time_limit(TRACKER_SECONDS):
                    result = call(*arguments)
                if action == "start":
                    self._trackers[name] = result
            except Exception as error:  # a tracker must not end a run
                del self._trackers[name]
                problem = " ".join(str(error).split())
                message = "warning: logging.tracker=%s has failed (%s); metrics.jsonl goes on."
                remedy = f" Try: pip install {name}." if isinstance(error, ImportError) else ""
                logger.warning(message + remedy, name, problem)


def _drop_repeated_lines(path: Path, step: int, is_evaluation_pending: bool) -> None:
    """Delete a half-written line of metrics.jsonl, and those that this run writes again."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        with suppress(ValueError, TypeError, KeyError):  # half a line
            values = json.loads(line)
            is_repeated = values["step"] == step and values["split"] != "train"
            if values["step"] <= step and not (is_repeated and is_evaluation_pending):
                kept.append(line)
    write_whole(path, lambda beside: beside.write_bytes(b"".join(kept)))


@contextmanager
def rank_log(directory: Path, rank: Rank) -> Iterator[io.TextIOWrapper]:
    """Inside, this rank's output goes to logs/rank_<r>.log too; rank 0's also to the console."""
    path = directory / "logs" / f"rank_{rank.rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        output = _Output(path)
    except OSError as error:
        raise disk_failure(path, error) from error
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed rank leaves behind
    package = logging.getLogger(PACKAGE)
    package.propagate = False
    package.setLevel(logging.INFO)
    with output as file:
        log = _as_text(file)
        package.handlers = [logging.StreamHandler(log)]
        form = logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        package.handlers[0].setFormatter(form)
        numbers = f"rank={rank.rank} local_rank={rank.local_rank} world_size={rank.world_size}"
        host = f"host={socket.gethostname()} pid={os.getpid()}"
        logger.info("%s %s device=%s", host, numbers, rank.device)
        stdout = stderr = log
        if rank.is_main:
            package.addHandler(logging.StreamHandler(_as_text(_Output(1))))
            stdout, stderr = _as_text(_Output(1, file)), _as_text(_Output(2, file))
        else:
            # tell_failure() and the progress bar write there, past the log.
            vars(sys)["__stderr__"] = os.fdopen(os.dup(2), "w", buffering=1)
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)  # C++ and NCCL, too, write to the log
        faulthandler.enable(log)  # if native code crashes
        try:
            with redirect_stdout(stdout), redirect_stderr(stderr):
                yield log
        except Exception as error:
            is_short = isinstance(error, ConfigError)
            log.write(f"error: {error}\n" if is_short else traceback.format_exc())
            raise
        finally:
            stdout.flush()
            stderr.flush()
            faulthandler.disable()
            package.handlers = []


def _as_text(file: io.FileIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, "utf-8", errors="backslashreplace", line_buffering=True)


class _Output(io.FileIO):
    """Clears the progress bar before it writes to `file`, and writes to `log` too."""

    def __init__(self, file: Path | int, log: "_Output | None" = None) -> None:
        super().__init__(file, "a", closefd=isinstance(file, Path))
        self._log = log

    def write(self, content: Any) -> int:
        # the disk may be full
        with (
            suppress(OSError),
            tqdm.external_write_mode(file=sys.__stderr__),
        ):
            super().write(content)
        if self._log is not None:
            self._log.write(content)
        return len(content)


def write_start(directory: Path, config: Config, rank: Rank) -> None:
    """Write config.yaml and environment.json on rank 0, and remove an earlier summary.json."""
    own = [
        f"{one}: {torch.cuda.get_device_name(one) if one.type == 'cuda' else platform.machine()}"
        for one in rank.devices
    ]
    devices = [*chain(*(gather_objects(own) or []))]
    if not rank.is_main:
        return
    logger.info("%s: world_size %d, %s", directory, rank.world_size, "; ".join(devices))
    text = yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False)
    write_whole(directory / "config.yaml", lambda path: path.write_text(text, encoding="utf-8"))
    facts: dict[str, Any] = {"host": platform.node(), "platform": platform.platform()}
    facts |= {"devices": devices, "world_size": rank.world_size, "command": sys.argv}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {"cuda": torch.version.cuda, "template": template_facts()}
    loaded = sys.modules.keys() & LIBRARIES
    facts["libraries"] = {name: str(sys.modules[name].__version__) for name in sorted(loaded)}
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        options: Any = {"text": True, "timeout": 10, "stderr": subprocess.DEVNULL}
        facts["git_commit"] = subprocess.check_output(command, **options).strip()
    write_json(directory / "environment.json", facts)
    (directory / "summary.json").unlink(missing_ok=True)


def summary_of(config: Config, rank: Rank) -> dict[str, Any]:
    """Return what summary.json says of the run's place. All ranks must call this."""
    unit = 1 if sys.platform == "darwin" else 2**10
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    own = [
        torch.cuda.max_memory_allocated(one) if one.type == "cuda" else resident
        for one in rank.devices
    ]
    peaks = [round(peak / 2**20, 1) for peak in chain(*(gather_objects(own) or []))]
    return {
        "world_size": rank.world_size,
        "num_devices": len(peaks),
        "device_ids": config.device_ids,
        "strategy": config.strategy,
        "precision": config.training.precision,
        "global_batch_size": config.training.global_batch_size,
        "peak_memory_mib": peaks,
    }


class StepClock:
    """Measures the time in training steps. Start-up, evaluation and saving do not count."""

    def __init__(self, num_samples_seen: int) -> None:
        self._started_at, self.first_sample = time.perf_counter(), num_samples_seen
        self._lap = num_samples_seen, 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started_at

    @contextmanager
    def paused(self) -> Iterator[None]:
        paused_at = self.seconds
        try:
            yield
        finally:
            self._started_at = time.perf_counter() - paused_at

    def samples_per_second(self, num_samples_seen: int) -> float:
        """Return the speed since the previous call."""
        (samples, seconds), self._lap = self._lap, (num_samples_seen, self.seconds)
        return (num_samples_seen - samples) / max(self._lap[1] - seconds, 1e-9)

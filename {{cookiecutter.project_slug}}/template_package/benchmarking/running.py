"""Runs the rows in rounds, each run in fresh processes, and keeps what they left or the reason why they failed."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..launching.starting import die_with_parent
from .plan import Row

MODULE = f"{__package__}.measure"
PROJECT = Path(__file__).parents[2]
HELPERS_SECONDS = 10.0


@dataclass
class Outcome:
    """What became of a row: a dict for each run of it, or the reason why there is none, and where its log is."""

    row: Row
    runs: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    log: Path | None = None


def run_rounds(
    rows: Sequence[Row], num_rounds: int, config_path: Path, folder: Path, has_bar: bool
) -> tuple[list[Outcome], int]:
    """Each row once a round, one after the other, so that what else the machine does meets all alike; and the number
    of the signal that ended it early, Ctrl-C's or SIGTERM, or 0. A row that fails is not tried again.
    """
    outcomes = [Outcome(row, reason=row.obstacle) for row in rows]
    signal.signal(signal.SIGTERM, _interrupt)  # what was measured is not lost to a scheduler either
    _adopt_orphans()
    with Countdown(num_rounds * sum(not row.obstacle for row in rows), has_bar) as countdown:
        try:
            for number in range(num_rounds):
                first = number * len(outcomes) // num_rounds  # another in each round: the order, too, is to favour none
                for outcome in outcomes[first:] + outcomes[:first]:
                    if not outcome.reason:
                        countdown.begin(outcome.row.name)
                        run_once(outcome, config_path, folder, countdown)
                        countdown.end(num_dropped=num_rounds - 1 - number if outcome.reason else 0)
        except KeyboardInterrupt as interrupt:
            for outcome in outcomes:
                if not outcome.runs and not outcome.reason:
                    outcome.reason = "interrupted before its turn"
            return outcomes, next(iter(interrupt.args), signal.SIGINT)
    return outcomes, 0


def run_once(outcome: Outcome, config_path: Path, folder: Path, countdown: Countdown) -> None:
    """One run: into outcome.runs, or its reason into outcome.reason and its words into a log file."""
    row, directory = outcome.row, folder / "run"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log = directory / "output.txt"
    started_at = time.time()
    try:
        code = _run(_command(row, config_path, directory), log, countdown)
        if code == 0:
            outcome.reason = _take(outcome, directory, started_at)
        else:
            outcome.reason = find_reason(log.read_text(encoding="utf-8", errors="replace")) or f"exit code {code}"
        if outcome.reason:
            outcome.log = log.replace(folder / f"{row.name.replace(', ', '-').replace(' ', '-')}.log")  # ddp-16-bit.log
    finally:
        shutil.rmtree(directory)


def find_reason(output: str) -> str:
    """The line of a failed run's output that says why: the user's mistake, or a traceback's last line."""
    lines = [line.strip() for line in output.splitlines()]
    mistakes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Exit|Interrupt)\b", line)]
    errors = [line for line in errors if "ChildFailedError" not in line]  # torchrun's, which comes after the cause
    reasons = mistakes[:1] or errors[-1:] or [line for line in lines if line][-1:]
    return reasons[0] if reasons else ""


def _command(row: Row, config_path: Path, directory: Path) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(row.device_ids)}"]
    starter = torchrun if row.launcher == "torchrun" else []
    return [sys.executable, *starter, "-m", MODULE, str(config_path), str(directory), *row.words]


def _run(command: list[str], log: Path, countdown: Countdown) -> int:
    """The exit code. The processes have ended when it returns or raises, their helpers too."""
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - this process has no threads
        )
    try:
        while True:
            try:
                return process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                countdown.show()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _wait_for_group(process.pid)


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _adopt_orphans() -> None:
    """Let what the rows leave behind become this process's children, whose end it can wait for (Linux)."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def _wait_for_group(group: int) -> None:
    """Until its adopted processes have ended: a fork server would share the cores with the next row's start."""
    deadline = time.monotonic() + HELPERS_SECONDS
    with suppress(ChildProcessError, ProcessLookupError):  # none is left
        while time.monotonic() < deadline:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)


def _take(outcome: Outcome, directory: Path, started_at: float) -> str:
    """Add the run to the outcome, or else the reason why it is not what the row says."""
    measured, summary, environment = (
        json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("measured", "summary", "environment")
    )
    keys = ("num_devices", "precision", "micro_batch_size", "peak_memory_mib")
    run = measured | {key: summary[key] for key in keys} | {"environment": environment}
    run |= {key: float(run[key]) for key in ("first_loss", "final_loss")}  # from "NaN"
    run["startup_seconds"] = run.pop("first_step_at") - started_at
    if not (reason := outcome.row.find_difference(run)):
        outcome.runs.append(run)
    return reason


class Countdown:
    """How many runs are done, and the time that is left if the others take as long as those did on average: a progress
    bar, or a line a run where nobody watches.
    """

    def __init__(self, num_runs: int, has_bar: bool) -> None:
        self._num_runs, self._name, self._began = num_runs, "", 0.0
        self._seconds: list[float] = []
        self._bar: tqdm | None = None
        if has_bar:
            tqdm.monitor_interval = 0  # no thread beside
            layout = "benchmark {n_fmt}/{total_fmt} |{bar:20}|{desc}"
            self._bar = tqdm(total=num_runs, bar_format=layout, dynamic_ncols=True)

    def __enter__(self) -> Countdown:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, name: str) -> None:
        """A run of this row begins."""
        self._name, self._began = name, time.monotonic()
        self.show()
        if self._bar is None:
            print(f"benchmark {len(self._seconds) + 1}/{self._num_runs}: {name} …", end=" ", flush=True)

    def end(self, *, num_dropped: int) -> None:
        """It has ended; so many later runs will not be made, because it has failed."""
        seconds, self._began = time.monotonic() - self._began, time.monotonic()
        self._seconds.append(seconds)
        self._num_runs -= num_dropped
        if self._bar is not None:
            self._bar.total = self._num_runs
            self._bar.update()
        else:
            print(f"{seconds:.1f} s, {self._time_left()} left", flush=True)

    def show(self) -> None:
        """Draw the bar anew."""
        if self._bar is not None:
            self._bar.set_description_str(f" {self._time_left()} left: {self._name}")

    def _time_left(self) -> timedelta | str:
        if not self._seconds:
            return "?"
        mean = sum(self._seconds) / len(self._seconds)
        elapsed = min(mean, time.monotonic() - self._began)
        return timedelta(seconds=max(0, round(mean * (self._num_runs - len(self._seconds)) - elapsed)))

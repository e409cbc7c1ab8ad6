"""`python run.py sweep FILE`: starts many training runs, in parallel if possible. Rerun it to resume the sweep.

Each run is a child process `python run.py …` with its files in runs/<sweep>/. A run waits for free GPUs, locks them,
and can be resumed. Stopping the sweep stops its runs. A restarted sweep reads sweep.json and the runs' files.
"""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from shutil import get_terminal_size
from types import NoneType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from tqdm import tqdm

from ...core.checkpoint import run_lock
from ...core.launch import STOPPED, find_gpus
from ...core.ranks import num_usable_cores
from ...core.settings import CommandLine, parse_device_ids, read_file
from ...errors import ConfigError, StopRun, one_line
from ...files import RUNS_FOLDER, run_directory, write_json
from ..common import find_reason, start_run, stops_raised
from ..report import dotted, mean_over_seeds, read_json, read_metrics, show

POLL_SECONDS = 0.3
ENDED_WELL = ("complete", "pruned")
Number = Annotated[
    Any, BeforeValidator(lambda text: int(text) if re.fullmatch(r"-?\d+", text) else float(text))
]
Choices = Annotated[list[Any], Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]


class Range(BaseModel, extra="forbid"):
    """A range of numbers from which to draw. If `low` and `high` are written as integers, only integers are drawn."""

    low: Number
    high: Number
    log: bool = False  # equally many of each order of magnitude

    @model_validator(mode="after")
    def check(self) -> Self:
        if not (-math.inf < self.low < self.high < math.inf and (self.low > 0 or not self.log)):
            raise ValueError("low must be less than high, and above 0 with log: true")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low + self.high, int)


class Search(BaseModel, extra="forbid"):
    space: Annotated[dict[str, Range | Choices], Field(min_length=1)]
    trials: Positive
    method: Literal["random", "optuna"] = "random"
    prune: bool = False  # optuna: end a trial whose metric is worse than the median of the former ones at this step

    def open_study(self, folder: Path, mode: str) -> tuple[Any, dict[str, Any]]:
        """Open or create the optuna study in `folder`/study.db. Return it and each swept setting's distribution."""
        import optuna  # the extra `optuna`

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        kinds, space = optuna.distributions, dict[str, Any]()
        for key, way in self.space.items():
            if isinstance(way, Range):
                kind = kinds.IntDistribution if way.is_whole else kinds.FloatDistribution
                space[key] = kind(way.low, way.high, log=way.log)
            else:
                space[key] = kinds.CategoricalDistribution(way)
        options: dict[str, Any] = {
            "direction": f"{mode}imize",
            "study_name": "sweep",
            "load_if_exists": True,
        }
        # several trials at once differ
        options["sampler"] = optuna.samplers.TPESampler(constant_liar=True)
        return optuna.create_study(
            storage=f"sqlite:///{folder.absolute()}/study.db", **options
        ), space


class Sweep(BaseModel, extra="forbid"):
    """Declares the keys of the sweep file."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    grid: dict[str, Choices] | None = None  # all combinations of these values
    runs: list[dict[str, Any]] | None = None  # the settings of each run
    search: Search | None = None
    # of each run; None: auto:1, or cpu without GPUs
    devices: Annotated[Any, BeforeValidator(parse_device_ids)] = None
    at_once: Positive | Literal["auto"] = "auto"
    seed: int = 0  # of the trials that a random search draws

    @model_validator(mode="after")
    def check(self) -> Self:
        if sum(map(bool, (self.grid, self.runs, self.search))) != 1:
            raise ValueError("one of the keys grid, runs and search must say what to run")
        return self

    def list_settings(self) -> list[dict[str, str]]:
        """Return each run's settings, without duplicates. If optuna chooses them, return example settings."""
        wanted = self.runs or []
        if self.grid:
            wanted = [
                dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())
            ]
        elif self.search:
            # more trials: the same ones first
            generator, space = (
                random.Random(self.seed),
                self.search.space.items(),
            )
            wanted = [
                {key: draw(way, generator) for key, way in space} for _ in range(self.search.trials)
            ]
        return list({repr(settings): settings for settings in map(as_arguments, wanted)}.values())


def draw(way: Range | list[Any], generator: random.Random) -> Any:
    """Draw a value from a list or a range. Round a float to 4 significant digits, so that it is easy to type."""
    if isinstance(way, list):
        return generator.choice(way)
    low, high = (math.log(way.low), math.log(way.high)) if way.log else (way.low, way.high)
    value = generator.uniform(low, high)
    value = math.exp(value) if way.log else value
    return round(value) if way.is_whole else min(max(float(f"{value:.4g}"), way.low), way.high)


def as_arguments(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings as text, keyed by dotted name, in the form that the command line takes."""
    items = dotted(settings).items()
    return {
        key: json.dumps(value) if isinstance(value, list | dict | NoneType) else str(value)
        for key, value in items
    }


def read_sweep(path: Path) -> Sweep:
    """Read the sweep file. If a key is wrong, raise a ConfigError that names the key and the rule that it breaks."""
    try:
        return Sweep.model_validate(read_file(path))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        value = "" if isinstance(problem["input"], dict) else f"={one_line(problem['input'])}"
        mistake = f"{'.'.join(map(str, problem['loc']))}{value}: {problem['msg']}".lstrip(": ")
        raise ConfigError(
            f"{path}: {mistake}. A sweep has the keys {', '.join(Sweep.model_fields)}."
        ) from None


@dataclass
class Run:
    name: str
    settings: dict[str, Any]
    status: str = "waiting"  # or running, complete, failed, stopped, pruned
    reason: str = ""  # the line that says why it failed
    value: float | None = None  # its best evaluation.metric
    step: int | None = None  # of that evaluation


def main(line: CommandLine) -> int:
    """Run the sweep. Return 0 if all runs are complete or pruned, 130 after Ctrl-C, 143 after SIGTERM, otherwise 1."""
    runner = SweepRunner(line, read_sweep(Path(line.rest[0])))
    with run_lock(runner.folder):
        runner.plan()
        exit_code = runner.run_all()
        runner.print_table()
    return exit_code


class SweepRunner:
    """Starts the runs of a sweep, watches them and writes their results to sweep.json."""

    def __init__(self, line: CommandLine, sweep: Sweep) -> None:
        """Check the settings of all runs before any run starts. Raise ConfigError if a setting is wrong."""
        self.sweep, self.folder, self.line = sweep, run_directory(sweep.name), line
        self.search = sweep.search if sweep.search and sweep.search.method == "optuna" else None
        num_gpus = len(find_gpus(os.environ))
        self.devices = sweep.devices or ("auto:1" if num_gpus else "cpu")
        self.running: dict[int, tuple[Run, subprocess.Popen[bytes]]] = {}  # by slot
        arguments = [
            self.list_arguments(Run("run", settings)) for settings in sweep.list_settings()
        ]
        config, *_ = [replace(line, words=own).load_config() for own in arguments]
        self.metric, self.mode = config.evaluation.metric, config.evaluation.mode
        device_ids = config.device_ids
        # 1 if a run names its GPUs or takes all free ones
        self.is_on_cpu, self.num_slots = (
            "cpu" in device_ids,
            1,
        )
        if sweep.at_once != "auto":
            self.num_slots = sweep.at_once
        elif self.is_on_cpu:
            self.num_slots = max(1, num_usable_cores() // len(device_ids))
        elif str(device_ids).startswith("auto:"):
            self.num_slots = max(1, num_gpus // int(str(device_ids)[5:]))

    def plan(self) -> None:
        """Make the list of runs from the sweep file or, if optuna chooses the settings, from its trials so far."""
        self.config = self.line.settings
        stored = read_json(self.folder / "sweep.json")
        self.runs, self.former = list[Run](), stored.get("runs", [])
        # otherwise each starts again; a complete one ends at once
        self.is_same = stored.get("config") == self.config
        wanted = self.sweep.list_settings()
        if self.search is not None:  # self.runs[i] is the study's trial i
            self.study, self.space = self.search.open_study(self.folder, self.mode)
            wanted = [trial.params for trial in self.study.trials]
        for settings in wanted:
            self.add(settings)

    def add(self, settings: dict[str, Any]) -> Run:
        """Add a run with these settings, and return it.

        If sweep.json already lists a run with these settings, keep its name. If that run is complete or pruned, and
        the config that all runs of the sweep share has not changed, keep its result, too.
        """
        parts = [f"{1 + len(self.former) + len(self.runs):02d}"]
        for key, value in settings.items():
            parts += [
                key.rpartition(".")[2],
                re.sub("[^A-Za-z0-9.-]+", "_", str(value)).strip("_")[:8],
            ]
        run = Run("-".join(parts)[:80], settings)
        former = next((former for former in self.former if former["settings"] == settings), None)
        if former is not None:
            self.former.remove(former)
            is_done = self.is_same and former["status"] in ENDED_WELL
            run = Run(**former) if is_done else Run(former["name"], settings)
        self.runs.append(run)
        return run

    def list_arguments(self, run: Run) -> list[str]:
        """Return the key=value arguments with which to start the run."""
        arguments = [
            f"device_ids={self.devices}",
            "launch.wait_minutes=525600",
            *self.line.words,
        ]
        settings = as_arguments(run.settings).items()
        return [*arguments, *(f"{key}={value}" for key, value in settings), f"name={run.name}"]

    def run_all(self) -> int:
        """Run the sweep until all runs have ended or a signal asks it to stop. Return the exit code."""
        bars = [
            tqdm(bar_format="{desc}", position=slot, leave=False, disable=None)
            for slot in range(self.num_slots)
        ]
        try:
            with stops_raised():
                while self.fill_slots():
                    time.sleep(POLL_SECONDS)
                    for slot, (run, process) in [*self.running.items()]:
                        bars[slot].set_description_str(
                            self.describe(run)[: get_terminal_size().columns - 1]
                        )
                        if run.status == "running" and self.is_hopeless(run):
                            run.status = "pruned"
                            process.terminate()
                        if process.poll() is not None:
                            del self.running[slot]
                            self.settle(run, process.returncode)
        except StopRun as stop:
            tqdm.write("asked to stop: each run saves after its step (Ctrl-C again: at once)")
            for _, process in self.running.values():
                process.terminate()
            for run, process in self.running.values():
                self.settle(run, process.wait())
            return stop.code
        finally:
            for bar in bars:
                bar.close()
        return int(any(run.status not in ENDED_WELL for run in self.runs))

    def describe(self, run: Run) -> str:
        """Return one line with the run's name, step, time left and latest metrics, taken from its log."""
        log = (self.folder / f"{run.name}.log").read_text(encoding="utf-8", errors="replace")[
            -4000:
        ]
        progress, metrics = (
            re.findall(r"(step \d+/\d+).* (\S+ left)", log),
            re.findall(r": validation (.*)", log),
        )
        return ", ".join([run.name, *(progress[-1] if progress else ()), *metrics[-1:]])

    def fill_slots(self) -> bool:
        """Start a waiting run in each free slot. Return True if any run is running."""
        for slot in (slot for slot in range(self.num_slots) if slot not in self.running):
            run = next((run for run in self.runs if run.status == "waiting"), None)
            if run is None and self.search is not None and len(self.runs) < self.search.trials:
                run = self.add(self.study.ask(self.space).params)
            if run is not None:
                self.running[slot] = run, self.start(run, slot)
        return bool(self.running)

    def start(self, run: Run, slot: int) -> subprocess.Popen[bytes]:
        """Start the run in a child process, which is killed when this process ends."""
        run.status, log = "running", self.folder / f"{run.name}.log"
        self.write()
        tqdm.write(f"{run.name}: begins, see {log}")
        configs = [f"--config={path}" for path in self.line.config_paths]
        process = start_run([*configs, *self.list_arguments(run)], self.folder, log)
        # threads of two runs on one core would wait for each other
        if self.is_on_cpu and sys.platform == "linux":
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(process.pid, cores[slot :: self.num_slots] or cores)
        return process

    def is_hopeless(self, run: Run) -> bool:
        """Report the run's metric so far to optuna. Return True if optuna would prune the run."""
        if self.search is None or not self.search.prune:
            return False
        from optuna.trial import Trial

        stored, lines = (
            self.study.trials[self.runs.index(run)],
            read_metrics(self.folder / run.name),
        )
        # the trial has ended before, and its run continues with more epochs
        if stored.state.is_finished():
            return False
        trial = Trial(self.study, stored._trial_id)
        for line in lines.get("validation", [])[len(stored.intermediate_values) :]:
            trial.report(line[self.metric], line["step"])
        return bool(trial.should_prune())

    def settle(self, run: Run, exit_code: int) -> None:
        """Record the status of a run that has ended, and its best metric or the reason why it failed."""
        summary = read_json(self.folder / run.name / "summary.json")
        best = summary.get("best") or {}
        run.value, run.step = best.get(self.metric), best.get("step")
        if exit_code == 0 and summary.get("status") == "complete":
            run.status = "complete"
        elif run.status != "pruned":
            run.status = "stopped" if exit_code in STOPPED else "failed"
        if run.status == "failed":
            run.reason = find_reason(self.folder / f"{run.name}.log", exit_code)
        if self.search is not None and run.status in ENDED_WELL:
            from optuna.trial import TrialState

            self.is_hopeless(run)
            value, state = (
                (run.value, None) if run.status == "complete" else (None, TrialState.PRUNED)
            )
            self.study.tell(self.runs.index(run), value, state, skip_if_finished=True)
        self.write()
        tqdm.write(f"{run.name}: {run.status}, {run.reason or f'{self.metric} {show(run.value)}'}")

    def write(self) -> None:
        """Write sweep.json: the runs, the base config, and the mean result of runs that differ only in the seed."""
        means = mean_over_seeds([(run.settings, run.value) for run in self.runs], self.mode)
        # runs that the sweep file no longer names stay listed
        runs = [
            *map(vars, self.runs),
            *self.former,
        ]
        content = {
            "metric": self.metric,
            "mode": self.mode,
            "runs": runs,
            "means": means,
            "config": self.config,
        }
        write_json(self.folder / "sweep.json", content)

    def print_table(self) -> None:
        """Print all runs, the best first, and the command that evaluates the best run."""
        sign = -1 if self.mode == "max" else 1
        order = sorted(
            self.runs, key=lambda run: math.inf if run.value is None else sign * run.value
        )
        print(f"\n{self.metric:>12}  {'step':>8}  run")
        for run in order:
            print(
                f"{show(run.value):>12}  {run.step or '':>8}  {run.name}  {run.status}  {run.reason}".rstrip()
            )
        if order and order[0].value is not None:
            print(f"\nThe best single run is {order[0].name}. To evaluate it, and to look at all:")
            print(f"  {RUNS_FOLDER}={self.folder} python run.py evaluate name={order[0].name}")
            print(f"  python run.py report {self.sweep.name}")

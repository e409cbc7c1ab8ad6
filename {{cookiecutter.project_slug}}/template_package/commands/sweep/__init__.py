"""`python run.py sweep FILE`: trains many runs, as many at once as devices can be had. The same command continues.

Each run is a `python run.py …` of its own in runs/<sweep>/, so locks, waiting for GPUs and exact resume are those of
any run. Runs die with the sweep. All that the next start needs is on the disk: the runs' own files and sweep.json.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import yaml
from tqdm import tqdm

from ...config import Config, differing_keys, load_config, to_dict
from ...errors import ConfigError, StopRun
from ...files import RUNS_FOLDER, run_directory, write_json
from ...launching.devices import find_gpus
from ...launching.environment import launcher_of
from ...launching.processes import die_with_parent, num_usable_cores, stop_signals_end
from ...training.run_files import run_lock
from .. import CommandLine
from ..report import mean_over_seeds, read_json, read_metrics
from .plan import Sweep, read_sweep

POLL_SECONDS = 0.3
STOPPED = (130, 143, -signal.SIGINT, -signal.SIGTERM)  # exit codes of a run that was asked to stop
MAY_DIFFER = re.compile(r"(name|device_ids|launch\.\w+|training\.(precision|micro_batch_size)): ")
"""Keys of a complete run's config that may differ from what the sweep asks for now."""


@dataclass
class Run:
    name: str
    settings: dict[str, str]
    trial: int | None = None  # its number in optuna's study
    status: str = "waiting"  # or running, complete, failed, stopped, pruned
    reason: str = ""  # the line that says why it failed
    value: float | None = None  # its best evaluation.metric
    step: int | None = None  # of that evaluation


def main(line: CommandLine) -> int:
    """0 if all runs are complete (or pruned), 1 if one is not; 130 after Ctrl-C and 143 after SIGTERM."""
    if len(line.rest) != 1 or launcher_of(os.environ) is not None:
        raise ConfigError("sweep: takes one file and no launcher. Type: python run.py sweep SWEEP.yaml [key=value …]")
    runner = SweepRunner(line, read_sweep(Path(line.rest[0])))
    with run_lock(runner.folder):
        runner.plan()
        exit_code = runner.run_all()
        runner.print_table()
    return exit_code


class SweepRunner:
    """Starts the runs of a sweep, watches them and writes down what became of them."""

    def __init__(self, line: CommandLine, sweep: Sweep) -> None:
        """Check everything before anything starts: ConfigError for settings that the config refuses."""
        self.sweep, self.folder, self.config_path = sweep, run_directory(sweep.name), line.config_path
        num_gpus, devices = len(find_gpus(os.environ).visible), sweep.devices
        devices = ",".join(map(str, devices)) if isinstance(devices, list) else devices
        self.words = [f"device_ids={devices or ('auto:1' if num_gpus else 'cpu')}", "launch.wait_minutes=525600"]
        self.words += line.overrides
        configs = [self.load_config(Run("run", each)) for each in sweep.list_settings() + sweep.list_bounds()]
        self.metric, self.mode = configs[0].evaluation.metric, configs[0].evaluation.mode
        device_ids, self.cores = configs[0].device_ids, list[int]()
        num_slots = 1  # with named GPUs, or all that are free
        if "cpu" in device_ids:
            num_slots = max(1, num_usable_cores() // len(device_ids))
            self.cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        elif device_ids[:5] == "auto:" and not (num_slots := num_gpus // int(device_ids[5:])):
            raise ConfigError(f"devices={device_ids}: there are {num_gpus} GPUs here. Write fewer, or devices: cpu.")
        self.num_slots = num_slots if sweep.at_once == "auto" else sweep.at_once
        self.running: dict[int, tuple[Run, subprocess.Popen[bytes]]] = {}  # by slot

    def plan(self) -> None:
        """List the runs, under the names that they had at an earlier start, and note which are complete."""
        self.runs, self.study = list[Run](), None
        self.former = read_json(self.folder / "sweep.json").get("runs", [])
        for settings in self.sweep.list_settings():
            self.add(settings)
        if self.sweep.search is not None and self.sweep.search.method == "optuna":
            from .study import Study

            self.study = Study(self.folder, self.sweep.search, self.sweep.seed, self.mode)
            for number, settings, status in self.study.list_trials():
                self.add(settings, number).status = status
        for run in self.runs:
            if read_json(self.folder / run.name / "summary.json").get("status") == "complete":
                stored = yaml.safe_load((self.folder / run.name / "config.yaml").read_text(encoding="utf-8"))
                changes = differing_keys(stored, to_dict(self.load_config(run)))
                if run.status == "complete" or all(map(MAY_DIFFER.match, changes)):
                    self.settle(run, exit_code=0)

    def add(self, settings: dict[str, str], trial: int | None = None) -> Run:
        """The run with these settings, under its former name or a new one. It waits for a slot."""
        number, entry = 1 + len(self.former) + len(self.runs), {"settings": settings, "trial": trial}
        former = next((run for run in self.former if run.items() >= entry.items()), None)
        if former is not None:
            self.former.remove(former)
        parts = [f"{number:02d}"]
        for key, value in settings.items():
            parts += [key.rpartition(".")[2], re.sub("[^A-Za-z0-9.-]+", "_", value).strip("_")[:8]]
        name = "-".join(parts)[:80]
        self.runs.append(Run(former["name"] if former else name, settings, trial))
        return self.runs[-1]

    def load_config(self, run: Run) -> Config:
        return load_config(self.config_path, self.list_words(run))

    def list_words(self, run: Run) -> list[str]:
        """The settings of the run's command line."""
        words = [*self.words, *(f"{key}={value}" for key, value in run.settings.items())]
        if any(word.startswith("name=") for word in words):
            raise ConfigError("name: a sweep names its runs itself. Delete this setting.")
        return [*words, f"name={run.name}"]

    def run_all(self) -> int:
        """Run until no run waits; return the exit code."""
        bars = [tqdm(bar_format="{desc}", position=slot, leave=False, disable=None) for slot in range(self.num_slots)]
        try:
            with stop_signals_end():
                while self.fill_slots():
                    time.sleep(POLL_SECONDS)
                    for slot, (run, process) in [*self.running.items()]:
                        bars[slot].set_description_str(self.describe(run)[: get_terminal_size().columns - 1])
                        self.prune(run, process)
                        if process.poll() is not None:
                            del self.running[slot]
                            self.settle(run, process.returncode)
                            bars[slot].set_description_str("")
        except (KeyboardInterrupt, StopRun) as stop:
            tqdm.write("asked to stop: each run saves after its step (Ctrl-C again: at once)")
            self.stop_all()
            return getattr(stop, "exit_code", 128 + signal.SIGINT)
        finally:
            for bar in bars:
                bar.close()
        return int(any(run.status not in ("complete", "pruned") for run in self.runs))

    def fill_slots(self) -> bool:
        """Start waiting runs in free slots; return whether any run is running."""
        for slot in (slot for slot in range(self.num_slots) if slot not in self.running):
            run = next((run for run in self.runs if run.status == "waiting"), None)
            if run is None and self.study is not None and (trial := self.study.ask()) is not None:
                run = self.add(trial[1], trial[0])
            if run is not None:
                self.running[slot] = run, self.start(run, slot)
        return bool(self.running)

    def start(self, run: Run, slot: int) -> subprocess.Popen[bytes]:
        """Start the run in a process of its own, which is killed when this one is."""
        run.status, parent, script = "running", os.getpid(), Path(__file__).parents[3] / "run.py"
        self.write()
        size = max(1, len(self.cores) // self.num_slots)  # threads of two runs on one core would wait for each other
        first = slot * size % max(1, len(self.cores))
        cores = self.cores[first : first + size]

        def prepare() -> None:
            die_with_parent(parent)
            if cores:
                os.sched_setaffinity(0, cores)

        tqdm.write(f"{run.name}: begins")
        with (self.folder / f"{run.name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(script), "--config", str(self.config_path), *self.list_words(run)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {RUNS_FOLDER: str(self.folder)},
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which asks its runs to stop
                preexec_fn=prepare,  # noqa: PLW1509 - no other thread of this process holds a lock
            )  # fmt: skip

    def describe(self, run: Run) -> str:
        """The run's step, time left and last metrics, from its log."""
        log = self.read_log(run)[-4000:]
        place, metrics = re.findall(r"(step \d+/\d+).* (\S+ left)", log), re.findall(r": validation (.*)", log)
        return ", ".join([f"{run.name}: {place[-1][0]}, {place[-1][1]}" if place else run.name, *metrics[-1:]])

    def prune(self, run: Run, process: subprocess.Popen[bytes]) -> None:
        """Tell optuna the metric so far, and end the run if it is not worth its time."""
        if self.study is not None and run.trial is not None and run.status == "running":
            lines = read_metrics(self.folder / run.name).get("validation", [])
            if self.study.is_hopeless(run.trial, {line["step"]: line[self.metric] for line in lines}):
                run.status = "pruned"
                process.terminate()

    def settle(self, run: Run, exit_code: int) -> None:
        """Note what became of a run."""
        summary = read_json(self.folder / run.name / "summary.json")
        best = summary.get("best") or {}
        run.value, run.step = best.get(self.metric), best.get("step")
        if exit_code == 0 and summary.get("status") == "complete":
            run.status = "complete"
        elif run.status != "pruned" and exit_code in STOPPED:
            run.status = "stopped"
        elif run.status != "pruned":
            lines = re.findall(r"^(?:error: |(?:\w+\.)*\w*(?:Error|Exception)\b).*", self.read_log(run), re.MULTILINE)
            end = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
            run.status, run.reason = "failed", lines[-1] if lines and exit_code > 0 else end
        if self.study is not None and run.trial is not None and run.status in ("complete", "pruned"):
            self.study.tell(run.trial, run.value, is_pruned=run.status == "pruned")
        result = run.reason or ("" if run.value is None else f"{self.metric} {run.value:.4g}")
        tqdm.write(f"{run.name}: {run.status} {result}".rstrip())

    def stop_all(self) -> None:
        """Ask all runs to stop, and wait; kill them at a second Ctrl-C."""
        try:
            for _, process in self.running.values():
                process.terminate()
            for run, process in self.running.values():
                self.settle(run, process.wait())
        except KeyboardInterrupt:
            for _, process in self.running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def read_log(self, run: Run) -> str:
        path = self.folder / f"{run.name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def write(self) -> list[dict[str, Any]]:
        """Write sweep.json, and return the means over runs that differ in their seed alone, best first."""
        means = mean_over_seeds([(run.settings, run.value) for run in self.runs], self.mode)
        runs = [*map(asdict, self.runs), *self.former]  # those that the file asks for no more keep their names
        write_json(self.folder / "sweep.json", {"metric": self.metric, "mode": self.mode, "runs": runs, "means": means})
        return means

    def print_table(self) -> None:
        """Print all runs, the best first, the means over seeds, and the command that evaluates the best run."""
        order = sorted(self.runs, key=lambda run: -(run.value or 0.0) if self.mode == "max" else run.value or 0.0)
        order.sort(key=lambda run: run.value is None)
        print(f"\n{self.metric:>12}  {'step':>8}  run")
        for run in order:
            value, step = (f"{run.value:.4g}", run.step) if run.value is not None else ("", "")
            print(f"{value:>12}  {step:>8}  {run.name}  {run.status}  {run.reason}".rstrip())
        if means := [entry for entry in self.write() if entry["num_runs"] > 1]:
            print(f"\n{'mean':>12}  {'std':>8}  {'runs':>4}  settings")
            for entry in means:
                settings = " ".join(f"{key}={value}" for key, value in entry["settings"].items())
                print(f"{entry['mean']:12.4g}  {entry['std']:8.2g}  {entry['num_runs']:4}  {settings}")
        if order[:1] and order[0].value is not None:
            best, path = order[0], self.folder / order[0].name / "config.yaml"
            print(f"\nThe best is {best.name}. To evaluate it, and to look at all:")
            print(f"  {RUNS_FOLDER}={self.folder} python run.py evaluate --config {path}")
            print(f"  python run.py report {self.sweep.name}")

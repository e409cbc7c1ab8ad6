"""Plans the rows of the benchmark, runs them in rounds, each run in fresh processes, and writes down what they left."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ...config import Config, available_files
from ...errors import ConfigError, StopRun
from ...files import run_directory, write_json, write_whole
from ...launching.devices import Devices, find_gpus, take_devices
from ...launching.environment import launcher_of
from ...launching.processes import die_with_parent, stop_signals_end
from ...training.run_files import run_lock
from .. import CommandLine
from .report import as_markdown, compare, summarize_runs

LIMIT_SECONDS = 3600.0
DESCRIBED = "python platform host libraries devices git_commit global_batch_size num_warm_up_steps".split()
# Nothing but training steps. In a warm-up no row learns: one that does not train at all would look like the others.
SETTINGS = """schedule.name=constant schedule.warmup_steps=0 schedule.min_learning_rate=0 launch.nodes=1
    launch.node_rank=0 launch.master_addr=127.0.0.1 launch.master_port=0 training.max_steps=null
    training.early_stopping_epochs=null training.check_replicas_every_steps=null evaluation.every_epochs=null
    evaluation.every_steps=null checkpoint.every_epochs=null checkpoint.every_steps=null checkpoint.resume=never
    logging.every_steps=1000000000 logging.tracker=none logging.progress_bar=false logging.profile_steps=null""".split()


@dataclass
class Row:
    """A way to train, and what became of it: its runs, or the reason why there are none."""

    name: str
    device_ids: list[str]
    strategy: str = "ddp"
    precision: str = "fp32"
    is_compiled: bool = False
    starter: tuple[str, ...] = ("python",)  # or torchrun and its options
    runs: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""

    @property
    def words(self) -> list[str]:
        """The settings that set it apart."""
        values = [",".join(self.device_ids), self.strategy, self.precision, str(self.is_compiled).lower()]
        keys = ("device_ids", "strategy", "training.precision", "training.compile")
        return [f"{key}={value}" for key, value in zip(keys, values, strict=True)]

    def command(self, typed: list[str]) -> str:
        """The command that trains this way. typed: the benchmark's own words, some of which are kept."""
        own = ["benchmark", "benchmark.steps", "benchmark.rounds", *(word.partition("=")[0] for word in self.words)]
        kept = [word for word in typed if word.partition("=")[0] not in own]
        return shlex.join([*self.starter, "run.py", *kept, *self.words])

    def find_difference(self, run: dict[str, Any]) -> str:
        """The difference between this row and what was measured; empty if there is none."""
        num_devices = len(self.device_ids)
        num_ranks = 1 if self.strategy == "data_parallel" else num_devices
        strategy = "base" if num_devices == 1 else self.strategy  # a single rank has nothing to share
        wanted = {"num_devices": num_devices, "world_sizes": [num_ranks] * num_ranks, "is_compiled": self.is_compiled}
        wanted |= {"strategies": [strategy] * num_ranks}
        return "; ".join(f"{key}: {run[key]}, not {value}" for key, value in wanted.items() if run[key] != value)


def plan_rows(device_ids: list[str]) -> list[Row]:
    """One device first, with which the others are compared, then every file of strategies/."""
    is_single = len(device_ids) == 1
    name, precision = "one device" if is_single else "ddp", "bf16" if "cpu" in device_ids else "auto"
    found = available_files("strategies", besides=("base", "common", "library_environment", "zero", "ddp"))
    rows = [
        Row("one device", device_ids[:1]),
        Row("ddp", device_ids),
        Row("ddp, torchrun", device_ids, starter=("torchrun", "--standalone", f"--nproc-per-node={len(device_ids)}")),
        Row(f"{name}, 16-bit", device_ids, precision=precision),
        Row(f"{name}, compile", device_ids, is_compiled=True),
        *(Row(strategy, device_ids, strategy) for strategy in sorted({"data_parallel", "fsdp", *found})),
    ]
    for row in (row for row in rows if is_single and not row.name.startswith("one device")):
        row.reason = "there is one GPU; the same id twice and launch.backend=gloo try it with two ranks"
    return rows


def run_benchmark(line: CommandLine) -> int:
    """The exit code. The results lie in runs/<name>/benchmark/."""
    config = line.load_config()
    if launcher_of(os.environ) is not None:
        raise ConfigError("benchmark: starts all processes itself. Type `python run.py benchmark`, without a launcher.")
    device_ids, _locks = _take_all_devices(config)
    rows, folder, exit_code = plan_rows(device_ids), run_directory(config.name).absolute() / "benchmark", 0
    script, options = Path(__file__).parents[3] / "run.py", vars(config)["benchmark"]
    words = [str(script), "benchmark", "measure", str(folder / "run"), "--config", str(line.config_path)]
    words += line.overrides + SETTINGS
    with run_lock(folder):
        try:
            with stop_signals_end():
                _run_rounds(rows, words, options.rounds, folder)
        except (KeyboardInterrupt, StopRun) as stop:
            exit_code = getattr(stop, "code", 128 + signal.SIGINT)
            for row in rows:
                row.reason = row.reason or ("" if row.runs else "interrupted before its turn")
        shutil.rmtree(folder / "run", ignore_errors=True)
        measured = [row for row in rows if row.runs]
        if not measured:
            print("\n".join(f"{row.name}: {row.reason}" for row in rows))
            return exit_code or 1
        summaries = compare([summarize_runs(row.name, row.command(sys.argv[1:]), row.runs) for row in measured])
        report = {
            **{"name": config.name, "steps": options.steps, "rounds": options.rounds, "rows": summaries},
            **{key: measured[0].runs[0][key] for key in DESCRIBED},
            "not_run": [{"name": row.name, "reason": row.reason} for row in rows if row.reason],
        }
        text = as_markdown(report)
        write_json(folder / "benchmark.json", report)
        write_whole(folder / "benchmark.md", lambda beside: beside.write_text(text, encoding="utf-8"))
        print(f"\n{text}", end="")
    return exit_code


def _take_all_devices(config: Config) -> tuple[list[str], Devices]:
    """All devices of this node that the config names, as device_ids has them, and their locks. One CPU becomes two."""
    devices = take_devices(config.device_ids, config.launch, os.environ)
    if "cpu" in devices.names:
        return ["cpu"] * max(2, len(devices.names)), devices
    visible = find_gpus(os.environ).visible
    return [str(visible[int(name.removeprefix("cuda:"))].index) for name in devices.names], devices


def _run_rounds(rows: list[Row], words: list[str], num_rounds: int, folder: Path) -> None:
    """Each row once a round, so that other work of the machine meets all alike. A row that fails is not tried again."""
    num_runs, num_done, began_at = num_rounds * sum(not row.reason for row in rows), 0, time.monotonic()
    for number in range(num_rounds):
        first = number * len(rows) // num_rounds  # each round has another order, which favours none
        for row in (row for row in rows[first:] + rows[:first] if not row.reason):
            print(f"benchmark {num_done + 1}/{num_runs}: {row.name} …", end=" ", flush=True)
            row_began_at = time.monotonic()
            _run_once(row, words, folder)
            num_done, now = num_done + 1, time.monotonic()
            num_runs -= (num_rounds - 1 - number) * bool(row.reason)
            left = timedelta(seconds=round((now - began_at) / num_done * (num_runs - num_done)))
            print(f"{now - row_began_at:.1f} s, {left} left", flush=True)


def _run_once(row: Row, words: list[str], folder: Path) -> None:
    """Add a run to row.runs, or set row.reason and keep what the run printed."""
    directory, log, started_at = folder / "run", folder / f"{re.sub('[, ]+', '-', row.name)}.log", time.time()
    shutil.rmtree(directory, ignore_errors=True)
    starter = ["-m", "torch.distributed.run", *row.starter[1:]] if row.starter[0] == "torchrun" else []
    command = [sys.executable, *starter, *words, *row.words]
    die = partial(die_with_parent, os.getpid())
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, preexec_fn=die)  # noqa: PLW1509
        try:
            process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            output.write(f"error: no end within {LIMIT_SECONDS:g} s. Lower benchmark.steps.\n".encode())
        finally:
            process.terminate()  # torchrun ends its ranks then, which are not of this group
            with suppress(subprocess.TimeoutExpired, StopRun):
                process.wait(10.0)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a fork server would share the cores with the next row's start
            process.wait()
    if process.returncode == 0:
        run: dict[str, Any] = {}
        for name in ("environment", "summary", "measured"):
            run |= json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
        run["startup_seconds"] = run.pop("first_step_at") - started_at
        row.reason = row.find_difference(run)
        row.runs += [] if row.reason else [run]
    else:
        row.reason = find_reason(log.read_text(encoding="utf-8", errors="replace")) or f"exit code {process.returncode}"
    row.reason += f" ({log.name})" if row.reason else ""


def find_reason(output: str) -> str:
    """The line of a failed run's output that says why: `error: …`, a traceback's last line, or the last one."""
    found = re.search(r"^error: (.*)|^(?:\w+\.)*\w*(?:Error|Exception)\b.*", output, re.MULTILINE)  # torchrun's follow
    return (found[1] or found[0]) if found else next(iter(output.split("\n")[-2:-1]), "")

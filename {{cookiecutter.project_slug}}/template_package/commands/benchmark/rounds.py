"""Plans the rows of the benchmark, runs them in rounds, each run in fresh processes, and makes a table of them."""

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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ...config import available_files
from ...errors import StopRun
from ...files import run_directory, write_json, write_whole
from ...launching.devices import find_gpus, take_devices
from ...launching.processes import die_with_parent, stop_signals_end
from ...training.run_files import run_lock
from .. import CommandLine

DESCRIBED = "python platform host libraries devices git_commit global_batch_size num_warm_up_steps".split()
# Nothing but training steps. In a warm-up no row learns: one that does not train at all would look like the others.
SETTINGS = """schedule.name=constant schedule.warmup_steps=0 schedule.min_learning_rate=0 launch.nodes=1
    launch.node_rank=0 launch.master_addr=127.0.0.1 launch.master_port=0 training.max_steps=null
    training.early_stopping_epochs=null training.check_replicas_every_steps=null evaluation.every_epochs=null
    evaluation.every_steps=null checkpoint.every_epochs=null checkpoint.every_steps=null checkpoint.resume=never
    logging.every_steps=1000000000 logging.tracker=none logging.progress_bar=false logging.profile_steps=null""".split()

TOLERANCE = 0.02  # of losses, relative: rounding and other random numbers make less
COLUMNS = {  # heading: the key in a row's summary, and how its value is shown
    "row": ("name", "{}"),
    "s/step": ("seconds_per_step", "{:.4g}"),
    "spread": ("spread", "{:.0%}"),
    "samples/s": ("samples_per_second", "{:.0f}"),
    "speed-up": ("speed_up", "{:.2f}x"),
    "start-up s": ("startup_seconds", "{:.1f}"),
    "MiB/rank": ("peak_memory_mib", "{:.0f}"),
    "waiting": ("waiting_share", "{:.0%}"),
    "loss": ("shown_loss", "{}"),
}
LEGEND = """Medians of {rounds} runs; {steps} steps of {global_batch_size} samples, after {num_warm_up_steps} others.
spread: slowest - fastest run. start-up: from the command to the end of the first step. MiB/rank: of the largest rank.
waiting: for data. loss: mean of the last steps; (!): the row learned less than half as much as one device."""


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
    devices = take_devices(config.device_ids, config.launch, os.environ)  # it holds their locks
    visible = find_gpus(os.environ).visible
    device_ids = [name if name == "cpu" else str(visible[int(name[5:])].index) for name in devices.names]
    rows = plan_rows(["cpu", "cpu"] if device_ids == ["cpu"] else device_ids)
    folder, exit_code = run_directory(config.name).absolute() / "benchmark", 0
    script, options = Path(__file__).parents[3] / "run.py", vars(config)["benchmark"]
    words = [str(script), "benchmark", "measure", str(folder / "run"), "--config", str(line.config_path)]
    words += line.overrides + SETTINGS
    with run_lock(folder):
        try:
            with stop_signals_end():
                _run_rounds(rows, words, options.rounds, folder)
        except StopRun as stop:
            exit_code = stop.code
            for row in (row for row in rows if not row.runs and not row.reason):
                row.reason = "interrupted before its turn"
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


def _run_rounds(rows: list[Row], words: list[str], num_rounds: int, folder: Path) -> None:
    """Each row once a round, so that other work of the machine meets all alike. A row that fails is not tried again."""
    num_done = 0
    for number in range(num_rounds):
        first = number * len(rows) // num_rounds  # each round has another order, which favours none
        for row in (row for row in rows[first:] + rows[:first] if not row.reason):
            num_done += 1
            print(f"benchmark {num_done} (round {number + 1} of {num_rounds}): {row.name}", flush=True)
            _run_once(row, words, folder)


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
            process.wait()
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
        row.runs.append(run)
    else:
        reason = find_reason(log.read_text(encoding="utf-8", errors="replace")) or f"exit code {process.returncode}"
        row.reason = f"{reason} ({log.name})"


def find_reason(output: str) -> str:
    """The line of a failed run's output that says why: `error: …`, a traceback's last line, or the last one."""
    found = re.search(r"^error: (.*)|^(?:\w+\.)*\w*(?:Error|Exception)\b.*", output, re.MULTILINE)  # torchrun's follow
    return (found[1] or found[0]) if found else next(iter(output.split("\n")[-2:-1]), "")


def summarize_runs(name: str, command: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a row's runs, and the runs."""
    times = [run["seconds_per_step"] for run in runs]
    keys = ("seconds_per_step", "samples_per_second", "startup_seconds", "first_loss", "final_loss")
    medians = {key: median(run[key] for run in runs) for key in keys}
    return {
        **{"name": name, "command": command, **medians, "shown_loss": f"{medians['final_loss']:.4g}"},
        "spread": (max(times) - min(times)) / median(times) if len(times) > 1 else None,
        "waiting_share": median(max(run["waiting_shares"]) for run in runs),
        "peak_memory_mib": median(max(run["peak_memory_mib"]) for run in runs),
        "runs": runs,
    }


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `speed_up` over one device, and `is_loss_wrong`: it learned less than half as much, or is NaN."""
    if rows and rows[0]["name"] == "one device":
        base = rows[0]
        # Dropout draws other numbers on other ranks, which alone makes a fifth in the steep beginning of a training.
        gain = max(0.0, base["first_loss"] - base["final_loss"])
        limit = base["final_loss"] + gain / 2 + TOLERANCE * abs(base["final_loss"])
        for row in rows:
            row["speed_up"] = base["seconds_per_step"] / row["seconds_per_step"]
            row["is_loss_wrong"] = not row["final_loss"] <= limit
            row["shown_loss"] += " (!)" * row["is_loss_wrong"]
    return rows


def as_markdown(report: dict[str, Any]) -> str:
    """The table, the rows that did not run, and as the last line the fastest row with its command."""
    cells = [list(COLUMNS)]
    for row in report["rows"]:
        cells.append(["" if row.get(key) is None else form.format(row[key]) for key, form in COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * (width - 1) + ":" for width in widths])
    table = ["| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in cells]
    not_run = [f"- {row['name']}: {row['reason']}" for row in report["not_run"]]
    machine = [*report["devices"], report["platform"], f"torch {report['libraries']['torch']}"]
    fastest = "No row has a loss to trust."
    if sound := [row for row in report["rows"] if not row.get("is_loss_wrong")]:
        row = min(sound, key=lambda row: row["seconds_per_step"])
        speed_up = f" ({row['speed_up']:.2f} times the speed of one device)" if "speed_up" in row else ""
        fastest = f"The fastest row is {row['name']}{speed_up}: {row['command']}"
    lines = [f"# Benchmark of {report['name']}", "", "; ".join(machine), "", *table, "", LEGEND.format(**report), ""]
    return "\n".join([*lines, *(["Not run:", "", *not_run, ""] if not_run else []), fastest, ""])

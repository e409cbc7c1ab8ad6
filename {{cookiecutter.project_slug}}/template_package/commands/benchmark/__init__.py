"""`python run.py benchmark`: measures how fast each strategy trains, and what 16-bit precision or torch.compile adds.

It starts ordinary training runs of a few steps, and reads its figures from the files that these runs write.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from ...core.checkpoint import run_lock
from ...core.launch import choose_devices, find_gpus
from ...core.settings import CommandLine
from ...errors import StopRun
from ...files import run_directory, write_json
from ...optional_files import available_files
from ..common import find_reason, start_run, stops_raised
from ..report import read_json, read_metrics

# Only training steps, and a checkpoint at the end. The learning rate is constant: in a warm-up no row learns, and a row
# that does not train at all would look like the others.
SETTINGS = """name=run schedule.name=constant schedule.warmup_steps=0 schedule.min_learning_rate=0 launch.nodes=1
    launch.node_rank=0 launch.master_addr=127.0.0.1 launch.master_port=0 training.epochs=null
    training.early_stopping_epochs=null training.check_replicas_every_steps=null evaluation.every_epochs=null
    evaluation.every_steps=null checkpoint.every_epochs=null checkpoint.every_steps=1000000000 checkpoint.resume=never
    logging.tracker=none logging.report=false logging.progress_bar=false logging.profile_steps=null
    checkpoint.sharded=false""".split()
NUM_WARM_UP_STEPS = 10

TOLERANCE = 0.02  # of losses, relative: more than rounding and other random numbers cause
MEDIANS = "seconds_per_step samples_per_second startup_seconds waiting_share peak_memory_mib first_loss final_loss"
TABLE = """
|                 row |   s/step | spread | samples/s | speed-up | start-up s | MiB/rank | waiting |          loss |
| ------------------: | -------: | -----: | --------: | -------: | ---------: | -------: | ------: | ------------: |"""
ROW = (
    "| {name:>19} | {seconds_per_step:8.4g} | {spread:6.0%} | {samples_per_second:9.0f} | {speed_up:7.2f}x |"
    " {startup_seconds:10.1f} | {peak_memory_mib:8.0f} | {waiting_share:7.0%} | {final_loss:9.4g}{mark:>4} |"
)
LEGEND = """
Medians of {rounds} runs; {steps} steps of {global_batch_size} samples, after {num_warm_up_steps} others.
spread: slowest - fastest run. start-up: to the end of the first step. MiB/rank: of the largest rank. waiting: for data
and for the start of the workers that read it. loss: mean of the last lines in metrics.jsonl; (!): the row learned less
than half as much as the first.
"""


@dataclass
class Row:
    """A table row for one training setup. `runs` holds the measurements of its runs. `reason` says why a run failed."""

    name: str
    arguments: list[str]  # key=value
    runs: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""


def plan_rows(device_ids: list[str]) -> list[Row]:
    """Return a row for each way to train on these devices. The first row, with one device, is meant as the baseline."""
    is_single, precision = len(device_ids) == 1, "bf16" if "cpu" in device_ids else "auto"
    name, ids = "one device" if is_single else "ddp", ",".join(device_ids)
    plain = {
        "device_ids": ids,
        "strategy": "ddp",
        "training.precision": "fp32",
        "training.compile": "false",
    }
    found = available_files("strategies")
    ways = {
        "one device": {"device_ids": device_ids[0]},
        "ddp": {},
        f"{name}, 16-bit": {"training.precision": precision},
        f"{name}, compile": {"training.compile": "true"},
        **{
            strategy: {"strategy": strategy}
            for strategy in sorted({"data_parallel", "fsdp", *found} - {"ddp"})
        },
    }
    rows = [
        Row(name, [f"{key}={value}" for key, value in (plain | own).items()])
        for name, own in ways.items()
    ]
    return [row for row in rows if row.name.startswith("one device") or not is_single]


def main(line: CommandLine) -> int:
    """Print the benchmark table. Return 1 if every row failed, 130 on Ctrl-C, 143 on SIGTERM, and otherwise 0."""
    config = line.load_config()
    devices = choose_devices(line)  # keeps the GPUs locked
    device_ids = devices.names
    if devices.visible:
        index_of = {gpu.uuid: gpu.index for gpu in find_gpus(os.environ)}
        visible = enumerate(devices.visible.split(","))  # without NVML, torch's numbers are the ids
        index_of_name = {f"cuda:{i}": index_of.get(entry, i) for i, entry in visible}
        device_ids = [str(index_of_name[name]) for name in devices.names]
    rows = plan_rows(["cpu", "cpu"] if device_ids == ["cpu"] else device_ids)
    folder, exit_code = run_directory(config.name).absolute() / "benchmark", 0
    options = config.benchmark
    arguments = [f"--config={path}" for path in line.config_paths]
    arguments += [*line.words, *SETTINGS]
    arguments += [f"training.max_steps={NUM_WARM_UP_STEPS + options.steps}"]
    arguments += [f"logging.every_steps={max(1, options.steps // 10)}"]
    with run_lock(folder):
        try:
            with stops_raised():
                _run_rounds(rows, arguments, options.rounds, folder)
        except StopRun as stop:
            exit_code = stop.code
        shutil.rmtree(folder / "run", ignore_errors=True)
        report: dict[str, Any] = {
            "name": config.name,
            "steps": options.steps,
            "rounds": options.rounds,
        }
        report["rows"] = summarize(
            rows, [text for text in sys.argv[1:] if not text.startswith("benchmark")]
        )
        idle = [row for row in rows if row.reason or not row.runs]
        report["not_run"] = [
            {"name": row.name, "reason": row.reason or "interrupted before its turn"}
            for row in idle
        ]
        write_json(folder / "benchmark.json", report)
        print(f"\n{as_markdown(report)}", end="")
    return exit_code or int(not report["rows"])


def _run_rounds(rows: list[Row], arguments: list[str], num_rounds: int, folder: Path) -> None:
    """Benchmark each row's settings once per round, so a slow spell affects all rows alike. Skip rows that failed."""
    for number in range(num_rounds):
        first = number * len(rows) // num_rounds  # each round has another order, which favours none
        for row in (row for row in rows[first:] + rows[:first] if not row.reason):
            print(f"round {number + 1} of {num_rounds}: {row.name}", flush=True)
            _run_once(row, arguments, folder)


def _run_once(row: Row, arguments: list[str], folder: Path) -> None:
    """Train once and add the measurements to row.runs. On failure, set row.reason to the cause and the log's name."""
    directory, log = folder / "run", folder / f"{re.sub('[, ]+', '-', row.name)}.log"
    shutil.rmtree(directory, ignore_errors=True)
    with start_run([*arguments, *row.arguments], folder, log) as process:
        try:
            process.wait()
        finally:
            with suppress(ProcessLookupError):
                # a fork server would share the cores with the next row's start
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        row.runs.append(read_run(directory))
    else:
        row.reason = f"{find_reason(log, process.returncode)} ({log.name})"


def read_run(directory: Path) -> dict[str, Any]:
    """Return a finished run's measurements. Speed is the median over the lines of metrics.jsonl after the warm-up."""
    run, lines = read_json(directory / "environment.json"), read_metrics(directory)["train"]
    run |= read_json(directory / "summary.json")
    speed = median(line["samples_per_second"] for line in lines if line["step"] > NUM_WARM_UP_STEPS)
    run |= {"samples_per_second": speed, "seconds_per_step": run["global_batch_size"] / speed}
    run["waiting_share"] = run["seconds_waiting_for_data"] / run["train_seconds"]
    losses = [line["loss"] for line in lines]
    run |= {"first_loss": mean(losses[:3]), "final_loss": mean(losses[-3:])}
    return run | {"peak_memory_mib": max(run["peak_memory_mib"])}


def summarize(rows: list[Row], typed: list[str]) -> list[dict[str, Any]]:
    """Return the results of each row (a training setup) that has finished runs.

    Each result holds the row's command, its median measurements, and its speed-up over the first such row.
    `is_loss_wrong` is true if the loss is NaN, or if it fell less than about half as far as in that first row.
    `typed` holds the arguments that the user typed.
    """
    summaries: list[dict[str, Any]] = []
    for row in (row for row in rows if row.runs):
        entry: dict[str, Any] = {
            key: median(run[key] for run in row.runs) for key in MEDIANS.split()
        }
        summaries.append(entry)
        base, times = summaries[0], [run["seconds_per_step"] for run in row.runs]
        # Dropout depends on the number of ranks. Early in a training this alone can change the loss by a fifth.
        gain = max(0.0, base["first_loss"] - base["final_loss"])
        limit = base["final_loss"] + gain / 2 + TOLERANCE * abs(base["final_loss"])
        keys = {argument.partition("=")[0] for argument in row.arguments}
        others = [argument for argument in typed if argument.partition("=")[0] not in keys]
        entry |= {
            "name": row.name,
            "command": shlex.join(["python", "run.py", *others, *row.arguments]),
        }
        entry |= {"spread": (max(times) - min(times)) / median(times), "runs": row.runs}
        entry |= {"speed_up": base["seconds_per_step"] / entry["seconds_per_step"]}
        entry |= {"is_loss_wrong": not entry["final_loss"] <= limit}
    return summaries


def as_markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown: the table, why any rows are missing, and the command for the fastest setup."""
    rows, lines = report["rows"], [f"# Benchmark of {report['name']}", ""]
    if rows:
        run = rows[0]["runs"][0]
        lines += [
            "; ".join([*run["devices"], run["platform"], f"torch {run['libraries']['torch']}"]),
            TABLE,
        ]
        lines += [ROW.format(**row, mark="(!)" * row["is_loss_wrong"]) for row in rows]
        lines += [LEGEND.format(**(run | report), num_warm_up_steps=NUM_WARM_UP_STEPS)]
    if report["not_run"]:
        lines += [
            "Not run:",
            "",
            *(f"- {row['name']}: {row['reason']}" for row in report["not_run"]),
            "",
        ]
    if sound := [row for row in rows if not row["is_loss_wrong"]]:
        row = min(sound, key=lambda row: row["seconds_per_step"])
        speed_up = f"{row['speed_up']:.2f} times the speed of {rows[0]['name']}"
        lines += [f"The fastest row is {row['name']} ({speed_up}): {row['command']}", ""]
    return "\n".join(lines)

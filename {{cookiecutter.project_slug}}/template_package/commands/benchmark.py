"""`python run.py benchmark`: your model and your data under each way to train that this machine allows, compared.

The table, benchmark.json, benchmark.md and a chart go to runs/<name>/benchmark/.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ..benchmarking.chart import draw
from ..benchmarking.plan import base_config, plan, take_all_devices
from ..benchmarking.report import advise, as_markdown, legend, not_run, summarize, table
from ..benchmarking.running import Outcome, run_rounds
from ..config import Config, to_dict
from ..launching.starting import num_usable_cores
from ..training.report import align
from ..training.run_files import claimed, run_directory, write_json
from ..validation import one_line


def main(config: Config, asked: Sequence[str]) -> int:
    """0; 1 if no row ran; 130 after Ctrl-C and 143 after SIGTERM, with what was measured till then."""
    device_ids, _locks = take_all_devices(config)
    folder, load = run_directory(config) / "benchmark", os.getloadavg()[0]
    folder.mkdir(parents=True, exist_ok=True)
    with claimed(folder):
        for former in folder.glob("*.log"):
            former.unlink()
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(to_dict(base_config(config)), allow_unicode=True), encoding="utf-8")
        wanted = config.logging.progress_bar
        has_bar = sys.stderr.isatty() if wanted == "auto" else bool(wanted)
        rows = plan(device_ids, asked, is_compiled=config.training.compile)
        outcomes, signal_number = run_rounds(rows, config.benchmark.rounds, path, folder, has_bar)
        if any(outcome.runs for outcome in outcomes):
            _publish(make_report(outcomes, device_ids, config, load), folder)
        else:
            print("\n".join(f"{outcome.row.name}: {outcome.reason}" for outcome in outcomes))
    if signal_number:
        return 128 + signal_number
    return int(not any(outcome.runs for outcome in outcomes))


def make_report(outcomes: Sequence[Outcome], device_ids: list[str], config: Config, load: float) -> dict[str, Any]:
    """What benchmark.json holds. load: the system's, before."""
    rows = summarize(outcomes)
    run = next(run for outcome in reversed(outcomes) for run in outcome.runs)
    environment = run["environment"] | {"load": load, "num_cores": num_usable_cores(), "cpu": find_cpu()}
    described = ("python", "platform", "libraries", "cuda", "git_commit", "num_cores", "cpu", "load")
    advised, advice = advise(rows, device_ids, config.loader.num_workers)
    return {
        "name": config.name,
        "command": f"python run.py {shlex.join(sys.argv[1:])}",
        "devices": describe_devices(device_ids, environment["devices"][0].partition(": ")[2]),
        "device_ids": device_ids,
        "machine": {key: environment[key] for key in described},
        "global_batch_size": config.training.global_batch_size,
        "steps": config.benchmark.steps,
        "num_warm_up_steps": run["num_warm_up_steps"],
        "rounds": config.benchmark.rounds,
        "rows": rows,
        "not_run": [
            {"name": outcome.row.name, "reason": outcome.reason, "log": outcome.log and str(outcome.log)}
            for outcome in outcomes
            if outcome.reason
        ],
        "advised": advised,
        "advice": advice,
    }


def find_cpu() -> str:
    """The name of the processor's model."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name\s*: (.+)", text, re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def describe_devices(device_ids: list[str], kind: str) -> str:
    """`2 CPU ranks (x86_64)`, `2 GPUs (0, 2: NVIDIA A100)`, `2 ranks on 1 GPU (0, 0: NVIDIA A100)`"""
    num_ranks, num_gpus = len(device_ids), len(set(device_ids))
    if "cpu" in device_ids:
        return f"{num_ranks} CPU ranks ({kind})"
    words = f"{num_gpus} GPU{'s' * (num_gpus > 1)} ({', '.join(device_ids)}: {kind})"
    return words if num_gpus == num_ranks else f"{num_ranks} ranks on {words}"


def _publish(report: dict[str, Any], folder: Path) -> None:
    """Write the files and print the table."""
    write_json(folder / "benchmark.json", report)
    chart = folder / "benchmark.png"
    try:
        draw(report, chart)
        files = "benchmark.md, .json and .png"
    except ImportError:
        chart.unlink(missing_ok=True)
        files = "benchmark.md and .json; for the chart: pip install -c constraints.txt -e '.[plot]'"
    except Exception as error:  # as in training/report.py: what was measured is not lost for its picture
        chart.unlink(missing_ok=True)
        files = f"benchmark.md and .json; there is no picture: {type(error).__name__}: {one_line(error)}"
    text = as_markdown(report, chart.name if chart.exists() else None)
    (folder / "benchmark.md").write_text(text, encoding="utf-8")
    rows, explained = "\n".join(align(table(report["rows"]))), textwrap.fill(legend(report), width=120)
    words = [rows, explained, *not_run(report), f"{folder}: {files}", report["advice"]]
    print("\n" + "\n\n".join(words))

"""A long run with evaluation, saving and a tracker takes no more memory, files and threads at its end than early on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import Report

MEBIBYTE = 2**20
GROWTH_MIB = 24
"""Allocators keep some blocks; a leak of one batch of numbers a step would be ten times this."""


@pytest.mark.timeout(3600)
def test_long_run_stays_flat(make_project: Callable[[Path | None], Any], is_long: bool, report: Report) -> None:
    project, num_steps = make_project(None), 20_000 if is_long else 4_000
    words = [
        "device_ids=cpu,cpu", f"training.max_steps={num_steps}", "training.epochs=100000", "logging.every_steps=50",
        "logging.tracker=tensorboard", "evaluation.every_epochs=null", "evaluation.every_steps=200",
        "checkpoint.every_epochs=null", "checkpoint.every_steps=200", "checkpoint.keep_last=3",
    ]  # fmt: skip
    process = project.start(*words)
    outputs: list[str] = []
    reading = threading.Thread(target=lambda: outputs.extend(process.communicate()))  # a pipe holds 64 KiB
    reading.start()
    metrics = project.directory("run") / "metrics.jsonl"
    samples: list[tuple[int, float, int, int]] = []
    while process.poll() is None:
        time.sleep(0.1)
        step = max((line["step"] for line in project.lines("run")), default=0) if metrics.exists() else 0
        is_ending = step > num_steps - 500  # files and threads are about to be closed
        if step >= (samples[-1][0] if samples else 0) + 1_000 and not is_ending:
            try:
                samples.append((step, *measure(process.pid)))
            except psutil.Error:  # it has just ended
                break
    reading.join(timeout=60)
    assert process.returncode == 0, "".join(outputs)[-5000:]
    assert len(samples) >= num_steps // 1_000 - 2
    rows = [f"| {step} | {memory:.0f} | {files} | {threads} |" for step, memory, files, threads in samples]
    first, last = samples[0], samples[-1]
    report(
        f"{num_steps} steps: memory, open files, threads",
        1,
        int(last[1] - first[1] < GROWTH_MIB and last[2:] == first[2:]),
        f"## {num_steps} steps on two ranks\n\nOf all processes of the run:\n\n"
        "| step | memory MiB | open files | threads |\n|---:|---:|---:|---:|\n" + "\n".join(rows),
    )
    assert last[1] - first[1] < GROWTH_MIB
    assert last[2:] == first[2:], "open files and threads"


def measure(pid: int) -> tuple[float, int, int]:
    """Memory in MiB, open files and threads of a process and all that it has started."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    memory = sum(process.memory_full_info().uss for process in processes) / MEBIBYTE
    return memory, sum(process.num_fds() for process in processes), sum(process.num_threads() for process in processes)

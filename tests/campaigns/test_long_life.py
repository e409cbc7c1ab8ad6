"""Test that a long run with evaluations, checkpoints and a tracker does not gain memory, open files or threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import Report, Tries

GROWTH_MIB = 20
"""Allowed growth of memory after the first 1,000 steps, from about 630 MiB. Allocators keep some blocks, most of them
early. A leak of 1 KiB per step would add 19 MiB in each rank."""
LATE_GROWTH_MIB = 4
"""Allowed growth in the second half of the run. A leak of one batch per step (16 samples of 9 numbers of 4 bytes) would
add 6 MiB in 10,000 steps, and four times that with the overhead of Python and torch for each tensor."""
SHORT_GROWTH_MIB = 12
"""Allowed growth in the second half of a run of only 4,000 steps, when allocators still add some early blocks."""

EVERY_STEPS = 1_000
WAITS = f"""
def after_step(model, step, log):
    from pathlib import Path
    if log.folder is not None and step % {EVERY_STEPS} == 100:  # rank 0; no evaluation, which has workers of its own
        pause = Path("pause")
        pause.touch()
        while pause.exists():
            time.sleep(0.01)
"""
"""Code that makes the run wait to be measured: at a thousand steps a second, the run would end too early."""

MORE_FILES = 8
"""Allowed growth of open files. Each tensor of a batch on its way from a worker is an open file. A leak of one file per
evaluation would add 15 in 3,000 steps."""


@pytest.mark.timeout(3600)
def test_long_run_stays_flat(
    make_project: Callable[[Path | None], Any], is_long: bool, report: Report
) -> None:
    project, num_steps = make_project(None), 20_000 if is_long else 4_000
    words = [
        "device_ids=cpu,cpu", f"training.max_steps={num_steps}", "training.epochs=100000", "logging.every_steps=50",
        "logging.tracker=tensorboard", "evaluation.every_epochs=null", "evaluation.every_steps=200",
        "checkpoint.every_epochs=null", "checkpoint.every_steps=200", "checkpoint.keep_last=3", "loader.num_workers=1",
    ]  # fmt: skip
    project.append("model.py", WAITS)
    process = project.start(*words)
    outputs: list[str] = []
    # a pipe holds 64 KiB
    reading = threading.Thread(target=lambda: outputs.extend(process.communicate()))
    reading.start()
    samples: list[tuple[int, float, int, int]] = []
    pause = project.folder / "pause"
    while process.poll() is None:
        time.sleep(0.1)
        if pause.exists():
            samples.append((EVERY_STEPS * len(samples) + 100, *measure(process.pid)))
            pause.unlink()
    reading.join(timeout=60)
    assert process.returncode == 0, "".join(outputs)[-5000:]
    assert len(samples) == num_steps // EVERY_STEPS
    first, last = samples[1], samples[-1]  # the allocators' first blocks come in the first steps
    middle = next(sample for sample in samples if sample[0] >= num_steps // 2)
    growth, late_growth, tries = last[1] - first[1], last[1] - middle[1], Tries()
    with tries.one(
        f"{growth:.1f} and {late_growth:.1f} MiB more; open files and threads {first[2:]}, then {last[2:]}"
    ):
        assert growth < GROWTH_MIB
        assert late_growth < (LATE_GROWTH_MIB if is_long else SHORT_GROWTH_MIB)
        assert last[2] - first[2] <= MORE_FILES
        assert last[3] == first[3]
        assert list(project.directory("run").glob("tensorboard/events.out.tfevents.*"))
        assert project.json("run", "summary.json")["status"] == "complete"
    rows = [
        f"| {step} | {memory:.0f} | {files} | {threads} |"
        for step, memory, files, threads in samples
    ]
    report(
        f"{num_steps} steps: memory, open files, threads",
        tries,
        f"## {num_steps} steps on two ranks\n\nOf all processes of the run, each rank's loader worker among them; "
        f"evaluations, 200 steps apart, start others and end them. Allowed: {GROWTH_MIB} MiB more after the first "
        f"1,000 steps, {LATE_GROWTH_MIB} of them in the second half; {MORE_FILES} open files more; no thread more.\n\n"
        "| step | memory MiB | open files | threads |\n|---:|---:|---:|---:|\n" + "\n".join(rows),
    )


def measure(pid: int) -> tuple[float, int, int]:
    """Return memory in MiB, open files and threads of a process and all processes that it has started.

    Memory that several of them share counts once. Mapped files of libraries, which other programs may map too, do not
    count.
    """
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    try:
        texts = [
            Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
            for process in processes
        ]
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    memory = (
        sum(
            int(kib)
            for text in texts
            for kib in re.findall(r"^Pss_(?:Anon|Shmem): *(\d+)", text, re.M)
        )
        / 1024
    )
    return (
        memory,
        sum(process.num_fds() for process in processes),
        sum(process.num_threads() for process in processes),
    )

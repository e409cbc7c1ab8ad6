"""SIGKILL at any moment: the same command goes on, and in the end nothing tells the run from an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

PHASES = {"": "start-up", "s": "step", "e": "evaluation", "w": "save"}
WORKLOAD = Path(__file__).parent / "workload"
WORDS = (
    "device_ids=cpu,cpu", "training.epochs=6", "training.global_batch_size=8", "checkpoint.every_steps=2",
    "loader.num_workers=1", "launch.timeout_minutes=1",
)  # fmt: skip
END_SECONDS = 10.0


@pytest.mark.timeout(3600)
def test_killed_at_any_moment_the_run_ends_as_an_undisturbed_one(
    make_project: Callable[[Path], Any], is_long: bool, report: Callable[[str], None]
) -> None:
    project, choose = make_project(WORKLOAD), random.Random(11)
    project.run(*WORDS, "name=undisturbed")
    num_runs, kills_per_run = (10, 6) if is_long else (1, 4)
    hits: Counter[str] = Counter()
    wanted = [*PHASES] * -(-num_runs * kills_per_run // len(PHASES))
    seconds = []
    for number in range(num_runs):
        name = f"killed{number}"
        for phase in wanted[number * kills_per_run : (number + 1) * kills_per_run]:
            hit, ended_after = kill_in(project, name, phase, choose)
            hits[PHASES[hit]] += 1
            seconds.append(ended_after)
        project.run(*WORDS, f"name={name}")
        assert_same(project, name)
    lines = [f"- {phase}: {hits[phase]}" for phase in PHASES.values()]
    report(
        f"# {sum(hits.values())} kills in {num_runs} runs\n\n"
        "SIGKILL to one process or to the whole group; phase of rank 0 at the kill:\n\n" + "\n".join(lines) + "\n\n"
        f"All processes had ended within {max(seconds):.1f} s of the kill. After the same command has run to its end, "
        "metrics.jsonl (but for samples_per_second), weights, optimizer and random states equal those of an "
        "undisturbed run to the bit; no temporary file was left."
    )
    if is_long:
        assert min(hits[phase] for phase in PHASES.values()) >= 5


def kill_in(project: Any, name: str, wanted: str, choose: random.Random) -> tuple[str, float]:
    """Start the run and kill it in a phase. Returns the phase that was hit, and the seconds to the end of all."""
    marker = project.folder / "phase"
    marker.unlink(missing_ok=True)
    process = project.start(*WORDS, f"name={name}")
    if wanted == "":
        time.sleep(choose.uniform(0.05, 2.0))
    else:
        for _ in range(choose.randint(1, 4)):  # not always the first time
            wait_for(process, marker, lambda letter: letter == wanted)
            wait_for(process, marker, lambda letter: letter != wanted)
        wait_for(process, marker, lambda letter: letter == wanted)
        time.sleep(choose.uniform(0.0, 0.01))
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    hit = read(marker)
    killed_at = time.monotonic()
    if choose.random() < 0.5:
        os.kill(choose.choice(family), signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    while living(family):
        assert time.monotonic() - killed_at < END_SECONDS, f"still there: {living(family)}\n{output}\n{errors}"
        time.sleep(0.05)
    return hit, time.monotonic() - killed_at


def living(family: list[int]) -> list[int]:
    found = []
    for pid in family:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.Error:
            continue
    return found


def read(marker: Path) -> str:
    return marker.read_text(encoding="utf-8") if marker.exists() else ""


def wait_for(process: subprocess.Popen[str], marker: Path, is_met: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_met(read(marker)) and process.poll() is None:  # a run that has ended is killed no more
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def assert_same(project: Any, name: str) -> None:
    for split in ("train", "validation"):
        assert project.lines(name, split) == project.lines("undisturbed", split), split
    last = max(line["step"] for line in project.lines("undisturbed"))
    for file in (f"step_{last:08d}.pt", "best.pt"):
        paths = [project.directory(run) / "checkpoints" / file for run in (name, "undisturbed")]
        first, second = (torch.load(path, weights_only=True) for path in paths)
        for key in ("model", "optimizer", "random_states", "best", "early_stopping", "step", "position"):
            assert_equal(first[key], second[key], f"{file}: {key}")
    assert not list(project.directory(name).rglob(".*.tmp"))


def assert_equal(first: Any, second: Any, place: str) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), place
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), place
        for key in first:
            assert_equal(first[key], second[key], f"{place}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), place
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal(one, other, f"{place}[{index}]")
    else:
        assert first == second, place

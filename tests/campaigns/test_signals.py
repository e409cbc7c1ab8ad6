"""Killed or asked to stop at any moment: the same command goes on, and in the end nothing tells the run from an
undisturbed one.
"""

from __future__ import annotations

import inspect
import os
import random
import re
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

from .conftest import Report

PHASES = {"": "start-up", "s": "step", "e": "evaluation", "w": "save"}
WORKLOAD = Path(__file__).parent / "workload"
WORDS = (
    "device_ids=cpu,cpu", "training.epochs=16", "training.global_batch_size=8", "checkpoint.every_steps=2",
    "loader.num_workers=1", "launch.timeout_minutes=1",
)  # fmt: skip
END_SECONDS = 10.0
ENDED = "ended before"
Disturb = Callable[[Any, subprocess.Popen[str], list[int], random.Random], int]


def kill(_: Any, process: subprocess.Popen[str], family: list[int], choose: random.Random) -> int:
    """SIGKILL to one process or to the whole group; any exit code will do. What may stay in the system's temporary
    folder is Python's own: pymp-…, with the dead socket of a fork server.
    """
    if choose.random() < 0.5:
        os.kill(choose.choice(family), signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    return -1


def ask_to_stop(project: Any, process: subprocess.Popen[str], _: list[int], choose: random.Random) -> int:
    """SIGTERM or SIGUSR1 to one rank, to the process that has started them, or to all; it must end with 143."""
    number = choose.choice([signal.SIGTERM, signal.SIGUSR1])
    logs = sorted((project.folder / "runs" / project.name / "logs").glob("rank_*.log"))
    ranks = [int(re.findall(r"pid=(\d+)", log.read_text(encoding="utf-8"))[-1]) for log in logs]
    match choose.randrange(3):
        case 0:
            os.kill(choose.choice(ranks), number)
        case 1:
            os.kill(process.pid, number)
        case _:
            os.killpg(process.pid, number)
    return 128 + signal.SIGTERM


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("disturb", "fault", "phases", "num_rounds"),
    [(kill, "SIGKILL", list(PHASES), 14), (ask_to_stop, "SIGTERM or SIGUSR1", ["s", "e", "w"], 10)],
)
def test_disturbed_at_any_moment_the_run_ends_as_an_undisturbed_one(
    disturb: Disturb,
    fault: str,
    phases: list[str],
    num_rounds: int,
    make_project: Callable[[Path], Any],
    is_long: bool,
    report: Report,
) -> None:
    project, choose = make_project(WORKLOAD), random.Random(seed := 11)
    project.run(*WORDS, "name=undisturbed")
    wanted = phases * (num_rounds if is_long else 1)
    tried, seconds, num_runs = Counter[str](), [0.0], 0
    while wanted:
        project.name = f"disturbed{num_runs}"
        for phase in wanted[:6]:
            hit, ended_after = disturb_in(project, phase, disturb, choose)
            if hit == ENDED:
                break
            wanted.remove(phase)
            tried[hit] += 1
            seconds.append(ended_after)
        project.run(*WORDS, f"name={project.name}")
        assert_same(project, project.name)  # else the test ends here, without a table
        num_runs += 1
    text = (
        f"## {tried.total()} x {fault} in {num_runs} runs\n\n{inspect.getdoc(disturb)}\n\n"
        "The phase is rank 0's at that moment. "
        f"All processes had ended within {max(seconds):.1f} s. After the same command had run to its end, "
        "metrics.jsonl (but for samples_per_second), weights, optimizer and random states equalled those of an "
        "undisturbed run to the bit; no temporary file was left."
    )
    for phase in phases:
        words = text if phase == phases[0] else ""
        report(f"{fault} during {PHASES[phase]}", tried[phase], tried[phase], words, seed=seed)
    if is_long:
        assert min(tried[phase] for phase in phases) >= 5


def disturb_in(project: Any, wanted: str, disturb: Disturb, choose: random.Random) -> tuple[str, float]:
    """Start the run and disturb it in a phase. Returns the phase that was hit, and the seconds to the end of all."""
    marker = project.folder / "phase"
    marker.unlink(missing_ok=True)
    process = project.start(*WORDS, f"name={project.name}")
    if wanted == "":
        time.sleep(choose.uniform(0.05, 2.0))
    else:
        for _ in range(choose.randint(1, 4)):  # not always the first time
            wait_for(process, marker, lambda letter: letter == wanted)
            wait_for(process, marker, lambda letter: letter != wanted)
        wait_for(process, marker, lambda letter: letter == wanted)
        time.sleep(choose.uniform(0.0, 0.01))
    if process.poll() is not None:
        return ENDED, 0.0
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    hit, disturbed_at = read(marker), time.monotonic()
    code = disturb(project, process, family, choose)
    output, errors = process.communicate(timeout=300)
    assert code in (-1, process.returncode), f"exit code {process.returncode}\n{output}\n{errors}"
    # A process may be killed that the run can do without (a loader worker that has delivered all): then it goes on.
    started_at = disturbed_at if process.returncode else time.monotonic()
    while living(family):
        assert time.monotonic() - started_at < END_SECONDS, f"still there: {living(family)}\n{output}\n{errors}"
        time.sleep(0.05)
    return hit, time.monotonic() - started_at


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
    deadline = time.monotonic() + 300  # a start alone takes half a minute on a machine with other work
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

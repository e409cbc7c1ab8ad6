"""Tests of runs that are killed or asked to stop at any moment.

The same command resumes such a run, and in the end its results equal those of an undisturbed run.
"""

from __future__ import annotations

import inspect
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from .conftest import Report, Tries

PHASES = {"": "start-up", "s": "step", "e": "evaluation", "w": "save"}
WORKLOAD = Path(__file__).parent / "workload"
WORDS = (
    "device_ids=cpu,cpu", "training.epochs=16", "training.global_batch_size=8", "checkpoint.every_steps=2",
    "loader.num_workers=1", "launch.timeout_minutes=1",
)  # fmt: skip
SHARDED = ("strategy=fsdp", "checkpoint.sharded=true")
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
)  # fmt: skip
END_SECONDS = 10.0
"""The longest time allowed from the signal to the end of all processes; at start-up, the time of a start is added."""
GROUP = "whole group"
Disturb = Callable[[set[str], random.Random], tuple[int, str]]
"""Chooses a signal and its receiver: one of the given kinds of processes, or the whole group."""


@dataclass
class Hit:
    """One signal to a run, with rank 0's phase at that moment and the kind of process that got the signal."""

    phase: str
    victim: str
    is_resumed: bool
    """The run had a checkpoint to resume from."""
    seconds: float = 0.0
    """Time from the signal to the end of all processes, or 0 if the run completed without the victim."""


def kill(kinds: set[str], choose: random.Random) -> tuple[int, str]:
    """Half of the SIGKILLs go to the whole group, and half of the rest to a rank (if one exists yet). The others go to
    the launching process or to a helper (a loader worker, a tracker). Any exit code is allowed. Only
    Python's own files may stay in the system's temporary folder: pymp-…, of loader workers.
    """
    is_group, is_rank = choose.random() < 0.5, choose.random() < 0.5
    other = choose.choice(sorted(kinds - {"rank"}))
    return signal.SIGKILL, GROUP if is_group else "rank" if is_rank and "rank" in kinds else other


def ask_to_stop(_: set[str], choose: random.Random) -> tuple[int, str]:
    """SIGTERM or SIGUSR1 goes to one rank, to the launching process or to the whole group. The run must end with exit
    code 143, have a checkpoint of the last step in metrics.jsonl, and say in summary.json that it was stopped. Every
    second run is started by torchrun, whose agent is then the launching process and ends with exit code 1.
    """
    return choose.choice([signal.SIGTERM, signal.SIGUSR1]), choose.choice(
        ["rank", "launcher", GROUP]
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "size", ["small", pytest.param("full", marks=pytest.mark.long), "full, sharded"]
)
@pytest.mark.parametrize(
    ("disturb", "fault", "phases", "num_rounds"),
    [(kill, "SIGKILL", list(PHASES), 13), (ask_to_stop, "SIGTERM or SIGUSR1", ["s", "e", "w"], 10)],
)
def test_disturbed_at_any_moment_the_run_ends_as_an_undisturbed_one(
    disturb: Disturb,
    fault: str,
    phases: list[str],
    num_rounds: int,
    size: str,
    make_project: Callable[..., Any],
    is_long: bool,
    report: Report,
) -> None:
    project, choose = make_project(WORKLOAD, size[:5].rstrip(",")), random.Random(seed := 11)
    words = (*WORDS, *SHARDED) if "sharded" in size else WORDS
    startup_seconds = run_undisturbed(project, words)
    wanted = phases * (num_rounds if is_long else 1)
    tries: dict[str, Tries] = {phase: Tries() for phase in PHASES}
    hits: list[Hit] = []
    num_runs = 0
    while wanted:
        project.name = f"disturbed{num_runs}"
        of_run, run = list[Hit](), Tries()
        command = TORCHRUN if disturb is ask_to_stop and num_runs % 2 == 0 else ()
        with run.one(project.name):
            for phase in wanted[:6]:
                if not disturb_in(
                    project, phase, startup_seconds, disturb, choose, of_run, command, size, words
                ):
                    break  # the run had come to its end
            project.run(*words, f"name={project.name}", command=[sys.executable])
            assert_same(project, project.name)
            shutil.rmtree(project.directory(project.name))
        assert of_run or not run.failures, run.failures
        for hit in of_run:
            tries[hit.phase].count += 1
            tries[hit.phase].failures += run.failures  # nobody knows which of them it was
        hits += of_run
        del wanted[: len(of_run)]
        num_runs += 1
    text = (
        f"## {len(hits)} x {fault} in {num_runs} runs, size={size}\n\n{inspect.getdoc(disturb)}\n\n{describe(hits)}\n\n"
        "The phase is rank 0's at that moment. After the same command had run to its end, metrics.jsonl (but for "
        "samples_per_second), weights, model.safetensors and optimizer equalled those of an undisturbed "
        "run to the bit; no temporary file was left."
    )
    for phase in phases:
        report(
            f"size={size}: {fault} during {PHASES[phase]}",
            tries[phase],
            text if phase == phases[0] else "",
            seed=seed,
        )
    if is_long:
        assert min(tries[phase].count for phase in phases) >= 5


def run_undisturbed(project: Any, words: Sequence[str]) -> float:
    """Train the run with which others are compared, and return the seconds until it first writes the file `phase`."""
    started_at = time.monotonic()
    process = project.start(*words, "name=undisturbed")
    wait_for(process, project.folder / "phase", bool)
    seconds = time.monotonic() - started_at
    output = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return seconds


def disturb_in(
    project: Any,
    wanted: str,
    startup_seconds: float,
    disturb: Disturb,
    choose: random.Random,
    hits: list[Hit],
    command: Sequence[str],
    size: str,
    words: Sequence[str],
) -> bool:
    """Start the run, send a signal in phase `wanted`, and add a Hit to `hits`. Return False if the run ended first."""
    marker, checkpoints = project.folder / "phase", project.directory(project.name) / "checkpoints"
    marker.unlink(missing_ok=True)
    is_resumed, former_step = bool(saved_steps(checkpoints)), last_step(project)
    process = project.start(*words, f"name={project.name}", command=command)
    if wanted == "":
        time.sleep(choose.uniform(0.05, startup_seconds))
    else:
        wait_for_phase(process, marker, wanted, choose.randint(1, 5))  # not always the first time
        time.sleep(choose.uniform(0.0, 0.01))
    if process.poll() is not None:
        assert process.returncode == 0, process.communicate()
        return False
    family = family_of(process.pid)
    sessions = {process.pid} | (
        {pid for pid, kind in family.items() if kind == "rank"} if command else set()
    )
    number, victim = disturb({*family.values()}, choose)
    hits.append(hit := Hit(read(marker), f"{victim} (torchrun)" if command else victim, is_resumed))
    told_at = time.monotonic()
    with suppress(ProcessLookupError):  # a worker that has just done its work
        if victim == GROUP:
            for session in sessions:
                os.killpg(session, number)
        else:
            os.kill(choose.choice([pid for pid, kind in family.items() if kind == victim]), number)
    try:
        output = "\n".join(process.communicate(timeout=300))
        # A process that still imports torch comes to its end afterwards.
        limit = END_SECONDS + (startup_seconds if hit.phase == "" else 0.0)
        started_at = told_at if process.returncode else time.monotonic()
        while living(sessions) and time.monotonic() < started_at + limit:
            time.sleep(0.02)
        seconds = time.monotonic() - started_at
        assert seconds < limit, f"{hit}: {seconds:.1f} s, still there: {living(sessions)}\n{output}"
        hit.seconds = seconds if process.returncode else 0.0
        if number != signal.SIGKILL and process.returncode == 0:  # it came too late
            assert project.json(project.name, "summary.json")["status"] == "complete"
            hits.remove(hit)
            return False
        if number != signal.SIGKILL:
            assert process.returncode == (1 if command else 128 + signal.SIGTERM), (
                f"{process.returncode}\n{output}"
            )
            saved = max(saved_steps(checkpoints), default=0)
            assert saved == last_step(project), output
            if saved > former_step:  # else it was still starting: the step was the rehearsal
                assert project.json(project.name, "summary.json")["status"] == "stopped", output
    finally:
        for pid in living(sessions):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return True


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints that have their name."""
    paths = [path for path in checkpoints.glob("step_*") if path.suffix in (".pt", ".dcp")]
    return [int(path.stem[5:]) for path in paths]


def last_step(project: Any) -> int:
    """Return the last step in metrics.jsonl, or 0 if no step is logged."""
    has_lines = (project.directory(project.name) / "metrics.jsonl").exists()
    return (
        max((line["step"] for line in project.lines(project.name)), default=0) if has_lines else 0
    )


def describe(hits: list[Hit]) -> str:
    """Return a table of the signals and the slowest shutdown, by the kind of process that got the signal."""
    lines = ["| to | signals | slowest end, s |", "|---|---:|---:|"]
    for victim in sorted({hit.victim for hit in hits}):
        seconds = [hit.seconds for hit in hits if hit.victim == victim]
        lines.append(f"| {victim} | {len(seconds)} | {max(seconds):.1f} |")
    num_resumed = sum(hit.is_resumed for hit in hits if hit.phase == "")
    limits = f"{END_SECONDS:.0f} s are allowed; at start-up, the time of a start is added."
    return "\n".join(lines) + f"\n\n{limits} {num_resumed} of the start-ups continued a run."


def family_of(launcher: int) -> dict[int, str]:
    """Return the kind (launcher, rank or helper) of each process of a run, by process id.

    The ranks are children of the command or of torchrun's agent. Loader workers are children of the ranks.
    """
    family = {launcher: "launcher"}
    with suppress(psutil.Error):  # one has just ended
        for child in psutil.Process(launcher).children():
            family |= {
                process.pid: "helper" for process in [child, *child.children(recursive=True)]
            }
            family[child.pid] = "rank"
    return family


def living(sessions: set[int]) -> list[int]:
    """Return the living processes of these sessions. A run's command has its own, and so has each torchrun rank."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has just ended
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def read(marker: Path) -> str:
    return marker.read_text(encoding="utf-8") if marker.exists() else ""


def wait_for_phase(
    process: subprocess.Popen[str], marker: Path, wanted: str, num_times: int
) -> None:
    """Wait until rank 0 has begun the phase `wanted` `num_times` times, or the run has ended."""
    for _ in range(num_times):
        wait_for(process, marker, lambda letter: letter != wanted)
        wait_for(process, marker, lambda letter: letter == wanted)


def wait_for(process: subprocess.Popen[str], marker: Path, is_met: Callable[[str], bool]) -> None:
    # a start alone takes half a minute on a machine with other work
    deadline = time.monotonic() + 300
    # a run that has ended is killed no more
    while not is_met(read(marker)) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def load(path: Path) -> Any:
    """Return a checkpoint: of a folder, what is in rest.pt and all tensors by their keys."""
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    whole = path.with_suffix(".whole")
    dcp_to_torch_save(path, whole)
    tensors = torch.load(whole, weights_only=True)
    whole.unlink()
    return {**torch.load(path / "rest.pt", weights_only=True), "model": tensors, "optimizer": {}}


def assert_same(project: Any, name: str) -> None:
    for split in ("train", "validation"):
        assert project.lines(name, split) == project.lines("undisturbed", split), split
    last = max(line["step"] for line in project.lines("undisturbed"))
    for file in (f"step_{last:08d}.*", "best*"):
        paths = [project.directory(run) / "checkpoints" for run in (name, "undisturbed")]
        (first,), (second,) = ([load(path) for path in folder.glob(file)] for folder in paths)
        for key in (
            "model",
            "optimizer",
            "random_states",
            "best",
            "early_stopping",
            "step",
            "position",
        ):
            assert_equal(first[key], second[key], f"{file}: {key}")
    exported, expected = (
        load_file(project.directory(run) / "model.safetensors") for run in (name, "undisturbed")
    )
    assert_equal(exported, expected, "model.safetensors")
    # safetensors' own
    left = [
        *project.directory(name).rglob(".*.tmp"),
        *project.directory(name).glob(".tmp*"),
        *project.directory(name).rglob("*.part"),
    ]
    assert not left


def assert_equal(first: Any, second: Any, path: str) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            assert_equal(first[key], second[key], f"{path}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), path
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal(one, other, f"{path}[{index}]")
    else:
        assert first == second, path

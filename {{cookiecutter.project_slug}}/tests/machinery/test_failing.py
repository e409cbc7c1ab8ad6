"""Tests that a rank that fails, is killed or hangs ends all ranks within seconds, with a reason and no process left."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from template_package.launching.processes import FAILURE, Failure, _find_failure

from conftest import Project, children

LIMIT_SECONDS = 5.0


def descendants(pid: int) -> set[int]:
    return {found for child in children(pid) for found in (child, *descendants(child))}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc: processes cannot be found")
def test_twenty_kills_at_random_moments_end_within_seconds_and_leave_no_process(
    project: Project,
) -> None:
    words = (
        "device_ids=cpu,cpu",
        "loader.num_workers=1",
        "model.seconds_per_step=0.01",
        "training.epochs=40",
    )
    # the session and its fork server are there now
    project.run(*words, "training.max_steps=1", "name=first")
    idle, choose, killed = descendants(project.session.pid), random.Random(7), []

    # not their loader workers: one that has nothing left to do may die unnoticed
    def living_ranks() -> list[int]:
        return sorted({rank for server in idle for rank in children(server)} - idle)

    def kill() -> None:
        delay, deadline = choose.uniform(0.0, 1.2), time.monotonic() + 60
        while len(living_ranks()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(choose.choice(living_ranks()), signal.SIGKILL)
        killed.append(time.monotonic())

    for number in range(20):
        killer = threading.Thread(target=kill)
        killer.start()
        output = project.run(*words, f"name=run{number}", code=1)
        ended = time.monotonic()
        killer.join()
        seconds = ended - killed[-1]
        assert seconds < LIMIT_SECONDS, f"{seconds:.1f} s after the kill\n{output}"
        assert descendants(project.session.pid) <= idle, output
        assert output.count(") failed:\n") == 1, output
    assert len(killed) == 20


def test_hang_is_found_and_the_logs_have_the_stacks_of_all_ranks(project: Project) -> None:
    words = ("device_ids=cpu,cpu", "launch.timeout_minutes=0.05")
    output = project.run(*words, "model.fault=hang", code=1)
    assert (
        output.count("no progress for launch.timeout_minutes=0.05") == 1
        and "logs/rank_*.log" in output
    )
    logs = [
        (project.directory("run") / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
        for rank in (0, 1)
    ]
    assert all("Current thread" in log or "Thread 0x" in log for log in logs)
    assert "in compute_loss" not in logs[0] and "in compute_loss" in logs[1], "where rank 1 hangs"


def test_rank_that_does_not_even_answer_ends_all(project: Project) -> None:
    output = project.run(
        "device_ids=cpu,cpu", "launch.timeout_minutes=0.05", "model.fault=freeze", code=1
    )
    assert "no progress for launch.timeout_minutes=0.05" in output


def test_launchers_console_tells_of_a_hang(project: Project) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = (
        "device_ids=cpu,cpu",
        "launch.timeout_minutes=0.05",
        "model.fault=hang",
        "model.fault_rank=0",
    )
    output = project.run(*words, command=torchrun, code=1)
    assert output.count("no progress for launch.timeout_minutes=0.05") == 1


def test_killed_launching_process_takes_a_rank_along_that_python_cannot_end(
    project: Project,
) -> None:
    words = ("device_ids=cpu,cpu", "model.fault=clutch", "launch.timeout_minutes=5")
    process = project.start(*words)
    log = project.directory("run") / "logs" / "rank_1.log"
    deadline = time.monotonic() + 60
    while (
        not (log.exists() and "clutched" in log.read_text(encoding="utf-8"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    family = descendants(process.pid)
    assert process.poll() is None, process.communicate()
    assert len(family) >= 4, "fork server, resource tracker, two ranks"
    process.kill()
    process.communicate(timeout=30)  # its pipes are closed: by all who had them
    deadline = time.monotonic() + 30
    while left := family & {found for pid in (1, os.getpid(), *family) for found in children(pid)}:
        assert time.monotonic() < deadline, left


def test_killed_fork_server_ends_the_run(project: Project) -> None:
    process = project.start("device_ids=cpu,cpu", "model.fault=hang")
    deadline = time.monotonic() + 60
    while (
        not project.directory("run").joinpath("metrics.jsonl").exists()
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    (server,) = (pid for pid in children(process.pid) if children(pid))
    os.kill(server, signal.SIGKILL)
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1


def test_one_rank_that_hangs_ends_too(project: Project) -> None:
    process = project.start("launch.timeout_minutes=0.05", "model.fault=hang", "model.fault_rank=0")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "no progress for launch.timeout_minutes=0.05" in errors


def test_run_that_was_halted_for_a_while_goes_on(project: Project) -> None:
    def halt() -> None:
        metrics = project.directory("run") / "metrics.jsonl"
        while not metrics.exists():
            time.sleep(0.02)
        os.killpg(project.session.pid, signal.SIGSTOP)
        time.sleep(6.5)  # longer than the time-out
        os.killpg(project.session.pid, signal.SIGCONT)

    project.session.start()
    halting = threading.Thread(target=halt)
    halting.start()
    project.run("device_ids=cpu,cpu", "launch.timeout_minutes=0.08", "model.seconds_per_step=0.05")
    halting.join()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("exit", "the user's own end"),
        ("exit_0", "SystemExit: 0"),
        ("exit_75", "SystemExit: 75"),  # of a rank of ours whose memory was too small
        ("exit_143", "SystemExit: 143"),  # of a rank that was asked to stop
        ("vanish", "ended with exit code 0, without a word"),
    ],
)
def test_stray_exit_in_user_code_is_a_failure(project: Project, fault: str, words: str) -> None:
    output = project.run("device_ids=cpu,cpu", f"model.fault={fault}", code=1)
    assert words in output and output.count(") failed:\n") == 1
    if fault != "vanish":
        assert words in project.run(
            "name=alone", f"model.fault={fault}", "model.fault_rank=0", code=1
        )
    for name in ("run", "alone")[: 1 + (fault != "vanish")]:
        assert not (project.directory(name) / "summary.json").exists()


def test_last_words_of_a_rank_that_aborts_reach_the_console(project: Project) -> None:
    log = project.directory("run") / "logs" / "rank_1.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "2026-01-01 host=a pid=1\nan older reason\nFatal Python error: Aborted\n", encoding="utf-8"
    )
    output = project.run("device_ids=cpu,cpu", "model.fault=abort", code=1)
    assert "an older reason" not in output
    assert "killed by SIGABRT; see runs/run/logs/rank_1.log, which ends with:" in output
    assert "CUDA error: device-side assert triggered" in output and "frame #" not in output


def test_traceback_of_a_rank_that_aborts_right_after_it_is_told() -> None:
    """NCCL's watchdog may abort a rank that has already stored its traceback. The report must show that traceback."""
    store = dist.HashStore()
    store.set(FAILURE, json.dumps(Failure(1, 1, "its traceback")))
    told = _find_failure([1, -signal.SIGABRT], store)
    assert told is not None and (told.rank, told.text, told.is_silent) == (
        1,
        "its traceback",
        False,
    )
    both = _find_failure([-signal.SIGABRT, -signal.SIGABRT], store)
    assert both is not None and both.text == "its traceback"
    for code in (1, -signal.SIGABRT):  # it lost its connection
        killed = _find_failure([-signal.SIGKILL, code], store)
        assert killed is not None and killed.rank == 0 and "killed by SIGKILL" in killed.text


def test_memory_that_runs_out_under_a_launcher_is_told(project: Project) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = project.run("device_ids=cpu,cpu", "model.fault=memory_later", command=torchrun, code=1)
    assert output.count(") failed:\n") == 1 and "rank 1 (" in output
    assert "out of memory: the same command continues, with smaller micro-batches" in output

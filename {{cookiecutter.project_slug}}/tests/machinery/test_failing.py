"""Tests that a rank that fails, is killed or hangs ends all ranks within seconds, with a reason and no process left."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

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
    project.run(*words, "training.max_steps=1", "name=first")
    choose, killed, found = random.Random(7), list[float](), set[int]()

    # not their loader workers: one that has nothing left to do may die unnoticed
    def living_ranks() -> list[int]:
        return sorted(children(project.session.pid))

    def kill() -> None:
        delay, deadline = choose.uniform(0.0, 1.2), time.monotonic() + 60
        while len(living_ranks()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        found.update(descendants(project.session.pid))
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
        assert not found & {pid for parent in (1, *found) for pid in children(parent)}, output
        assert len(re.findall(r"^rank \d.* failed:", output, re.MULTILINE)) == 1, output
    assert len(killed) == 20


def test_hang_is_found_and_the_logs_have_the_stacks_of_all_ranks(project: Project) -> None:
    words = ("device_ids=cpu,cpu", "launch.timeout_minutes=0.15")
    output = project.run(*words, "model.fault=hang", code=1)
    assert output.count("made no progress for launch.timeout_minutes; see runs/run/logs/rank_") == 1
    logs = [
        (project.directory("run") / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
        for rank in (0, 1)
    ]
    assert all("Current thread" in log or "Thread 0x" in log for log in logs)
    assert "in compute_loss" not in logs[0] and "in compute_loss" in logs[1], "where rank 1 hangs"


def test_sample_that_never_comes_ends_training_and_evaluation_before_the_first_step(
    project: Project,
) -> None:
    project.run("device_ids=cpu", "training.max_steps=1")
    stuck = ("device_ids=cpu", "data.stuck_index=0", "launch.timeout_minutes=0.05")
    for words in (["evaluate"], ["training.max_steps=1", "name=new"]):
        output = project.run(*words, *stuck, code=1)
        assert output.count("Timeout (0:00:03)!") == 1 and "in __getitem__" in output
    assert not (project.directory("new") / "metrics.jsonl").exists()


def test_rank_that_does_not_even_answer_ends_all(project: Project) -> None:
    output = project.run(
        "device_ids=cpu,cpu", "launch.timeout_minutes=0.15", "model.fault=freeze", code=1
    )
    assert "made no progress for launch.timeout_minutes" in output


def test_hang_under_a_launcher_ends_too(project: Project) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = (
        "device_ids=cpu,cpu",
        "launch.timeout_minutes=0.15",
        "model.fault=hang",
        "model.fault_rank=0",
    )
    project.run(*words, command=torchrun, code=1)
    log = (project.directory("run") / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert "Timeout (0:00:09)!" in log and "in compute_loss" in log


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
    assert len(family) >= 2, "two ranks"
    process.kill()
    process.communicate(timeout=30)  # its pipes are closed: by all who had them
    deadline = time.monotonic() + 30
    while left := family & {found for pid in (1, os.getpid(), *family) for found in children(pid)}:
        assert time.monotonic() < deadline, left


def test_one_rank_that_hangs_ends_too(project: Project) -> None:
    process = project.start("launch.timeout_minutes=0.15", "model.fault=hang", "model.fault_rank=0")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Timeout (0:00:09)!" in errors and "in compute_loss" in errors


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("exit", "the user's own end"),
        ("exit_0", "SystemExit: 0"),
        ("exit_75", "SystemExit: 75"),  # of a rank of ours whose memory was too small
        ("exit_143", "SystemExit: 143"),  # of a rank that was asked to stop
    ],
)
def test_stray_exit_in_user_code_is_a_failure(project: Project, fault: str, words: str) -> None:
    output = project.run("device_ids=cpu,cpu", f"model.fault={fault}", code=1)
    assert words in output and output.count(") failed:\n") == 1
    alone = project.run("name=alone", f"model.fault={fault}", "model.fault_rank=0", code=1)
    assert words in alone
    for name in ("run", "alone"):
        assert not (project.directory(name) / "summary.json").exists()


def test_rank_that_is_gone_is_told_before_those_that_lost_it(project: Project) -> None:
    output = project.run("device_ids=cpu,cpu", "model.fault=vanish", code=1)
    assert "rank 1 failed: it ended without a word" in output and ") failed:\n" not in output


def test_end_of_all_ranks_by_user_code_is_no_success(project: Project) -> None:
    project.append("model.py", "fail = lambda _: os._exit(0)\nFAULTS['fail'] = fail")
    project.edit("model.py", "rank() == config.fault_rank", "True")
    project.run("device_ids=cpu,cpu", "model.fault=fail", code=1)


def test_memory_that_runs_out_under_a_launcher_is_told(project: Project) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = project.run("device_ids=cpu,cpu", "model.fault=memory_later", command=torchrun, code=1)
    assert output.count(") failed:\n") == 1 and "rank 1 (" in output
    assert "out of memory: the same command continues, with smaller micro-batches" in output

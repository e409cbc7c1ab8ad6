"""Damaged checkpoints and disks that give out: what was whole stays whole, and the same command goes on from it."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Report
from .test_signals import WORDS, WORKLOAD, assert_same

UNSHARE = ["unshare", "--map-root-user", "--mount"]


@pytest.mark.timeout(3600)
def test_damaged_checkpoint_is_skipped_for_the_one_before(
    make_project: Callable[[Path], Any], is_long: bool, report: Report
) -> None:
    project, choose = make_project(WORKLOAD), random.Random(seed := 5)
    words = [*WORDS[1:], "device_ids=cpu"]
    project.run(*words, "name=undisturbed", "checkpoint.keep_last=null")
    last = max(project.directory("undisturbed").glob("checkpoints/step_*.pt"))
    whole = last.read_bytes()
    cut = [whole[: len(whole) * percent // 100] for percent in range(0, 100, 5 if is_long else 50)]
    flipped = []
    for _ in range(40 if is_long else 2):
        bits = bytearray(whole)
        bits[choose.randrange(len(bits))] ^= 1 << choose.randrange(8)
        flipped.append(bytes(bits))
    for fault, contents in {"checkpoint cut short": cut, "checkpoint with a flipped bit": flipped}.items():
        num_told = 0
        for number, content in enumerate(contents):
            name = f"{fault.split()[-1]}{number}"
            shutil.copytree(project.directory("undisturbed"), project.directory(name))
            (project.directory(name) / "checkpoints" / last.name).write_bytes(content)
            output = project.run(*words, f"name={name}", "checkpoint.keep_last=null")
            num_told += any(f"{last.name} {told}" in output for told in ("cannot be read", "is damaged"))
            assert_same(project, name)
            shutil.rmtree(project.directory(name))
        assert num_told == len(contents) or "flipped" in fault
        text = f"{num_told} of {len(contents)} were told; the others held the same numbers. "
        text = f"## {fault}\n\n{text}All runs went on and ended with the same bits as an undisturbed one."
        report(fault, len(contents), len(contents), text, seed=seed)


@pytest.mark.timeout(3600)
def test_disk_that_is_full_keeps_what_was_whole(
    make_project: Callable[[Path], Any], is_long: bool, report: Report
) -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system of the test's own needs user namespaces")
    project, choose = make_project(WORKLOAD), random.Random(seed := 6)
    words = [*WORDS[1:], "device_ids=cpu"]
    project.run(*words, "name=undisturbed")
    tried = 12 if is_long else 1
    for number in range(tried):
        name, size = f"full{number}", choose.randint(100, 12_000)
        mount = f"mount -t tmpfs -o size={size}k tmpfs runs"
        script = f'mkdir -p runs; {mount}; "$0" "$@"; code=$?; cp -r runs/{name} kept; exit $code'
        output = project.run(*words, f"name={name}", command=[*UNSHARE, "sh", "-c", script, sys.executable], code=1)
        assert "No space left on device" in output
        assert "Traceback" not in output
        shutil.move(project.folder / "kept", project.directory(name))
        project.run(*words, f"name={name}")  # on a disk with room
        assert_same(project, name)
    report("disk full at a random moment", tried, tried, seed=seed)


@pytest.mark.timeout(3600)
def test_disk_that_vanishes_ends_the_run(make_project: Callable[[Path], Any], is_long: bool, report: Report) -> None:
    project, choose = make_project(WORKLOAD), random.Random(seed := 7)
    words = [*WORDS, "training.epochs=1000", "name=run"]
    tried = 6 if is_long else 1
    for _ in range(tried):
        process = project.start(*words)
        metrics = project.directory("run") / "metrics.jsonl"
        while process.poll() is None and not metrics.exists():
            time.sleep(0.01)
        time.sleep(choose.uniform(0.0, 0.5))
        (project.folder / "runs").rename(project.folder / "elsewhere")
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 1, output + errors
        assert "Traceback" not in errors
        shutil.rmtree(project.folder / "elsewhere")
        shutil.rmtree(project.folder / "runs", ignore_errors=True)
    report("disk that vanishes during a run", tried, tried, seed=seed)

"""Runs the tests that are marked `gpu`, several at a time, and returns each one's outcome as soon as it is known.

pytest loads this file as a plugin too. There it takes its part of the tests and writes a line for each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PART, LINES = "GPU_TESTS_PART", "GPU_TESTS_LINES"
ALONE = "auto_takes or memory_another"
"""A pattern of tests that run first and alone: they ask whether the GPU is free."""
ONLY_IN_FULL = "data_parallel or group_of_nccl or memory_that_runs_out"
"""A pattern of tests of test_gpu.py that use what a small project does not have."""


def run_tests(
    folder: Path,
    environment: dict[str, str],
    seconds: float,
    num_jobs: int,
    show: Callable[[list[dict[str, Any]]], None],
    *,
    is_small: bool,
) -> list[dict[str, Any]]:
    """Run the tests for at most `seconds`, and call `show` with all outcomes so far when there are more.

    is_small: those of test_gpu.py, in a small project that is made in `folder`.

    Each outcome has a label, an outcome (passed, failed, skipped, or cut off), seconds, and a reason.
    """
    sys.path += [str(ROOT / "tests"), str(ROOT / "hooks")]
    from small_suite import PROJECT, make_small_project

    deadline, done = time.monotonic() + seconds, list[dict[str, Any]]()
    folder.mkdir()
    project, without = PROJECT, ""
    if is_small:
        project, without = make_small_project(folder / "small"), f" and not ({ONLY_IN_FULL})"
    # others may import what this machine or a small project lacks
    names = "test_gpu.py" if without else "test_*.py"
    paths_of_tests = sorted(project.glob(f"tests/machinery/{names}"))
    files = [path for path in paths_of_tests if "mark.gpu" in path.read_text(encoding="utf-8")]
    for number, (chosen, jobs) in enumerate(((ALONE, 1), (f"not ({ALONE})", num_jobs))):
        parts = [
            _start(
                project,
                files,
                folder / f"tests_{number}_{job}",
                environment,
                f"({chosen}){without}",
                f"{job}/{jobs}",
            )
            for job in range(jobs)
        ]
        former, found = done, list[dict[str, Any]]()
        is_running = True
        while is_running:
            time.sleep(0.5)
            is_running = time.monotonic() < deadline and any(
                process.poll() is None for process, _ in parts
            )
            found = [outcome for _, part in parts for outcome in _read(part)]
            if former + found != done:
                show(done := former + found)
        for process, part in parts:
            is_cut_off = process.poll() is None
            _kill_all(str(part))  # also runs that a test has left when its own time was over
            if not is_cut_off and process.returncode not in (0, 1, 5):  # 5: no tests
                last = (
                    (part / "output.txt")
                    .read_text(encoding="utf-8", errors="replace")
                    .splitlines()[-8:]
                )
                done.append(
                    {
                        "label": f"pytest, part {part.name}",
                        "outcome": "failed",
                        "reason": "\n".join(last),
                    }
                )
    return [
        outcome if outcome["outcome"] != "started" else outcome | {"outcome": "cut off"}
        for outcome in done
    ]


def _start(
    project: Path,
    files: list[Path],
    folder: Path,
    environment: dict[str, str],
    chosen: str,
    part: str,
) -> tuple[subprocess.Popen[bytes], Path]:
    folder.mkdir()
    paths = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
    own = {
        PART: part,
        LINES: str(folder / "lines.jsonl"),
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = [
        "-p",
        "gpu_tests",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder / 'temporary'}",
        "-k",
        chosen,
    ]
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *options, *map(str, files)],
            cwd=project,
            env=os.environ | environment | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    return process, folder


def _read(folder: Path) -> list[dict[str, Any]]:
    path = folder / "lines.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    outcomes = [json.loads(line) for line in lines if line.endswith("}")]
    # of a test's lines, the last
    return [*{outcome["label"]: outcome for outcome in outcomes}.values()]


def _kill_all(mark: str) -> None:
    """Kill the processes in whose environment `mark` stands: pytest, and runs that its tests have started."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # ended, or another user's
            if mark in path.read_text(encoding="utf-8", errors="replace"):
                os.kill(int(path.parent.name), signal.SIGKILL)


# What pytest calls


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    part, num_parts = map(int, os.environ[PART].split("/"))
    items[:] = items[part::num_parts]
    for item in items:
        _write(item.nodeid, "not reached")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = (
            report.longrepr[2].removeprefix("Skipped: ")
            if isinstance(report.longrepr, tuple)
            else str(report.longrepr or "")[-1500:]
        )
        _write(report.nodeid, report.outcome, seconds=round(report.duration, 1), reason=reason)


def _write(label: str, outcome: str, **others: Any) -> None:
    with Path(os.environ[LINES]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"label": label, "outcome": outcome, **others}) + "\n")

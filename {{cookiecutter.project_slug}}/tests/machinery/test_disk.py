"""Tests of disks: a full or read-only disk ends the run with a one-line error and leaves the last checkpoint whole.

A slow disk costs time only, unless a write takes longer than launch.timeout_minutes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from conftest import Project

UNSHARE = ["unshare", "--map-root-user", "--mount"]
SYNC = "os.fsync(file.fileno())"


def has_mounts() -> bool:
    try:
        command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(
    not has_mounts(), reason="a file system of the test's own needs user namespaces"
)


def mounted(options: str, before: str = "true") -> list[str]:
    """Return a command that runs Python with runs/ on a file system of its own, and then copies runs/ to kept/."""
    mount = f"mkdir runs; mount -t tmpfs -o {options} tmpfs runs; {before}"
    script = f'{mount}; "$0" "$@"; code=$?; cp -r runs kept; exit $code'
    return [*UNSHARE, "sh", "-c", script, sys.executable]


@needs_mounts
def test_full_disk_ends_the_run_in_one_line_and_leaves_the_last_checkpoint(
    project: Project,
) -> None:
    words = ("device_ids=cpu,cpu", "checkpoint.every_steps=1", "checkpoint.every_epochs=null", "training.epochs=9",
             "logging.tracker=tensorboard")  # fmt: skip
    output = project.run(*words, command=mounted("size=300k"), code=1)
    assert "No space left on device" in output
    assert "The last checkpoint is whole" in output and "Traceback" not in output
    folder = project.folder / "kept" / "run" / "checkpoints"
    saved = sorted(folder.glob("step_*.pt"))
    assert 3 < len(saved) < 63
    for path in saved:
        assert torch.load(path, weights_only=True)["step"] == int(path.stem[5:])
    assert not list(folder.glob(".*")), "the file that was written in part is removed"


@needs_mounts
def test_disk_that_is_full_at_the_start_is_told(project: Project) -> None:
    output = project.run(
        command=mounted("size=64k", "head -c 65536 /dev/zero > runs/full 2>&1"), code=1
    )
    assert "No space left on device" in output and output.count(") failed:\n") <= 1


def test_file_in_the_place_of_the_checkpoints_is_told_and_no_new_run_begins(
    project: Project,
) -> None:
    checkpoints = project.directory("run") / "checkpoints"
    checkpoints.parent.mkdir(parents=True)
    checkpoints.write_text("no folder", encoding="utf-8")
    output = project.run("device_ids=cpu,cpu", code=1)
    assert "Not a directory: 'runs/run/checkpoints'" in output and output.count(") failed:\n") == 1
    assert not (checkpoints.parent / "metrics.jsonl").exists(), "no new run has begun"


def test_checkpoints_that_are_away_are_no_new_run(project: Project) -> None:
    project.run("training.max_steps=5")
    checkpoints, before = project.directory("run") / "checkpoints", project.lines("run")
    away = checkpoints.rename(project.folder / "away")
    # somebody has put them on a disk that is away now
    checkpoints.symlink_to(project.folder / "a disk")
    output = project.run("device_ids=cpu,cpu", "training.max_steps=7", code=1)
    assert (
        "No such file or directory: 'runs/run/checkpoints'" in output
        and output.count(") failed:\n") == 1
    )
    assert project.lines("run") == before
    away.rename(project.folder / "a disk")
    assert "resuming after step 5" in project.run("device_ids=cpu,cpu", "training.max_steps=7")


def test_file_that_grows_beyond_the_limit_is_told_in_one_line(project: Project) -> None:
    output = project.run(
        command=["sh", "-c", 'ulimit -f 4; exec "$0" "$@"', sys.executable], code=1
    )
    assert (
        ".pt: File too large. The last checkpoint is whole" in output and "Traceback" not in output
    )


@needs_mounts
def test_disk_that_cannot_be_written_to_is_told(project: Project) -> None:
    output = project.run(command=mounted("ro"), code=1)
    assert "Read-only file system" in output and output.count(") failed:\n") <= 1


@needs_mounts
def test_run_whose_disk_has_become_read_only_is_left_as_it_is_and_goes_on_later(
    project: Project,
) -> None:
    project.run("name=undisturbed")
    project.rewind("undisturbed", 14, "run")
    files = {
        path: path.read_bytes() for path in project.directory("run").rglob("*") if path.is_file()
    }
    script = 'mount --bind runs runs; mount -o remount,bind,ro runs; exec "$0" "$@"'
    output = project.run(command=[*UNSHARE, "sh", "-c", script, sys.executable], code=1)
    assert "Read-only file system" in output
    assert {
        path: path.read_bytes() for path in project.directory("run").rglob("*") if path.is_file()
    } == files
    project.run()
    assert project.lines("run") == project.lines("undisturbed")


def test_slow_disk_changes_nothing_and_one_slower_than_the_limit_is_told(project: Project) -> None:
    words = ("device_ids=cpu,cpu", "checkpoint.every_steps=2", "training.epochs=1")
    project.run("name=undisturbed", *words)
    project.edit("files.py", SYNC, f"__import__('time').sleep(0.5), {SYNC}")
    project.run("name=slow", *words, "launch.timeout_minutes=0.1")
    assert project.lines("slow") == project.lines("undisturbed")
    project.edit("files.py", "sleep(0.5)", "sleep(600 * path.name.endswith('4.pt'))")
    output = project.run(*words, "launch.timeout_minutes=0.1", code=1)
    assert "no progress for launch.timeout_minutes; see runs/run/logs/rank_0.log" in output
    log = (project.directory("run") / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert "Timeout (0:00:06)!" in log and "in write_whole" in log
    project.edit("files.py", "sleep(600 ", "sleep(0 ")
    assert "resuming after step 2 of 7" in project.run(*words)
    assert project.lines("run") == project.lines("undisturbed")
    assert not list(project.directory("run").rglob(".*.tmp"))


def test_save_may_take_longer_than_the_limit_while_its_file_grows(project: Project) -> None:
    words = ("device_ids=cpu,cpu", "training.max_steps=2", "evaluation.every_epochs=null")
    project.run("name=undisturbed", *words)
    write = "number = super().write(data)"
    project.edit("core/checkpoint.py", write, f"{write}; __import__('time').sleep(0.03)")
    project.run("name=slow", *words, "launch.timeout_minutes=0.03")  # 1.8 s, which a save exceeds
    assert project.lines("slow") == project.lines("undisturbed")

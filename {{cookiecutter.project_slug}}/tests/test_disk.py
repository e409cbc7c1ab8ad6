"""A disk that is full or cannot be written to ends the run in one line, with the last checkpoint whole."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
import torch

from template_package.launching.ranks import _disk_failure

from conftest import Project

UNSHARE = ["unshare", "--map-root-user", "--mount"]


def has_mounts() -> bool:
    try:
        command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not has_mounts(), reason="a file system of the test's own needs user namespaces")


def mounted(options: str, before: str = "true") -> list[str]:
    """run.py, with runs/ on a file system of its own whose files are copied to kept/ afterwards."""
    script = (
        f'mkdir runs; mount -t tmpfs -o {options} tmpfs runs; {before}; "$0" "$@"; code=$?; cp -r runs kept; exit $code'
    )
    return [*UNSHARE, "sh", "-c", script, sys.executable]


@needs_mounts
def test_full_disk_ends_the_run_in_one_line_and_leaves_the_last_checkpoint(project: Project) -> None:
    words = ("device_ids=cpu,cpu", "checkpoint.every_steps=1", "checkpoint.every_epochs=null", "training.epochs=9",
             "logging.tracker=tensorboard")  # fmt: skip
    output = project.run(*words, command=mounted("size=300k"), code=1)
    assert "No space left on device" in output and "trying again in 2 s" in output
    assert "The last checkpoint is whole" in output and "Traceback" not in output
    folder = project.folder / "kept" / "run" / "checkpoints"
    saved = sorted(folder.glob("step_*.pt"))
    assert 3 < len(saved) < 63
    for path in saved:
        assert torch.load(path, weights_only=True)["step"] == int(path.stem[5:])
    assert not list(folder.glob(".*")), "what was written in part is removed"


@needs_mounts
def test_disk_that_cannot_be_written_to_is_told_in_one_line(project: Project) -> None:
    output = project.run(command=mounted("ro"), code=1)
    assert "Read-only file system" in output and "Traceback" not in output


def test_folder_without_permission_is_told_in_one_line_and_a_file_of_the_users_by_its_traceback() -> None:
    for path in ("runs", "runs/mine/logs/rank_0.log"):
        words = _disk_failure(PermissionError(errno.EACCES, "Permission denied", path), "mine")
        assert words.startswith(f"cannot write {path}: Permission denied.")
    assert not _disk_failure(PermissionError(errno.EACCES, "Permission denied", "/data/17.png"), "mine")
    assert not _disk_failure(PermissionError(errno.EPERM, "Operation not permitted"), "mine")

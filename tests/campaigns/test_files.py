"""Tests of damaged checkpoints and a full disk: older checkpoints stay whole, and the same command resumes."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Report, Tries
from .test_signals import SHARDED, WORDS, WORKLOAD, assert_same

UNSHARE = ["unshare", "--map-root-user", "--mount"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("size", "words"),
    [("", ("device_ids=cpu",)), ("size=full, sharded: ", ("device_ids=cpu,cpu", *SHARDED))],
)
def test_damaged_checkpoint_is_skipped_for_the_one_before(
    size: str,
    words: tuple[str, ...],
    make_project: Callable[[Path], Any],
    is_long: bool,
    report: Report,
) -> None:
    project, choose = make_project(WORKLOAD), random.Random(seed := 5)
    words = (*WORDS[1:], *words, "checkpoint.keep_last=null")
    project.run(*words, "name=undisturbed")
    last = max(project.directory("undisturbed").glob("checkpoints/step_*"))

    def cut(content: bytes) -> bytes:
        # A text without its last line end is whole.
        return content[: choose.randrange(len(content) - 1)]

    def flip(content: bytes) -> bytes:
        bits = bytearray(content)
        bits[choose.randrange(len(bits))] ^= 1 << choose.randrange(8)
        return bytes(bits)

    faults: dict[str, Callable[[bytes], bytes | None]]
    faults = {"checkpoint cut short": cut, "checkpoint with a flipped bit": flip}
    if last.is_dir():
        faults["checkpoint without one of its files"] = lambda _: None
    for fault, damage in faults.items():
        tries, num_told, num_tries = Tries(), 0, 40 if is_long else 2
        for number in range(num_tries):
            name = f"{fault.split()[-1]}{number}"
            shutil.copytree(project.directory("undisturbed"), project.directory(name))
            path = project.directory(name) / "checkpoints" / last.name
            if path.is_dir():
                path = choose.choice(sorted(path.iterdir()))
            if (content := damage(path.read_bytes())) is None:
                path.unlink()
            else:
                path.write_bytes(content)
            with tries.one(f"{name}, {path.name}"):
                output = project.run(*words, f"name={name}")
                is_told = last.name in output and "cannot be used" in output
                num_told += is_told
                assert is_told or damage is flip  # a bit may lie where no number does
                assert_same(project, name)
            shutil.rmtree(project.directory(name))
        text = f"{num_told} of {num_tries} were found, and the checkpoint before was taken"
        text += "; the others held the same numbers." if num_told < num_tries else "."
        text += " All runs continued and ended with the same bits as an undisturbed one."
        report(size + fault, tries, f"## {size}{fault}\n\n{text}", seed=seed)


@pytest.mark.timeout(3600)
def test_disk_that_is_full_keeps_what_was_whole(
    make_project: Callable[[Path], Any], is_long: bool, report: Report
) -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0:
        stop = pytest.fail if is_long else pytest.skip
        stop("a file system of the test's own needs user namespaces")
    project, choose, tries = make_project(WORKLOAD), random.Random(seed := 6), Tries()
    words = [*WORDS[1:], "device_ids=cpu"]
    project.run(*words, "name=undisturbed")
    needed = sum(
        path.stat().st_size
        for path in project.directory("undisturbed").rglob("*")
        if path.is_file()
    )
    ends = []
    for number in range(9 if is_long else 1):
        third = (number + 1) % 3  # of the run; the last twentieth would do without it
        name, size = (
            f"full{number}",
            max(100, int(0.95 * needed / 1024 * (third + choose.random()) / 3)),
        )
        mount = f"mount -t tmpfs -o size={size}k tmpfs runs"
        script = f'rm -rf kept; mkdir -p runs; {mount}; "$0" "$@"; code=$?; cp -r runs/{name} kept; exit $code'
        with tries.one(f"{name}, {size} KiB"):
            output = project.run(
                *words,
                f"name={name}",
                command=[*UNSHARE, "sh", "-c", script, sys.executable],
                code=1,
            )
            shutil.move(project.folder / "kept", project.directory(name))
            ends.append(last_saved(project, name))
            assert "No space left on device" in output
            assert (
                output.count(
                    "The last checkpoint is whole: mend the disk or make room, and the same command continues."
                )
                == 1
            )
            assert "Traceback" not in output
            project.run(*words, f"name={name}")  # on a disk with room
            assert_same(project, name)
        shutil.rmtree(project.directory(name), ignore_errors=True)
    num_steps = last_saved(project, "undisturbed")
    text = (
        f"Last steps that were saved before, of {num_steps}: {', '.join(map(str, sorted(ends)))}."
    )
    text += (
        " Each time one line said so; with more room the same command continued to the same bits."
    )
    report(
        "disk full at a random moment",
        tries,
        f"## disk full at a random moment\n\n{text}",
        seed=seed,
    )
    if is_long:
        assert {end * 3 // num_steps for end in ends} >= {0, 1, 2}


def last_saved(project: Any, name: str) -> int:
    """Return the step of the run's last checkpoint, or 0 if the run has no checkpoint."""
    return max(
        (int(path.stem[5:]) for path in project.directory(name).glob("checkpoints/step_*.pt")),
        default=0,
    )

"""Starts commands in a project's folder, on one host or several, and ends all processes that the commands start."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

TOLERANCE = 1e-4
"""Relative tolerance of the losses at the end of the tests' runs. Summing in another order changes them by 1e-8 to
1.5e-5 (in float64 by 4e-16). Giving unequal shares of a batch equal weight changes them by more than 3e-3."""
MARK = "DDP_MARK_OF_CLUSTER"
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "NODE_RANK",
    "NNODES",
    "SLURM_",
    "SBATCH_",
    "OMPI_",
    "PMI",
)
FOREIGN = (
    *LAUNCHERS,
    "OMP_NUM_THREADS",
    "GLOO_",
    "NCCL_",
    "TORCH",
    "CUDA_VISIBLE_DEVICES",
    "PYTEST_",
)


def plain_environment(mark: str) -> dict[str, str]:
    """Return this process's environment without the variables FOREIGN, but with the mark that marked() looks for."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as an activated environment has it
    return kept | {
        MARK: mark,
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def prepare_child() -> None:
    """Let a child heed Ctrl-C, which a shell's background jobs ignore, and die when its parent ends for any reason."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Command:
    """A running command, whose output goes to a file."""

    def __init__(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str], output: Path
    ) -> None:
        self.words, self.output = list(words), output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                self.words,
                cwd=folder,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare_child,  # noqa: PLW1509 - the tests have no threads
            )

    @property
    def text(self) -> str:
        """The output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def ended(self, code: int | None = 0, timeout: float = 90) -> str:
        """Wait for the command's end, and return its output. Fail unless it ends with `code` (None: any code but 0)."""
        try:
            found = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.words}: no end within {timeout} s\n{self.text}") from None
        assert found == code if code is not None else found != 0, (
            f"{self.words}: exit code {found}\n{self.text}"
        )
        return self.text


@dataclass
class Host:
    """A host with a project's folder. `prefix` in front of a command runs the command on this host."""

    folder: Path
    mark: str
    prefix: tuple[str, ...] = ()
    num_started: int = 0

    def start(self, *words: str, **variables: str) -> Command:
        """Start a command in the folder."""
        self.num_started += 1
        output = self.folder / f"output_{self.num_started}.txt"
        return Command(
            [*self.prefix, *words], self.folder, plain_environment(self.mark) | variables, output
        )

    def python(self, *words: str, **variables: str) -> Command:
        """Start `python run.py …`."""
        return self.start(sys.executable, "run.py", *words, **variables)

    def lines(self, name: str, split: str) -> list[dict[str, Any]]:
        """Return the lines of a run's metrics.jsonl for one split, `train` or `validation`."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in whole if line["split"] == split]

    def summary(self, name: str) -> dict[str, Any]:
        """Return the contents of a run's summary.json."""
        content: dict[str, Any] = json.loads(
            (self.folder / "runs" / name / "summary.json").read_text(encoding="utf-8")
        )
        return content

    def losses(self, name: str) -> list[float]:
        """Return the last training loss and the last validation loss of a run."""
        return [self.lines(name, split)[-1]["loss"] for split in ("train", "validation")]

    def has_trained(self, name: str, world_size: int, losses: list[float]) -> None:
        """Fail unless `world_size` ranks have completed the run, logged no step twice, and reached these losses."""
        summary, steps = self.summary(name), [line["step"] for line in self.lines(name, "train")]
        assert (summary["status"], summary["world_size"]) == ("complete", world_size)
        assert steps == sorted(set(steps))
        assert steps[-1] == summary["steps"]
        assert self.losses(name) == pytest.approx(losses, rel=TOLERANCE)

    def wait_for_step(self, name: str, step: int, *commands: Command, timeout: float = 60) -> None:
        """Wait until the run has logged this step. Fail with the commands' output after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in self.lines(name, "train")):
            printed = "\n".join(command.text for command in commands)
            assert time.monotonic() < deadline, f"{name} has not reached step {step}\n{printed}"
            time.sleep(0.05)

    def ranks(self) -> list[psutil.Process]:
        """Return the training processes of this folder, in the order of their ranks."""
        found = [process for process in marked(self.mark) if self._rank(process) is not None]
        return sorted(found, key=lambda process: self._rank(process) or 0)

    def _rank(self, process: psutil.Process) -> int | None:
        """Return the process's rank, known from the log file that a rank keeps open, or None if it is no rank."""
        try:
            logs = [
                Path(file.path)
                for file in process.open_files()
                if file.path.startswith(f"{self.folder}/runs/")
            ]
        except psutil.Error:
            return None
        return next((int(log.stem[5:]) for log in logs if log.name.startswith("rank_")), None)


def copy_project(project: Path, folder: Path) -> Path:
    """Copy the project without the files of its runs, and return the copy's folder."""
    return Path(
        shutil.copytree(project, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    )


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that were started with this mark, whatever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            is_marked = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it has ended meanwhile, or belongs to somebody else
    return found


def left_after(mark: str, seconds: float) -> list[str]:
    """Return the command lines of the marked processes that are still alive after `seconds`."""
    deadline = time.monotonic() + seconds
    while (processes := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = []
    for process in processes:
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@contextmanager
def all_ended(mark: str) -> Iterator[None]:
    """Kill all processes that were started with this mark when the `with` body ends."""
    try:
        yield
    finally:
        for _ in range(3):  # what is killed may have started more meanwhile
            for process in marked(mark):
                try:
                    process.kill()
                except psutil.Error:
                    continue


def until(is_true: Callable[[], object], what: str, timeout: float) -> None:
    """Wait until `is_true` returns a true value. Raise AssertionError with the text `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.05)


def free_ports(number: int) -> list[int]:
    """Return `number` free ports of the loopback address."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(server.getsockname()[1]) for server in sockets]
    for server in sockets:
        server.close()
    return ports


def own_cores(number: int) -> list[tuple[str, ...]]:
    """Return a command prefix for each of `number` hosts that keeps the host's commands on CPU cores of their own."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[index::number] or cores for index in range(number)]
    return [("taskset", "--cpu-list", ",".join(map(str, share))) for share in shares]

"""Commands as people type them in a project's folder, on one host or several, and the end of all that they start."""

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
"""Relative tolerance of losses: after the steps that the tests train, sums in another order differ by 1e-8 to 1.5e-5
(in float64 by 4e-16), shares of equal weight by more than 3e-3."""
MARK = "DDP_MARK_OF_CLUSTER"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "NODE_RANK", "NNODES", "SLURM_", "SBATCH_", "OMPI_", "PMI")
FOREIGN = (*LAUNCHERS, "OMP_NUM_THREADS", "GLOO_", "NCCL_", "TORCH", "CUDA_VISIBLE_DEVICES", "PYTEST_")


def plain_environment(mark: str) -> dict[str, str]:
    """This process's environment without what a launcher may have set; `mark` lets what is started be found again."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as an activated environment has it
    return kept | {MARK: mark, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def prepare_child() -> None:
    """End with this process, whatever ends it; heed Ctrl-C, which a shell's background jobs do not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Command:
    """One that runs, with its output in a file."""

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str], output: Path) -> None:
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
        """Wait for the end, which must be with this exit code (None: any but 0), and return the output."""
        try:
            found = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.words}: no end within {timeout} s\n{self.text}") from None
        assert found == code if code is not None else found != 0, f"{self.words}: exit code {found}\n{self.text}"
        return self.text


@dataclass
class Host:
    """A folder with a project, and the words in front of a command that run it on this host."""

    folder: Path
    mark: str
    prefix: tuple[str, ...] = ()
    num_started: int = 0

    def start(self, *words: str, **variables: str) -> Command:
        """Start a command in the folder."""
        self.num_started += 1
        output = self.folder / f"output_{self.num_started}.txt"
        return Command([*self.prefix, *words], self.folder, plain_environment(self.mark) | variables, output)

    def python(self, *words: str, **variables: str) -> Command:
        """Start `python run.py …`."""
        return self.start(sys.executable, "run.py", *words, **variables)

    def lines(self, name: str, split: str) -> list[dict[str, Any]]:
        """metrics.jsonl of a run."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in whole if line["split"] == split]

    def summary(self, name: str) -> dict[str, Any]:
        """summary.json of a run."""
        content: dict[str, Any] = json.loads((self.folder / "runs" / name / "summary.json").read_text(encoding="utf-8"))
        return content

    def losses(self, name: str) -> list[float]:
        """The last losses of a run, in training and on the validation set."""
        return [self.lines(name, split)[-1]["loss"] for split in ("train", "validation")]

    def has_trained(self, name: str, world_size: int, losses: list[float]) -> None:
        """Fail unless so many ranks have brought the run to its end, each step once, and to these losses."""
        summary, steps = self.summary(name), [line["step"] for line in self.lines(name, "train")]
        assert (summary["status"], summary["world_size"]) == ("complete", world_size)
        assert steps == sorted(set(steps))
        assert steps[-1] == summary["steps"]
        assert self.losses(name) == pytest.approx(losses, rel=TOLERANCE)

    def wait_for_step(self, name: str, step: int, *commands: Command, timeout: float = 60) -> None:
        """Until the run has logged this step."""
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in self.lines(name, "train")):
            printed = "\n".join(command.text for command in commands)
            assert time.monotonic() < deadline, f"{name} has not reached step {step}\n{printed}"
            time.sleep(0.05)

    def ranks(self) -> list[psutil.Process]:
        """The processes of this folder that train, in the order of their ranks."""
        found = [process for process in marked(self.mark) if self._rank(process) is not None]
        return sorted(found, key=lambda process: self._rank(process) or 0)

    def _rank(self, process: psutil.Process) -> int | None:
        """A rank writes its log in its run's folder."""
        try:
            logs = [Path(file.path) for file in process.open_files() if file.path.startswith(f"{self.folder}/runs/")]
        except psutil.Error:
            return None
        return next((int(log.stem[5:]) for log in logs if log.name.startswith("rank_")), None)


def copy_project(project: Path, folder: Path) -> Path:
    """A copy without what runs have left."""
    return Path(shutil.copytree(project, folder, ignore=shutil.ignore_patterns("runs", "__pycache__")))


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that were started with this mark, whoever their parent is now."""
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
    """The command lines of the marked processes that still live after so long."""
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
    """Kills, when the body is over, all that has been started with this mark."""
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
    """Wait; AssertionError with `what` if it takes too long."""
    deadline = time.monotonic() + timeout
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.05)


def free_ports(number: int) -> list[int]:
    """Ports of the loopback address that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(server.getsockname()[1]) for server in sockets]
    for server in sockets:
        server.close()
    return ports


def own_cores(number: int) -> list[tuple[str, ...]]:
    """Words in front of commands that give several hosts on this machine cores of their own, as real ones have."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[index::number] or cores for index in range(number)]
    return [("taskset", "--cpu-list", ",".join(map(str, share))) for share in shares]

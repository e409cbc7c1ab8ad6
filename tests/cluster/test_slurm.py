"""Tests under SLURM, on two virtual nodes with one disk. srun, a torchrun on each node or run.py starts the ranks."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from .conftest import SAME
from .hosts import Host, copy_project, left_after, until
from .slurm import Slurm

ANYWHERE = ("--gpus-per-node=0", "--cpus-per-task=1")
"""Options for sbatch that replace options in scripts/slurm.sbatch that the tests' nodes cannot fulfil."""
SECONDS_TO_END = 5


@dataclass
class Login:
    """A host on which the tests type SLURM's commands in a project's folder."""

    host: Host
    slurm: Slurm

    def srun(self, *words: str, code: int | None = 0) -> str:
        """Run srun, which must end with this exit code, and return its output."""
        return self.host.start("srun", *words, **self.slurm.variables).ended(code)

    def sbatch(self, *words: str) -> str:
        """Submit a job, and return its id."""
        printed = self.host.start("sbatch", *words, **self.slurm.variables).ended()
        return printed.split()[-1]

    def output(self, job: str) -> str:
        """Return the job's output so far."""
        path = self.host.folder / f"slurm-{job}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def ended(self, job: str, state: str = "COMPLETED", timeout: float = 90) -> str:
        """Wait for the job's end, which must be in this state, and return its output."""
        found = self.slurm.wait_for_end(job, timeout)
        assert found == state, f"{found}: {self.output(job)}"
        return self.output(job)

    def back_in_the_queue(self, job: str, timeout: float) -> None:
        """Wait until the job has requeued itself, and skip the two minutes that SLURM lets such a job wait."""
        try:
            until(
                lambda: self.slurm.job(job)["Restarts"] == "1",
                f"job {job} is back in the queue",
                timeout,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output(job)}") from None
        self.slurm.wait_for(job, ("PENDING",), 10)
        # a node refuses it within the second
        self.slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2")


@pytest.fixture
def image_login(cluster: Slurm, image_project: Path, tmp_path: Path, mark: str) -> Iterator[Login]:
    """Yield a login host with the image example."""
    yield Login(Host(copy_project(image_project, tmp_path / "image"), mark), cluster)
    cluster.cancel_all()


@pytest.fixture
def slow_login(cluster: Slurm, slow_project: Path, tmp_path: Path, mark: str) -> Iterator[Login]:
    """Yield a login host with the slow project."""
    yield Login(Host(copy_project(slow_project, tmp_path / "slow"), mark), cluster)
    cluster.cancel_all()


@pytest.mark.parametrize("shape", [("-N2", "-n2"), ("-N1", "-n2")], ids=["two nodes", "one node"])
def test_ranks_started_by_srun(
    shape: tuple[str, str], image_login: Login, image_losses: list[float]
) -> None:
    image_login.srun(*shape, sys.executable, "run.py", "name=two", *SAME)
    image_login.host.has_trained("two", 2, image_losses)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_script_starts_a_torchrun_on_each_node(
    devices: str, image_login: Login, image_losses: list[float]
) -> None:
    words = f"device_ids={devices}", *SAME
    image_login.ended(image_login.sbatch(*ANYWHERE, "scripts/slurm.sbatch", "name=first", *words))
    image_login.host.has_trained("first", 2 * len(devices.split(",")), image_losses)


def test_run_py_in_a_job_of_one_node_starts_its_ranks_itself(
    image_login: Login, image_losses: list[float]
) -> None:
    command = " ".join([sys.executable, "run.py", "device_ids=cpu,cpu", "name=two", *SAME])
    image_login.ended(image_login.sbatch("--ntasks=2", f"--wrap={command}"))
    image_login.host.has_trained("two", 2, image_losses)


def test_job_that_is_warned_of_its_time_limit_queues_itself(slow_login: Login) -> None:
    """SLURM may warn up to a minute early, so the run may have no step to save yet."""
    short = "--time=1", "--signal=TERM@30"
    job = slow_login.sbatch(*ANYWHERE, *short, "scripts/slurm.sbatch", "model.seconds_per_step=2")
    slow_login.back_in_the_queue(job, timeout=90)
    assert "asked to stop: back to the queue" in slow_login.output(job)


def test_job_that_is_asked_to_stop_while_it_starts_queues_itself(
    slow_login: Login, mark: str
) -> None:
    job = slow_login.sbatch(*ANYWHERE, "scripts/slurm.sbatch")
    until(lambda: any("/run.py" in line for line in left_after(mark, 0)), "a start", 30)
    slow_login.slurm.ask("scancel", "--signal=TERM", job)
    slow_login.back_in_the_queue(job, timeout=30)


def test_job_whose_task_alone_is_asked_to_stop_saves(
    slow_login: Login, slow_losses: list[float]
) -> None:
    """Signal the task alone, as SLURM with proctrack/cgroup does. The SLURM of these tests signals all processes."""
    job = slow_login.sbatch(*ANYWHERE, "scripts/slurm.sbatch")
    slow_login.host.wait_for_step("run", 5)
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "bash" and "run_task" in " ".join(process.info["cmdline"] or []):
            process.send_signal(signal.SIGTERM)
    slow_login.back_in_the_queue(job, timeout=60)
    printed = slow_login.ended(job)
    assert "asked to stop: back to the queue" in printed
    assert "resuming after step" in printed
    slow_login.host.has_trained("run", 2, slow_losses)


def test_preempted_job_saves_and_goes_on_by_itself(
    slow_login: Login, slow_losses: list[float]
) -> None:
    job = slow_login.sbatch(*ANYWHERE, "scripts/slurm.sbatch")
    slow_login.host.wait_for_step("run", 5)
    urgent = slow_login.sbatch(
        "--partition=urgent", "--nodes=2", "--cpus-per-task=2", "--wrap=sleep 1"
    )
    slow_login.back_in_the_queue(job, timeout=60)
    slow_login.ended(urgent)
    printed = slow_login.ended(job)
    assert "asked to stop: back to the queue" in printed
    assert "resuming after step" in printed
    slow_login.host.has_trained("run", 2, slow_losses)


def test_cancelled_job_stays_ended(slow_login: Login, mark: str) -> None:
    job = slow_login.sbatch(*ANYWHERE, "scripts/slurm.sbatch")
    slow_login.host.wait_for_step("run", 5)
    slow_login.slurm.ask("scancel", job)
    slow_login.ended(job, "CANCELLED", timeout=30)
    assert left_after(mark, SECONDS_TO_END) == []
    assert slow_login.slurm.job(job)["Restarts"] == "0"


def test_failed_job_stays_ended(slow_login: Login) -> None:
    words = "model.fault=raise", "model.fault_step=3"
    job = slow_login.sbatch(*ANYWHERE, "scripts/slurm.sbatch", "--max-restarts=0", *words)
    printed = slow_login.ended(job, "FAILED")
    assert len(re.findall(r"^rank 1 \(.*, cpu\) failed:", printed, re.MULTILINE)) == 1, printed
    assert slow_login.slurm.job(job)["Restarts"] == "0"


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_of_srun_ends_the_other(rank: int, slow_login: Login, mark: str) -> None:
    command = slow_login.host.start(
        "srun",
        "-N2",
        "-n2",
        sys.executable,
        "run.py",
        "device_ids=cpu",
        **slow_login.slurm.variables,
    )
    slow_login.host.wait_for_step("run", 5, command)
    slow_login.host.ranks()[rank].send_signal(signal.SIGKILL)
    command.ended(None, timeout=SECONDS_TO_END)
    assert left_after(mark, SECONDS_TO_END) == []


def test_request_to_stop_reaches_ranks_of_srun(slow_login: Login, slow_losses: list[float]) -> None:
    words = ("-N2", "-n2", sys.executable, "run.py", "device_ids=cpu")
    command = slow_login.host.start(
        "srun", "--job-name=stopped", *words, **slow_login.slurm.variables
    )
    slow_login.host.wait_for_step("run", 5, command)
    slow_login.slurm.ask("scancel", "--signal=USR1", "--name=stopped")
    command.ended(None, timeout=30)
    slow_login.srun(*words)
    slow_login.host.has_trained("run", 2, slow_losses)

"""Runs SLURM on this machine: munged, slurmctld and two slurmd, with a folder and ports used by the tests only."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template

from .hosts import all_ended, free_ports, own_cores, plain_environment, prepare_child, until

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def why_not() -> str | None:
    """Return the reason why SLURM cannot run on this machine, or None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"there is no {', '.join(missing)} here (Debian: slurm-wlm, munge)"
    return None if os.getuid() == 0 else "slurmd starts jobs as root only"


@dataclass
class Slurm:
    """A running SLURM. Its commands find it by the environment variables in `variables`."""

    variables: dict[str, str]
    folder: Path

    def ask(self, *command: str) -> str:
        """Run a SLURM command and return its output."""
        environment = plain_environment("") | self.variables
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}{self.logs()}"
        return result.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job as `scontrol show job` prints them."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, states: tuple[str, ...], timeout: float) -> str:
        """Wait until the job is in one of these states, and return its state."""
        until(
            lambda: self.job(number)["JobState"] in states,
            f"job {number} is one of {states}{self.logs()}",
            timeout,
        )
        return self.job(number)["JobState"]

    def wait_for_end(self, number: str, timeout: float) -> str:
        """Wait until the job has ended, and return its final state."""
        return self.wait_for(number, ENDED, timeout)

    def cancel_all(self) -> None:
        """End all jobs, and wait for the nodes to be idle."""
        self.ask("scancel", "--user", _user())
        until(self.is_idle, f"two idle nodes{self.logs()}", 30)

    def is_idle(self) -> bool:
        """Return whether both nodes are idle."""
        command = ["sinfo", "--noheader", "--partition=short", "--format=%D %t"]
        environment = plain_environment("") | self.variables
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        return result.stdout.split() == ["2", "idle"]

    def logs(self) -> str:
        """Return the last 1,500 characters of each daemon's log."""
        ends = [
            path.read_text(encoding="utf-8", errors="replace")[-1500:]
            for path in self.folder.glob("*.log")
        ]
        return "\n" + "\n".join(ends)


@contextmanager
def running_slurm(mark: str) -> Iterator[Slurm]:
    """Yield a SLURM with two idle nodes. End its processes and remove its folder afterwards."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ddp-slurm-", ignore_cleanup_errors=True)
            )
        )
        folder.chmod(0o755)
        stack.enter_context(all_ended(mark))
        slurm = Slurm({"SLURM_CONF": str(_configure(folder))}, folder)
        environment = plain_environment(mark) | slurm.variables | {"PATH": PATH}
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        munged = [
            "munged",
            "--foreground",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
            *files,
        ]
        nodes = [
            [*cores, "slurmd", "-D", "-N", name]
            for name, cores in zip(NODES, own_cores(2), strict=True)
        ]
        for words in (munged, ["slurmctld", "-D"], *nodes):
            stack.enter_context(_daemon(words, environment, folder))
            if words[0] == "munged":
                until((folder / "munge.socket").exists, "munged listens", 10)
        until(slurm.is_idle, f"two idle nodes{slurm.logs()}", 30)
        yield slurm


def _configure(folder: Path) -> Path:
    ports = free_ports(3)
    (folder / "state").mkdir()
    names = ("controller_port", "first_port", "second_port")
    values = {name: str(port) for name, port in zip(names, ports, strict=True)}
    values |= {"host": socket.gethostname().split(".")[0], "user": _user(), "folder": str(folder)}
    template = Template(
        Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8").partition("\n")[2]
    )
    path = folder / "slurm.conf"
    path.write_text(template.substitute(values), encoding="utf-8")
    return path


@contextmanager
def _daemon(words: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    """Run a daemon during the `with` body. The daemon also dies when this process ends for any reason."""
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=prepare_child,  # noqa: PLW1509 - the tests have no threads
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name

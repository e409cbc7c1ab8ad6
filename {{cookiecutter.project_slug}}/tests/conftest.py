"""Test fixtures: a copy of the project, with a small model, where tests run commands as a user would."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = "template_package"
WORKLOAD = Path(__file__).parent / "workload"
TIMEOUT_SECONDS = 120.0
# torch asks the name service who is at the other end of each connection: an answer that is lost costs 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
os.environ.update(DDP_POLICY="off", DDP_CONFIG="")  # rules and settings of a lab

# Every setting that the tests rely on. The defaults in code may be changed.
SETTINGS = """
name: run
seed: 42
device_ids: cpu
strategy: ddp
data: {}
model: {}
loader: {num_workers: auto}
optimizer: {name: adamw, learning_rate: 0.01, weight_decay: 0.01, betas: [0.9, 0.999]}
schedule: {name: cosine, warmup_steps: 0, min_learning_rate: 0.0}
training: {epochs: 3, global_batch_size: 16, micro_batch_size: auto, precision: auto}
evaluation: {every_epochs: 1, metric: loss, mode: min, micro_batch_size: auto}
checkpoint: {every_epochs: 1, keep_last: null}
logging: {every_steps: 1, tracker: none, report: false}
"""


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables that a launcher such as torchrun sets."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    return {key: value for key, value in os.environ.items() if key not in hidden}


def heed_ctrl_c() -> None:
    """Make this process react to Ctrl-C (SIGINT), which the background jobs of a shell ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Session:
    """A process that runs commands one after the other. Its code is in workload/session.py.

    Each command, and each of its ranks, is a process of its own. They start fast, because they are forked from one that
    has already imported torch.
    """

    pid = -1  # of the command that runs, or ran last

    def __init__(self, folder: Path, output: Path) -> None:
        self._folder, self._path = folder, output
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, folder: Path, script: str, words: list[str], **env: str
    ) -> tuple[int | None, str]:
        """Run a command. Return its exit code (None if it does not finish in time) and its output."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        start = self._path.stat().st_size
        command = {"folder": str(folder), "script": script, "words": words, "env": env}
        print(json.dumps(command), file=self._process.stdin, flush=True)
        self.pid = int(self._replies.readline())
        is_answered, *_ = select.select([self._replies], [], [], TIMEOUT_SECONDS)
        reply = self._replies.readline() if is_answered else ""
        if not reply:
            self.close()
        return int(reply) if reply else None, self._path.read_bytes()[start:].decode(
            errors="replace"
        )

    def start(self) -> None:
        """Start the process if it is not running. run() does this automatically."""
        if self._process is not None:
            return
        receiver, sender = os.pipe()
        with self._path.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "session.py", str(sender)],
                cwd=self._folder,
                env=clean_environment() | {"PYTHONIOENCODING": "utf-8"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[sender],
                text=True,
                start_new_session=True,
                preexec_fn=heed_ctrl_c,  # noqa: PLW1509 - the tests have no threads
            )
        os.close(sender)
        self._replies = os.fdopen(receiver)

    def close(self) -> None:
        """Kill the process, which also ends the ranks that it has started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._replies.close()
        self._process = None


def children(pid: int) -> list[int]:
    """Return the ids of the running processes that process `pid` has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def load_config(path: Path, words: Sequence[str]) -> Any:
    """Read a config file and key=value words as `python run.py` does."""
    # imported here, because the helpers above also serve where no project is
    from template_package import config

    return config.load_config(path, words)


@dataclass
class Project:
    """A copy of the project in its own folder, with methods to run commands there and to read their results."""

    folder: Path
    session: Session

    def start(
        self, *words: str, command: Sequence[str] = (), **variables: str
    ) -> subprocess.Popen[str]:
        """Start `python run.py …` as a user does. A `command`, for example torchrun, replaces `python`.

        `words` are the arguments of run.py, and `variables` are added to the environment.
        """
        return subprocess.Popen(
            [*(command or [sys.executable]), "run.py", *words],
            cwd=self.folder,
            env=clean_environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            preexec_fn=heed_ctrl_c,  # noqa: PLW1509 - the tests have no threads
        )

    def run(
        self, *words: str, code: int = 0, command: Sequence[str] = (), script: str = "run"
    ) -> str:
        """Run a script with the arguments `words` and return its output. Fail if its exit code is not `code`.

        If `command` is set, run run.py with it in a new process (see start()). If not, reuse a process, to save time.
        """
        if not command:
            returned, printed = self.session.run(self.folder, script, list(words))
        else:
            process = self.start(*words, command=command)
            try:
                printed = "".join(process.communicate(timeout=TIMEOUT_SECONDS))
                returned = process.returncode
            except subprocess.TimeoutExpired:
                process.kill()
                returned, printed = None, "".join(process.communicate())
        assert returned == code, f"{words}: exit code {returned} (None: no end in time)\n{printed}"
        return printed

    def run_many(self, cases: dict[str, list[str]]) -> None:
        """Do several training runs in turn on the same ranks. `cases` maps each run's name to its arguments."""
        self.run(
            json.dumps([[f"name={name}", *words] for name, words in cases.items()]),
            script="session",
        )

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace the text `old` with `new` in a file of the package."""
        path = self.folder / PACKAGE / file
        text, written_at = path.read_text(encoding="utf-8"), path.stat().st_mtime
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        # Python keeps what it compiled in the same second
        os.utime(path, (written_at + 10, written_at + 10))

    def append(self, file: str, code: str) -> None:
        """Append `code` to a file of the package. Functions in `code` replace earlier ones of the same name."""
        path = self.folder / PACKAGE / file
        text = path.read_text(encoding="utf-8")
        self.edit(file, text, f"{text}\n\n{code}\n")

    def directory(self, name: str) -> Path:
        """Return the run's folder, runs/<name>."""
        return self.folder / "runs" / name

    def lines(self, name: str, split: str = "train") -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl for one split. Leave out samples_per_second, which differs between runs."""
        text = (self.directory(name) / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        return [
            {key: value for key, value in line.items() if key != "samples_per_second"}
            for line in lines
            if line["split"] == split
        ]

    def json(self, name: str, file: str) -> dict[str, Any]:
        """Return the contents of a JSON file in the run's folder."""
        content: dict[str, Any] = json.loads(
            (self.directory(name) / file).read_text(encoding="utf-8")
        )
        return content

    def checkpoint(self, name: str, step: int) -> dict[str, Any]:
        """Load the checkpoint that the run saved at this step."""
        import torch

        path = self.directory(name) / "checkpoints" / f"step_{step:08d}.pt"
        state: dict[str, Any] = torch.load(path, weights_only=True)
        return state

    def rewind(self, name: str, step: int, new_name: str) -> None:
        """Copy a run, omitting checkpoints after `step`, so that the copy looks like a run killed at that step."""
        import torch

        shutil.copytree(self.directory(name), self.directory(new_name))
        for path in (self.directory(new_name) / "checkpoints").glob("*.pt"):
            # 0: it is left
            if torch.load(path, weights_only=True)["step"] > step and (path.stem != "best" or step):
                path.unlink()


def copy_project(folder: Path, workload: Path = WORKLOAD) -> Path:
    """Copy run.py and the package to `folder`, but take model.py and dataset.py from `workload`. Return the folder."""
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "run.py", *WORKLOAD.glob("*.py"), *workload.glob("*.py")):
        shutil.copy(path, folder / PACKAGE if path.name in ("model.py", "dataset.py") else folder)
    (folder / "config.yaml").write_text(SETTINGS, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def template_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def session(template_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    session = Session(template_project, tmp_path_factory.mktemp("session") / "output.txt")
    yield session
    session.close()


@pytest.fixture
def project(
    template_project: Path, session: Session, tmp_path: Path, request: pytest.FixtureRequest
) -> Project:
    """Create a project for one test, at a path that contains a space and Japanese characters.

    If the test file has a `faults` folder beside it, model.py and dataset.py are copied from that folder.
    """
    folder = tmp_path / "my 実験"
    shutil.copytree(template_project, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in request.path.parent.glob("faults/*.py"):
        shutil.copy(path, folder / PACKAGE)
    return Project(folder, session)


def write_config(folder: Path, **sections: Any) -> None:
    """Write these sections to the project's config.yaml. They replace sections of the same name."""
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(content | sections, allow_unicode=True), encoding="utf-8")

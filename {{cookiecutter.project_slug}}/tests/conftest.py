"""A copy of the project with the tests' own model and data, on which the tests type the commands that a user types."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = next(path.parent.name for path in ROOT.glob("*/validation.py"))
WORKLOAD = Path(__file__).parent / "workload"
TIMEOUT_SECONDS = 120.0

SETTINGS = """
name: run
device_ids: cpu
data: {}
model: {}
optimizer: {learning_rate: 0.01}
training: {epochs: 3, global_batch_size: 16}
evaluation: {metric: loss, mode: min}
checkpoint: {keep_last: null}
logging: {every_steps: 1, tracker: none}
"""


def heed_ctrl_c() -> None:
    """Undo that a shell's background jobs ignore SIGINT, and so all that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Project:
    """A generated project in a folder of its own."""

    folder: Path

    def start(
        self, *words: str, command: list[str] | None = None, script: str = "run.py", **variables: str
    ) -> subprocess.Popen[str]:
        """Start `python run.py …` (or another command in front of run.py)."""
        hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
        environment = {key: value for key, value in os.environ.items() if key not in hidden} | variables
        return subprocess.Popen(
            [*(command or [sys.executable]), script, *words],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            preexec_fn=heed_ctrl_c,  # noqa: PLW1509 - the tests have no threads
        )

    def run(self, *words: str, code: int = 0, command: list[str] | None = None, script: str = "run.py") -> str:
        """What the command prints on stdout and stderr; it must end with exit code `code`."""
        process = self.start(*words, command=command, script=script)
        try:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            pytest.fail(f"{words} did not end\n{output}\n{errors}")
        assert process.returncode == code, f"{words}: exit code {process.returncode}\n{output}\n{errors}"
        return output + errors

    def run_many(self, cases: dict[str, list[str]]) -> None:
        """Train under several names, one after the other in the same ranks."""
        self.run(json.dumps([[f"name={name}", *words] for name, words in cases.items()]), script="many_runs.py")

    def session(self, *commands: list[str], codes: list[int]) -> list[str]:
        """What several commands on one rank print, run one after the other in one process."""
        lines = self.run(json.dumps(commands), script="session.py").splitlines()
        results = [json.loads(line) for line in lines if line.startswith("[")]
        assert [code for code, _ in results] == codes, results
        return [printed for _, printed in results]

    def edit(self, file: str, old: str, new: str) -> None:
        """Change a file of the package."""
        path = self.folder / PACKAGE / file
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    def directory(self, name: str) -> Path:
        """runs/<name>"""
        return self.folder / "runs" / name

    def lines(self, name: str, split: str = "train") -> list[dict[str, Any]]:
        """metrics.jsonl of one split, without what depends on the machine's speed."""
        text = (self.directory(name) / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        return [
            {key: value for key, value in line.items() if key != "samples_per_second"}
            for line in lines
            if line["split"] == split
        ]

    def json(self, name: str, file: str) -> dict[str, Any]:
        """A JSON file of the run."""
        content: dict[str, Any] = json.loads((self.directory(name) / file).read_text(encoding="utf-8"))
        return content

    def checkpoint(self, name: str, step: int) -> dict[str, Any]:
        """A checkpoint of the run."""
        import torch

        path = self.directory(name) / "checkpoints" / f"step_{step:08d}.pt"
        state: dict[str, Any] = torch.load(path, weights_only=True)
        return state

    def rewind(self, name: str, step: int, new_name: str) -> None:
        """Copy a run as it would be, had it been killed after the checkpoint of `step`."""
        shutil.copytree(self.directory(name), self.directory(new_name))
        for path in (self.directory(new_name) / "checkpoints").glob("step_*.pt"):
            if int(path.stem[5:]) > step:
                path.unlink()


@pytest.fixture(scope="session")
def template_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.py and the package with the workload's model and data."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "run.py", folder)
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for path in WORKLOAD.glob("*.py"):
        shutil.copy(path, folder / PACKAGE if path.name in ("model.py", "dataset.py") else folder)
    (folder / "config.yaml").write_text(SETTINGS, encoding="utf-8")
    return folder


@pytest.fixture
def project(template_project: Path, tmp_path: Path) -> Project:
    """A project of the test's own; its path has a space and is not ASCII."""
    folder = tmp_path / "my 実験"
    shutil.copytree(template_project, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return Project(folder)


def write_config(folder: Path, **sections: Any) -> None:
    """Add to the project's config.yaml."""
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(content | sections, allow_unicode=True), encoding="utf-8")

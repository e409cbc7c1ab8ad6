"""Test fixtures: a copy of the project with a small model, where tests run commands as a user does."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from template_package.core.config import Config, build_config
from template_package.core.settings import read_command_line

ROOT, PACKAGE = Path(__file__).parents[1], "template_package"
TIMEOUT_SECONDS = 120.0
os.environ.update(DDP_POLICY="off", DDP_CONFIG="")  # rules and settings of a lab
SETTINGS = """
name: run
device_ids: cpu
optimizer: {learning_rate: 0.01}
training: {epochs: 3, global_batch_size: 16}
evaluation: {metric: loss, mode: min}
checkpoint: {every_epochs: 1, keep_last: null}
logging: {every_steps: 1, tracker: none}
"""


def load_config(path: Path, words: list[str]) -> Config:
    """Read a config file and key=value words as `python run.py` does."""
    return build_config(read_command_line(words, path), Config)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without a launcher's variables."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    return {key: value for key, value in os.environ.items() if key not in hidden}


@dataclass
class Project:
    """A copy of the project in a folder of its own."""

    folder: Path

    def start(self, *words: str, command: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        """Start `python run.py WORDS`, or another command in place of `python`."""
        return subprocess.Popen(
            [*(command or (sys.executable,)), "run.py", *words],
            cwd=self.folder,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        )

    def run(self, *words: str, code: int = 0, command: tuple[str, ...] = ()) -> str:
        """Run `python run.py WORDS` and return its output. Fail if its exit code is another one."""
        process = self.start(*words, command=command)
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == code, f"{words}: exit code {process.returncode}\n{output}"
        return output

    def append(self, file: str, code: str) -> None:
        """Append code to a file of the package. Functions in it replace earlier ones."""
        path = self.folder / PACKAGE / file
        path.write_text(path.read_text(encoding="utf-8") + code, encoding="utf-8")

    def directory(self, name: str) -> Path:
        return self.folder / "runs" / name

    def lines(self, name: str, split: str = "train") -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without the speed, which no run repeats."""
        text = (self.directory(name) / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        lines = [line for line in lines if line["split"] == split]
        return [{k: v for k, v in line.items() if k != "samples_per_second"} for line in lines]

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in self.lines(name)]

    def checkpoint(self, name: str, step: int) -> dict[str, Any]:
        path = self.directory(name) / "checkpoints" / f"step_{step:08d}.pt"
        state: dict[str, Any] = torch.load(path, weights_only=True)
        return state


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Copy the project to a path with a space. Its model and data are those of tests/workload."""
    folder = tmp_path / "my project"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=ignored)
    shutil.copy(ROOT / "run.py", folder)
    for name in ("model.py", "dataset.py"):
        shutil.copy(ROOT / "tests" / "workload" / name, folder / PACKAGE)
    (folder / "config.yaml").write_text(SETTINGS, encoding="utf-8")
    return Project(folder)

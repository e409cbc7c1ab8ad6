"""Runs public cases of size=full's suite on a small project, too: its trainer is another one, the core is the same.

All of them, without -k, take ten minutes. Those that need a key of size=full then fail.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baking import bake, plain_environment

CASES = "any_dtype or share_memory or lazy_layers or no_memory or eval_mode or no_tensor"
CASES += " or draws_from or told_and_change or mixed_dtypes or closure"
CASES += " or gathers_unequal or plain_script"
ADDED_TO_CONFTEST = '''

class Session:  # noqa: F811
    """Runs each command in a process of its own: the full project's session imports what a small one lacks."""

    def __init__(self, folder: Path, output: Path) -> None:
        pass

    def run(self, folder: Path, script: str, words: list[str]) -> tuple[int | None, str]:
        process = subprocess.run(
            [sys.executable, f"{script}.py", *words],
            cwd=folder,
            env=clean_environment() | {"PYTHONIOENCODING": "utf-8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
        )
        return process.returncode, process.stdout.decode(errors="replace")

    def close(self) -> None:
        pass


def run_in_small(self: Project, *words: str, **options: Any) -> str:
    own = (word for word in words if not word.startswith(ONLY_IN_FULL))
    return run_in_full(self, *own, **options)


ONLY_IN_FULL = ("training.ema_decay=", "training.check_replicas_every_steps=")
run_in_full, Project.run = Project.run, run_in_small
Project.run_many = lambda self, cases: [self.run(f"name={name}", *cases[name]) for name in cases]
'''


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_public_cases_hold_in_a_small_project(template: Path, tmp_path: Path) -> None:
    project = bake(template, tmp_path, size="small", example="stub", package_name="net")
    shutil.rmtree(project / "tests")
    tests = template / "{{cookiecutter.project_slug}}" / "tests"
    shutil.copytree(tests, project / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in project.glob("tests/**/*.py"):
        text = path.read_text(encoding="utf-8").replace("template_package", "net")
        path.write_text(text, encoding="utf-8")
    conftest = project / "tests" / "conftest.py"
    text = conftest.read_text(encoding="utf-8")
    assert ", report: false}" in text  # a key of size=full
    text = text.replace(", report: false}", "}") + ADDED_TO_CONFTEST
    conftest.write_text(text, encoding="utf-8")
    names = ("public_cases_scores", "public_cases_model", "global_batch")
    files = [f"tests/machinery/test_{name}.py" for name in names]
    words = ["-q", "-p", "no:cacheprovider", "-k", f"({CASES}) and not average and not deepspeed"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *files],
        cwd=project,
        env=plain_environment({"PYTHONDONTWRITEBYTECODE": "1"}),
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) > 40

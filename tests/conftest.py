"""Fixtures: a clean copy of the template, a Python with cookiecutter but without torch, and stand-ins for Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from baking import EXAMPLES, ROOT, export_template

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*_example.py")
    if path.name.split("_")[1] not in EXAMPLES
]
"""Tests of an example that a fork has removed."""
StubPython = Callable[..., str]
# torch asks the name service about the other end of each connection, and a lost answer costs 5 seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in campaigns/ as slow, so that only `make test-all` runs their short version."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "campaigns"):
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def isolated_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Replace the user's settings of cookiecutter and git, so that tests neither read nor change them."""
    folder = tmp_path_factory.mktemp("settings")
    settings = f"replay_dir: {folder}/replay\ncookiecutters_dir: {folder}/cookiecutters\n"
    (folder / "cookiecutter.yaml").write_text(settings, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKIECUTTER_CONFIG", str(folder / "cookiecutter.yaml"))
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        for role in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{role}_NAME", "Tester")
            patch.setenv(f"GIT_{role}_EMAIL", "tester@example.org")
        yield


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def isolated_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install a Python that has cookiecutter and nothing else, as pipx and uvx do. Return its path."""
    python = str(tmp_path_factory.mktemp("isolated") / "bin" / "python")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(Path(python).parents[1])], check=True
    )
    constraints = str(ROOT / "constraints.txt")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "-c",
        constraints,
        "cookiecutter",
    ]
    subprocess.run(pip, check=True)
    return python


@pytest.fixture(scope="session")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder where mypy keeps what it has read of torch, which takes longer than a project."""
    return str(tmp_path_factory.mktemp("mypy"))


@pytest.fixture
def stub_python(tmp_path: Path) -> StubPython:
    """Return a function that makes a stand-in for Python: a script that runs shell lines instead of run.py."""

    def make(
        run_py: str = "exit 1",
        anything_else: str = f'exec "{sys.executable}" "$@"',
        name: str = "stub",
    ) -> str:
        path = tmp_path / "pythons" / name / "python3"
        path.parent.mkdir(parents=True)
        path.write_text(
            f'#!/bin/sh\ncase "$*" in\n*run.py*)\n{run_py}\n;;\n*)\n{anything_else}\n;;\nesac\n',
            encoding="utf-8",
        )
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Mark every process that this test starts, so that processes left behind can be found."""
    monkeypatch.setenv("DDP_MARK_OF_TEST", str(tmp_path))
    return str(tmp_path)


def marked_processes(mark: str) -> list[str]:
    """Return the command lines of a test's processes that still run, even if their parent has ended."""
    found = []
    for process in psutil.process_iter():
        try:
            is_marked = (
                process.pid != os.getpid() and process.environ().get("DDP_MARK_OF_TEST") == mark
            )
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue  # the process has ended meanwhile or belongs to another user
    return found

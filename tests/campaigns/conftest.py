"""Long campaigns of injected faults. `make test` runs short versions, `make campaigns` the whole ones, with reports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from baking import PROJECT, ROOT

REPORTS = ROOT / "build" / "campaigns"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the whole campaigns, which write reports to build/campaigns")


@pytest.fixture
def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long"))


Report = Callable[..., None]
ROWS = pytest.StashKey[list[tuple[str, int, int, int | str]]]()
TEXTS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS], config.stash[TEXTS] = [], []


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Takes a row of the table, and what else is to be told: report(fault, tried, survived, text, seed=of random)."""

    def add(fault: str, tried: int, survived: int, text: str = "", *, seed: int | str = "-") -> None:
        request.config.stash[ROWS].append((fault, tried, survived, seed))
        request.config.stash[TEXTS].extend([text] if text else [])

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table of faults; after `make campaigns`, write it to build/campaigns/ too."""
    rows = config.stash[ROWS]
    if not rows:
        return
    lines = [
        f"| {fault} | {tried} | {survived} | {tried - survived} | {seed} |" for fault, tried, survived, seed in rows
    ]
    table = "\n".join(["| fault | tried | survived | lost | seed |", "|---|---:|---:|---:|---:|", *lines])
    terminalreporter.write_line(f"\n{table}\n")
    if config.getoption("--long"):
        REPORTS.mkdir(parents=True, exist_ok=True)
        version = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
        head = f"`make campaigns` on {date.today()}: {version}, {os.cpu_count()} cores."
        text = "\n\n".join([head, table, *config.stash[TEXTS]])
        (REPORTS / "reliability.md").write_text(text + "\n", encoding="utf-8")
        terminalreporter.write_line(f"written to {REPORTS / 'reliability.md'}")


@pytest.fixture(scope="session")
def project_tests() -> ModuleType:
    """The helpers of the generated project's own tests."""
    path = ROOT / PROJECT / "tests" / "conftest.py"
    spec = importlib.util.spec_from_file_location("project_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_project(project_tests: ModuleType, tmp_path: Path) -> Iterator[Callable[[Path | None], Any]]:
    """Makes a project like those of the generated tests, with this folder's model.py and dataset.py if one is named."""
    sessions = []

    def make(workload: Path | None) -> Any:
        folder = project_tests.copy_project(tmp_path / "project", workload or project_tests.WORKLOAD)
        sessions.append(project_tests.Session(folder, tmp_path / "session.txt"))
        return project_tests.Project(folder, sessions[-1])

    yield make
    for session in sessions:
        session.close()

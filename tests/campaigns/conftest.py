"""Long campaigns of injected faults. `make test` runs short versions, `make campaigns` the whole ones, with reports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture
def report(request: pytest.FixtureRequest, is_long: bool) -> Callable[[str], None]:
    """Prints a text, and writes it to build/campaigns/<test>.md after a long campaign."""

    def write(text: str) -> None:
        print(text)
        if is_long:
            REPORTS.mkdir(parents=True, exist_ok=True)
            (REPORTS / f"{request.node.name}.md").write_text(text + "\n", encoding="utf-8")

    return write


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

"""Campaigns of injected faults. `make test-all` runs short ones; `make campaigns` the long ones, and writes reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from baking import ROOT, bake
from warm import project_tests

REPORTS = ROOT / "build" / "campaigns"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="the whole campaigns, which write reports to build/campaigns",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked as long, unless --long is given."""
    left_out = [item for item in items if item.get_closest_marker("long")]
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long"))


@dataclass
class Tries:
    """Counts the tries of a fault, and keeps the traceback of each failed try."""

    count: int = 0
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def one(self, what: str) -> Iterator[None]:
        """Count the `with` body as one try. Note an exception instead of raising it, so that other tries can follow."""
        self.count += 1
        try:
            yield
        except Exception:
            self.failures.append(f"{what}: {traceback.format_exc()[-3000:]}")


Report = Callable[..., None]
ROWS = pytest.StashKey[list[str]]()
TEXTS = pytest.StashKey[list[str]]()
STARTED = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS], config.stash[TEXTS], config.stash[STARTED] = [], [], time.monotonic()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """Yield a function that adds a row to the table and text to the report: report(fault, tries, text, seed=…).

    `seed` is the seed of the test's random choices. The test fails at its end if any try has failed.
    """
    failures: list[str] = []

    def add(fault: str, tries: Tries, text: str = "", *, seed: int | str = "-") -> None:
        lost = len(tries.failures)
        row = f"| {fault} | {tries.count} | {tries.count - lost} | {lost} | {seed} |"
        request.config.stash[ROWS].append(row)
        request.config.stash[TEXTS].extend([text] if text else [])
        failures.extend(f"{fault}, {failure}" for failure in tries.failures)

    yield add
    assert not failures, "\n\n".join(failures[:5])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table of faults. With --long (`make campaigns`), also write the report to build/campaigns/."""
    rows = config.stash[ROWS]
    if not rows:
        return
    table = "\n".join(
        ["| fault | tried | survived | lost | seed |", "|---|---:|---:|---:|---:|", *rows]
    )
    terminalreporter.write_line(f"\n{table}\n")
    if config.getoption("--long"):
        minutes = round((time.monotonic() - config.stash[STARTED]) / 60)
        versions = (
            f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
        )
        head = (
            f"# Faults that were injected\n\n`make campaigns` ({minutes} minutes) on {date.today()}: {versions}, "
            f"{os.cpu_count()} cores. The seed is that of Python's `random.Random`; - stands where nothing is drawn."
        )
        failed = [
            outcome.nodeid
            for kind in ("failed", "error")
            for outcome in terminalreporter.getreports(kind)
        ]
        failed = [f"Failed: {', '.join(failed)}"] if failed else []
        REPORTS.mkdir(parents=True, exist_ok=True)
        text = "\n\n".join([head, *failed, table, *config.stash[TEXTS]])
        (REPORTS / "reliability.md").write_text(text + "\n", encoding="utf-8")
        terminalreporter.write_line(f"written to {REPORTS / 'reliability.md'}")


@pytest.fixture
def make_project(tmp_path: Path, template: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes a project like those of the generated tests.

    The function's argument is a folder with the project's model.py and dataset.py, or None for those of the tests.
    With size="small" it is a new project of that size, in which run() needs a `command`.
    """
    sessions, helpers = [], project_tests()

    def make(workload: Path | None, size: str = "full") -> Any:
        workload = workload or helpers.WORKLOAD
        if size == "small":
            folder = bake(template, tmp_path, size="small")
            for name in ("model.py", "dataset.py"):
                shutil.copy(workload / name, folder / "ddp_experiment")
            known = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            settings = yaml.safe_load(helpers.SETTINGS)
            for section in filter(lambda name: isinstance(known[name], dict), {*known}):
                own = settings.get(section, {})
                settings[section] = {key: own[key] for key in own if key in known[section]}
            settings = {key: settings[key] for key in settings if key in known}
            settings |= {"data": {}, "model": {}}
            (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        else:
            folder = helpers.copy_project(tmp_path / "project", workload)
        sessions.append(helpers.Session(folder, tmp_path / "session.txt"))
        return helpers.Project(folder, sessions[-1])

    yield make
    for session in sessions:
        session.close()

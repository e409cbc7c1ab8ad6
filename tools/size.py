"""Prints the sizes of new projects with their budgets, and exits with 1 if a size is over budget. Type `make size`.

A budget may only be lowered, unless DECISIONS.md gives a reason to raise it.

Lines are those of .py files, as `wc -l` counts them. A module is a file of the project's package. Some numbers come
from a real run on two CPU ranks, in a project without tools: SPY logs every call of the project's functions, in every
process of the run.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from baking import export_template, plain_environment, run_cookiecutter

PACKAGE = "ddp_experiment"
RUN = ["run.py", "device_ids=cpu,cpu", "training.max_steps=4"]
SPY = """
import os, sys
LOG = os.open(os.environ["SPY_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
PROJECT = os.getcwd() + os.sep
def log_call(frame, event, argument):
    code = frame.f_code
    if event in ("call", "return") and code.co_filename.startswith(PROJECT):
        function = code.co_name if code.co_flags & 1 else "<import>"  # the body of a file or class has no such flag
        os.write(LOG, f"{os.getpid()} {function} {code.co_filename[len(PROJECT):]}\\n".encode())
sys.setprofile(log_call)  # processes that are forked later keep it
"""


class Call(NamedTuple):
    """A line of SPY's log: a function's call, or its return. The function `<import>` is the code of a file or class."""

    pid: str
    function: str
    file: str


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        template = export_template(Path(folder, "template"))
        without_tools = make_project(template, Path(folder, "none"), tools="none")
        project = make_project(template, Path(folder, "all"), tools="all")
        calls = log_run(without_tools, Path(folder, "spy"))
        rows = [
            Row("package and run.py, tools=none", package_files(without_tools), 44, 5065),
            Row("package and run.py, tools=all", package_files(project), 54, 6055),
            Row("tests", python_files(project, "tests"), 12, 1700),
            Row("modules that a run on two ranks imports", imported_modules(without_tools, calls), 34, 4395),
            Row("files that one train_step() passes", files_of_a_step(calls), 7, 1085),
            Row("modules that trainer.py imports", modules_of_trainer(without_tools), 16),
            Row("files from the command to run_fn", files_before_run_fn(calls), 10),
        ]
        return int(
            not all(
                [
                    print_row(row, project if "=all" in row.title or row.title == "tests" else without_tools)
                    for row in rows
                ]
            )
        )


class Row(NamedTuple):
    """A group of files, with budgets for the number of files and for the sum of their lines."""

    title: str
    files: Iterable[str]
    max_files: int
    max_lines: int | None = None


def print_row(row: Row, project: Path) -> bool:
    """Print the numbers of files and lines. If a number is over budget, list the files and return False; else True."""
    lines_of = {file: num_lines(project / file) for file in row.files}
    lines = sum(lines_of.values())
    is_over = len(lines_of) > row.max_files
    text = f"{row.title:<41}{len(lines_of):>3} of {row.max_files} files"
    if row.max_lines is not None:
        is_over = is_over or lines > row.max_lines
        text += f"{lines:>8,} of {row.max_lines:,} lines"
    print(text + ("   OVER BUDGET:" if is_over else ""))
    for file in sorted(lines_of, key=lambda file: -lines_of[file]) if is_over else []:
        print(f"{lines_of[file]:>10,} {file}")
    return not is_over


def python_files(project: Path, folder: str) -> list[str]:
    return [path.relative_to(project).as_posix() for path in (project / folder).rglob("*.py")]


def package_files(project: Path) -> list[str]:
    return ["run.py", *python_files(project, PACKAGE)]


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def make_project(template: Path, output_dir: Path, tools: str) -> Path:
    settings = {"COOKIECUTTER_CONFIG": os.devnull}
    result = run_cookiecutter(template, output_dir, settings, smoke_test="skip", tools=tools, package_name=PACKAGE)
    assert result.returncode == 0, result.stdout
    return next(output_dir.iterdir())


def log_run(project: Path, spy: Path) -> list[Call]:
    """Train on two ranks. Return the calls of the project's functions, in the order in which they happened."""
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(SPY, encoding="utf-8")  # Python imports it when it starts
    environment = plain_environment({"SPY_LOG": str(spy / "log"), "PYTHONPATH": str(spy)})
    subprocess.run([sys.executable, *RUN], cwd=project, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (spy / "log").read_text(encoding="utf-8").splitlines()
    return [Call(*line.split(maxsplit=2)) for line in lines]


def imported_modules(project: Path, calls: Iterable[Call]) -> set[str]:
    """Return the files of the package that any process of the run imported, except empty files."""
    files = {call.file for call in calls if call.function == "<import>" and call.file.startswith(PACKAGE)}
    return {file for file in files if num_lines(project / file)}


def files_of_a_step(calls: Iterable[Call]) -> set[str]:
    """Return the files whose functions are called in one rank's second train_step(), except model.py and dataset.py."""
    rank = next(call.pid for call in calls if call.function == "train_step")
    of_rank = [call for call in calls if call.pid == rank]
    calls_and_returns = [i for i, call in enumerate(of_rank) if call.function == "train_step"]
    files = {call.file for call in of_rank[calls_and_returns[2] : calls_and_returns[3]]}
    return files - {f"{PACKAGE}/model.py", f"{PACKAGE}/dataset.py"}


def files_before_run_fn(calls: Iterable[Call]) -> set[str]:
    """Return the files whose functions were called by any process before run_fn, except model.py and dataset.py.

    Entries such as `<import>` and `<listcomp>` do not count, so files that are only imported are left out.
    """
    files = set()
    for call in calls:
        if call.function == "run_fn":
            break
        if not call.function.startswith("<"):
            files.add(call.file)
    return files - {f"{PACKAGE}/model.py", f"{PACKAGE}/dataset.py"}


def modules_of_trainer(project: Path) -> set[str]:
    """Return the files of the package that trainer.py's import statements name, except empty files."""
    trainer, files = project / PACKAGE / "trainer.py", set()
    for node in ast.walk(ast.parse(trainer.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            module = trainer.parent.joinpath(*(node.module or "").split("."))
            files |= {module / "__init__.py", module.with_suffix(".py")}
            files |= {module / f"{alias.name}.py" for alias in node.names}
    return {str(file.relative_to(project)) for file in files if file.is_file() and num_lines(file)}


if __name__ == "__main__":
    sys.exit(main())

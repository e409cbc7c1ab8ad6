"""Prints the size of fresh projects beside the budget, and exits with 1 if a number is over budget: `make size`.

A line is a line of a .py file, as `wc -l` counts it; a module is a file of the project's package. Some numbers come
from a real run on two CPU ranks: SPY logs every call of a function of the project in every process of the run.
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
    """A line of the log: a call of a function, or the return from it. `<import>` executes the body of a file."""

    pid: str
    function: str
    file: str


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        template = export_template(Path(folder, "template"))
        without_tools = make_project(template, Path(folder, "none"), tools="none")
        project = make_project(template, Path(folder, "all"), tools="all")
        calls = log_run(project, Path(folder, "spy"))
        is_within_budget = [
            print_row("package and run.py, tools=none", without_tools, package_files(without_tools), 44, 4200),
            print_row("package and run.py, tools=all", project, package_files(project), 54, 5000),
            print_row("tests", project, python_files(project, "tests"), 12, 1700),
            print_row("modules that a run on two ranks imports", project, imported_modules(project, calls), 34, 3700),
            print_row("files that one train_step() passes", project, files_of_a_step(calls), 7, 1000),
            print_row("modules that trainer.py imports", project, modules_of_trainer(project), 16),
            print_row("files from the command to run_fn", project, files_before_run_fn(calls), 10),
        ]
    return int(not all(is_within_budget))


def print_row(title: str, project: Path, files: Iterable[str], max_files: int, max_lines: int | None = None) -> bool:
    """Prints the number of files and of their lines, and if one is over budget, the files. True if none is."""
    lines_of = {file: num_lines(project / file) for file in files}
    lines = sum(lines_of.values())
    is_over = len(lines_of) > max_files or (max_lines is not None and lines > max_lines)
    text = f"{title:<41}{len(lines_of):>3} of {max_files} files"
    text += f"{lines:>8,} of {max_lines:,} lines" if max_lines is not None else ""
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
    """Trains on two ranks. Returns the calls of the project's functions in the order in which they happened."""
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(SPY, encoding="utf-8")  # Python imports it when it starts
    environment = plain_environment({"SPY_LOG": str(spy / "log"), "PYTHONPATH": str(spy)})
    subprocess.run([sys.executable, *RUN], cwd=project, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (spy / "log").read_text(encoding="utf-8").splitlines()
    return [Call(*line.split(maxsplit=2)) for line in lines]


def imported_modules(project: Path, calls: Iterable[Call]) -> set[str]:
    """Every file of the package that any process of the run executed, except empty ones."""
    files = {call.file for call in calls if call.function == "<import>" and call.file.startswith(PACKAGE)}
    return {file for file in files if num_lines(project / file)}


def files_of_a_step(calls: Iterable[Call]) -> set[str]:
    """The files whose functions were called during the second train_step() of one rank, except the user's own files."""
    rank = next(call.pid for call in calls if call.function == "train_step")
    of_rank = [call for call in calls if call.pid == rank]
    calls_and_returns = [i for i, call in enumerate(of_rank) if call.function == "train_step"]
    files = {call.file for call in of_rank[calls_and_returns[2] : calls_and_returns[3]]}
    return files - {f"{PACKAGE}/model.py", f"{PACKAGE}/dataset.py"}


def files_before_run_fn(calls: Iterable[Call]) -> set[str]:
    """The files whose functions were called in any process before the first run_fn, except the user's own files.

    `<import>`, `<listcomp>` and their like do not count: a file that is only imported is not on the way.
    """
    files = set()
    for call in calls:
        if call.function == "run_fn":
            break
        if not call.function.startswith("<"):
            files.add(call.file)
    return files - {f"{PACKAGE}/model.py", f"{PACKAGE}/dataset.py"}


def modules_of_trainer(project: Path) -> set[str]:
    """The files of the package that the import statements of trainer.py name, except empty ones."""
    trainer, files = project / PACKAGE / "trainer.py", set()
    for node in ast.walk(ast.parse(trainer.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            module = trainer.parent.joinpath(*(node.module or "").split("."))
            files |= {module / "__init__.py", module.with_suffix(".py")}
            files |= {module / f"{alias.name}.py" for alias in node.names}
    return {str(file.relative_to(project)) for file in files if file.is_file() and num_lines(file)}


if __name__ == "__main__":
    sys.exit(main())

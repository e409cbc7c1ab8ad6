"""Prints the sizes of new projects with their budgets, and exits with 1 if a size is over budget. Type `make size`.

With --warn, as in a fork, it exits with 0. A budget may only be lowered, unless DECISIONS.md gives a reason to raise
it. An aim is what a budget should become.

Code is counted in tokens: names, operators, numbers and strings. So comments and blanks cost nothing, a docstring costs
one token, and dense lines gain nothing. A module is a file of the project's package. Some numbers come from a real run
on two CPU ranks, in either size: SPY logs each call of the project's functions, in every process.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from baking import export_template, plain_environment, run_cookiecutter

PACKAGE = "ddp_experiment"
# of package and run.py in each size; README.md names them
MAX_TOKENS = {
    "small": 35_920,
    "full": 60_280,
}
USERS_FILES = {f"{PACKAGE}/model.py", f"{PACKAGE}/dataset.py"}
# An epoch of hundreds of steps, without logging, evaluation or checkpoint: SIGTERM always meets the same loop.
RUN = [
    "run.py",
    "device_ids=cpu,cpu",
    "training.global_batch_size=2",
    "logging.every_steps=1000000",
]
RUN += ["evaluation.every_epochs=null", "checkpoint.every_epochs=null"]
STEPS_BEFORE_SIGTERM = 5
SPY = """
import os, sys, threading
LOG = os.open(os.environ["SPY_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
PROJECT = os.getcwd() + os.sep
def log_call(frame, event, argument):
    code = frame.f_code
    if event in ("call", "return") and code.co_filename.startswith(PROJECT):
        function = code.co_name if code.co_flags & 1 else "<import>"  # the body of a file or class has no such flag
        file = code.co_filename[len(PROJECT):]
        os.write(LOG, f"{os.getpid()} {threading.get_native_id()} {function} {file}\\n".encode())
sys.setprofile(log_call)  # processes that are forked later keep it
threading.setprofile(log_call)
"""
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Names of NamedTuple and os that are public, although they begin with an underscore."""


class Call(NamedTuple):
    """A line of SPY's log: a function's call, or its return. The function `<import>` is the code of a file or class."""

    process: str
    thread: str
    function: str
    file: str


class Size(NamedTuple):
    """A number with its budget and its aim, if it has them."""

    value: float
    unit: str
    budget: float | None = None
    aim: float | None = None

    def __str__(self) -> str:
        budget = "" if self.budget is None else f" of {self.budget:,}"
        aim = "" if self.aim in (None, self.budget) else f" (aim {self.aim:,})"
        return f"{self.value:,}{budget} {self.unit}{aim}"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        template = export_template(Path(folder, "template"))
        small = make_project(template, Path(folder, "small"), size="small")
        full = make_project(template, Path(folder, "full"), size="full")
        small_package, full_package = package_files(small), package_files(full)
        trainer = {"run.py", f"{PACKAGE}/trainer.py", *python_files(small, f"{PACKAGE}/core")}
        is_within_budget = [
            print_files(
                "small: package and run.py",
                small,
                small_package,
                30,
                MAX_TOKENS["small"],
                aim_tokens=13_000,
            ),
            print_files(
                "small: run.py, trainer.py and core",
                small,
                trainer,
                max_tokens=32_010,
                aim_tokens=10_000,
                max_lines=4_640,
            ),
            print_files("small: tests", small, python_files(small, "tests"), max_tokens=5_110),
            *print_flows(
                "small", small, Path(folder, "spy-small"), max_to_step=21, max_from_sigterm=13
            ),
            print_files(
                "full: package and run.py",
                full,
                full_package,
                61,
                MAX_TOKENS["full"],
                aim_tokens=42_000,
            ),
            print_files(
                "full: tests", full, python_files(full, "tests"), 15, 12_660, aim_tokens=11_500
            ),
            print_files(
                "full: modules that trainer.py imports", full, modules_of_trainer(full), 24
            ),
            *print_flows(
                "full", full, Path(folder, "spy-full"), max_to_step=37, max_from_sigterm=21
            ),
            print_density("small: a line of code in the package", small, small_package, 9.0),
            print_density("full: a line of code in the package", full, full_package, 10.3),
            print_density(
                "full: a line of code in the tests", full, python_files(full, "tests"), 11.0
            ),
            print_private_names(full, full_package, 10),
        ]
        return exit_code(is_within_budget, sys.argv[1:])


def exit_code(is_within_budget: Iterable[bool], words: Sequence[str]) -> int:
    """Return 1 if a size is over budget, unless the words of the command line have --warn."""
    if all(is_within_budget):
        return 0
    if "--warn" in words:
        print("warning: the template is over the budget of the one that it was forked from")
        return 0
    return 1


def print_flows(
    title: str, project: Path, spy: Path, max_to_step: int, max_from_sigterm: int
) -> Iterator[bool]:
    """Run the project, and print the files that one reads to follow it. Yield for each row if it is within budget."""
    calls = log_run(project, spy)
    to_step = files_before(calls, "train_step") | files_of_a_step(calls)
    yield print_files(
        f"{title}: from the command to a step's end", project, to_step, max_to_step, aim_files=14
    )
    after = files_after_sigterm(calls)
    yield print_files(
        f"{title}: from SIGTERM to the run's end", project, after, max_from_sigterm, aim_files=8
    )


def print_files(
    title: str,
    project: Path,
    files: Iterable[str],
    max_files: int | None = None,
    max_tokens: int | None = None,
    max_lines: int | None = None,
    aim_files: int | None = None,
    aim_tokens: int | None = None,
) -> bool:
    """Print the number of files and of their tokens and lines. If one is over budget, list the files, return False."""
    tokens = {file: len(token_lines(project / file)) for file in files}
    lines = sum(len((project / file).read_text(encoding="utf-8").splitlines()) for file in tokens)
    num_files = Size(len(tokens), "files", max_files, aim_files)
    num_tokens = Size(sum(tokens.values()), "tokens", max_tokens, aim_tokens)
    is_within = print_sizes(title, num_files, num_tokens, Size(lines, "lines", max_lines))
    if not is_within:
        for file in sorted(tokens, key=lambda file: -tokens[file]):
            print(f"{tokens[file]:>10,} {file}")
    return is_within


def print_density(title: str, project: Path, files: Iterable[str], max_density: float) -> bool:
    """Print the mean number of tokens on lines where a token begins. Return False if it is over budget."""
    lines = [token_lines(project / file) for file in files]
    mean = sum(map(len, lines)) / sum(len(set(of_file)) for of_file in lines)
    return print_sizes(title, Size(round(mean, 2), "tokens", max_density, 9.0))


def print_private_names(project: Path, files: Iterable[str], max_names: int) -> bool:
    """Print the private names of libraries and where they stand. Return False if there are more than `max_names`."""
    names = private_names(project, files)
    is_within = print_sizes("private names of libraries", Size(len(names), "names", max_names))
    for name, places in sorted(names.items()):
        print(f"    {name:<28}{', '.join(places)}")
    return is_within


def print_sizes(title: str, *sizes: Size) -> bool:
    is_within = all(size.budget is None or size.value <= size.budget for size in sizes)
    columns = "".join(f"{size!s:<38}" for size in sizes)
    print(f"{title:<42}{columns.rstrip()}" + ("" if is_within else "   OVER BUDGET"))
    return is_within


def python_files(project: Path, folder: str) -> list[str]:
    return sorted(path.relative_to(project).as_posix() for path in (project / folder).rglob("*.py"))


def package_files(project: Path) -> list[str]:
    return ["run.py", *python_files(project, PACKAGE)]


def token_lines(file: Path) -> list[int]:
    """Return the number of the line where each token begins. An f-string is one token under every version of Python."""
    # from Python 3.12 on, an f-string is several tokens between FSTRING_START and FSTRING_END
    lines, depth = (
        [],
        0,
    )
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            kind = tokenize.tok_name[token.type]
            is_start = kind == "FSTRING_START"
            if depth == 0 and (is_start or kind in ("NAME", "OP", "NUMBER", "STRING")):
                lines.append(token.start[0])
            depth += is_start
            depth -= kind == "FSTRING_END"
    return lines


def private_names(project: Path, files: Iterable[str]) -> dict[str, list[str]]:
    """Return {name: places} of the names that begin with one underscore and belong to a library or to Python.

    Those are attributes and imported names that the package does not define itself, as a function, class, argument,
    variable or `self._name = …`, and strings such as "_name" and "torch._dynamo".
    Not seen: a library's attribute whose name the package defines too, names that are put together while running, and
    what is fragile without an underscore: undocumented names, classes' inner order of calls, ctypes, files in /proc.
    """
    trees = {file: ast.parse((project / file).read_text(encoding="utf-8")) for file in files}
    own = {defined_name(node) for tree in trees.values() for node in ast.walk(tree)}
    places: dict[str, list[str]] = {}
    for file, tree in trees.items():
        found = {(line, name) for node in ast.walk(tree) for line, name in foreign_names(node, own)}
        for line, name in sorted(found):
            places.setdefault(name, []).append(f"{file.removeprefix(f'{PACKAGE}/')}:{line}")
    return places


def defined_name(node: ast.AST) -> str | None:
    """Return the name of a function, class, argument, variable or attribute of `self` that this node defines."""
    match node:
        case (
            ast.FunctionDef(name=name)
            | ast.AsyncFunctionDef(name=name)
            | ast.ClassDef(name=name)
            | ast.arg(arg=name)
        ):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(
            ast.Name("self"), name, ast.Store()
        ):
            return name
    return None


def foreign_names(node: ast.AST, own: Collection[str | None]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) for each private name in the node, except attributes in `own` and imports of the package."""
    match node:
        case ast.Attribute(attr=name) if name not in own:
            dotted = [name]
        case ast.ImportFrom(module=module, level=0):
            dotted = [str(module), *(alias.name for alias in node.names)]
        case ast.Import():
            dotted = [alias.name for alias in node.names]
        case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
            dotted = [text]
        case _:
            return
    for name in ".".join(dotted).split("."):
        if re.match("_[^_]", name) and name not in DOCUMENTED:
            yield node.lineno, name


def make_project(template: Path, output_dir: Path, size: str) -> Path:
    settings = {"COOKIECUTTER_CONFIG": os.devnull}
    result = run_cookiecutter(
        template, output_dir, settings, smoke_test="skip", size=size, package_name=PACKAGE
    )
    assert result.returncode == 0, result.stdout
    return next(output_dir.iterdir())


def log_run(project: Path, spy: Path) -> list[Call]:
    """Train on two ranks, and send SIGTERM to the command. Return the calls of the project's functions, in their order.

    The call `<SIGTERM>` stands where the signal was sent.
    """
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(SPY, encoding="utf-8")  # Python imports it when it starts
    log, console = spy / "log", (spy / "console").open("w", encoding="utf-8")
    log.touch()
    environment = plain_environment({"SPY_LOG": str(log), "PYTHONPATH": str(spy)})
    command = [sys.executable, *RUN]
    with (
        console,
        subprocess.Popen(
            command, cwd=project, env=environment, stdout=console, stderr=console
        ) as process,
    ):
        # Two ranks each log a step's call and its return.
        while (
            process.poll() is None
            and log.read_text().count(" train_step ") < 4 * STEPS_BEFORE_SIGTERM
        ):
            time.sleep(0.1)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{process.pid} {process.pid} <SIGTERM> run.py\n")
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM, (spy / "console").read_text(encoding="utf-8")
    return [Call(*line.split(maxsplit=3)) for line in log.read_text(encoding="utf-8").splitlines()]


def files_of_a_step(calls: Iterable[Call]) -> set[str]:
    """Return the files whose functions are called in one rank's second train_step(), except the user's two."""
    thread = next(call.thread for call in calls if call.function == "train_step")
    of_rank = [call for call in calls if call.thread == thread]
    calls_and_returns = [i for i, call in enumerate(of_rank) if call.function == "train_step"]
    return {
        call.file for call in of_rank[calls_and_returns[2] : calls_and_returns[3]]
    } - USERS_FILES


def files_before(calls: Iterable[Call], function: str) -> set[str]:
    """Return the files whose functions were called by any process before `function` was, except the user's two.

    Entries such as `<import>` and `<listcomp>` do not count, so files that are only imported are left out.
    """
    before = takewhile(lambda call: call.function != function, calls)
    return {call.file for call in before if not call.function.startswith("<")} - USERS_FILES


def files_after_sigterm(calls: Iterable[Call]) -> set[str]:
    """Return the files whose functions were called, or returned, in the command or a rank after SIGTERM was sent to it.

    What happens inside train_step() does not count: the ranks take a few more steps, as they took those before.
    """
    calls = list(calls)
    processes = {call.process for call in calls if call.function in ("train_step", "<SIGTERM>")}
    files: set[str] = set()
    is_sent, in_step = False, set[str]()
    for call in calls:
        is_sent = is_sent or call.function == "<SIGTERM>"
        if call.function == "train_step":
            in_step ^= {call.thread}  # its call, then its return
        elif (
            is_sent
            and call.process in processes
            and call.thread not in in_step
            and call.function[0] != "<"
        ):
            files.add(call.file)
    return files - USERS_FILES


def modules_of_trainer(project: Path) -> set[str]:
    """Return the files of the package that trainer.py's import statements name, except empty files."""
    trainer, files = project / PACKAGE / "trainer.py", set()
    for node in ast.walk(ast.parse(trainer.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            module = trainer.parent.joinpath(*(node.module or "").split("."))
            files |= {module / "__init__.py", module.with_suffix(".py")}
            files |= {module / f"{alias.name}.py" for alias in node.names}
    return {
        str(file.relative_to(project)) for file in files if file.is_file() and file.stat().st_size
    }


if __name__ == "__main__":
    sys.exit(main())

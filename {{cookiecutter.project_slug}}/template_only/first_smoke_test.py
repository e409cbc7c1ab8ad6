"""Runs the smoke test of a new project: finds a Python that has the dependencies, and runs `run.py smoke` with it.

The template's hook calls run_first_test() and removes this folder from the new project. python_search.py finds the
Python, `run.py smoke` does the testing, and processes.py runs the commands and ends what they have started. This file
decides and prints the result: PASSED, FAILED, NOT RUN, SKIPPED or INTERRUPTED. It runs in cookiecutter's Python, 3.10
or newer, without any library.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

from processes import STOP_SIGNALS, run
from python_search import candidate_pythons, find_base, find_python, read_requirements

SMOKE_SECONDS = 300.0
VERDICTS = ("smoke test: PASSED", "smoke test: FAILED")
KEEP_TORCH = """
import re, sys, sysconfig
from importlib.metadata import version
from pathlib import Path
packages = sysconfig.get_path("purelib", "venv", {"base": ".venv"})
Path(packages, "own_torch.pth").write_text("\\n".join(path for path in sys.path if path.endswith("-packages")) + "\\n")
file, torch = Path("constraints.txt"), version("torch")
pins = re.sub("(?m)^torch==.*", f"torch=={torch.partition('+')[0]}", file.read_text(encoding="utf-8"))
file.write_text(pins, encoding="utf-8", newline="\\n")
print(f"torch {torch} of {sys.executable} stays: .venv sees it, constraints.txt names it, none is downloaded.")
"""
"""Lets .venv see the packages of the Python that runs this, also if that is a venv itself (--system-site-packages would
show it the packages behind that one). In constraints.txt, pip would otherwise find a torch to download."""
LAUNCHER_VARIABLE = re.compile(r"(\w*_)?(RANK|WORLD_SIZE)$|(MASTER|TORCHELASTIC|SLURM|OMPI|PMI)_")


def run_first_test(project: Path, mode: str) -> str:
    """Test the project. mode: the answer to the question `smoke_test`. Return the result, which is also printed."""
    if mode == "skip" or os.environ.get("DDP_TEMPLATE_SMOKE") == "0":
        return print_result("SKIPPED", "as you asked; `python run.py smoke` runs it")
    for number in STOP_SIGNALS:  # closing the terminal ends the test as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    try:
        return find_python_and_test(project, mode)
    except KeyboardInterrupt:
        shutil.rmtree(project / ".smoke", ignore_errors=True)
        return print_result(
            "INTERRUPTED",
            f"the project is kept in {project}; `python run.py smoke` repeats the test",
        )
    except Exception as error:  # a problem of this machine must not remove the project
        return print_result("NOT RUN", f"{type(error).__name__}: {error}")


def print_result(state: str, reason: str) -> str:
    """Print the state with its reason. Return the state."""
    print(f"smoke test: {state} ({reason})", flush=True)
    return state


def find_python_and_test(project: Path, mode: str) -> str:
    requirements = read_requirements((project / "pyproject.toml").read_text(encoding="utf-8"))
    candidates, has_torch = candidate_pythons(os.environ), False
    if mode == "venv":
        is_named = bool(os.environ.get("DDP_TEMPLATE_PYTHON"))
        python, has_torch, notes = find_base(candidates, requirements["torch"], is_named)
    else:
        python, notes = find_python(candidates, requirements)
    for note in notes:
        print(f"  {note}", flush=True)
    if python is None:
        wanted = (
            "Python 3.11 or newer"
            if mode == "venv"
            else "Python 3.11 or newer that has the dependencies"
        )
        return print_result("NOT RUN", f"no {wanted} was found")
    if mode == "venv":
        python, problem = install(project, python, has_torch)
        if problem:
            return print_result("NOT RUN", problem)
    print(f"Smoke test with {python}:", flush=True)
    return test(project, python)


def test(project: Path, python: str) -> str:
    """Run `run.py smoke`. Return PASSED only if the command printed that word and ended with exit code 0."""
    seconds = time_limit()
    environment = {
        key: value for key, value in os.environ.items() if not LAUNCHER_VARIABLE.match(key)
    }
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    code, output = run([python, "run.py", "smoke"], environment, seconds, held_back=VERDICTS)
    verdict = next(
        (line for line in reversed(output.splitlines()) if line.startswith(VERDICTS)), ""
    )
    if code == 0 and verdict.startswith(VERDICTS[0]):
        print(verdict, flush=True)
        return "PASSED"
    if code is None:
        print_result(
            "FAILED",
            f"timed out after {seconds:g} s; DDP_TEMPLATE_SMOKE_TIMEOUT sets another limit",
        )
    elif code and verdict.startswith(VERDICTS[1]):
        print(verdict)
    else:
        print_result("FAILED", f"`run.py smoke` ended with exit code {code} and no result")
    log = project / ".smoke" / "log.txt"
    if not log.exists():  # the test was killed, or failed too early to write one
        log.parent.mkdir(exist_ok=True)
        log.write_text(output, encoding="utf-8")
    elif "Traceback" not in output:
        print(
            "".join(
                f"  | {line}\n"
                for line in excerpt(log.read_text(encoding="utf-8", errors="replace"))
            ),
            end="",
        )
    # cookiecutter removes the project, but the log should stay
    if os.environ.get("DDP_TEMPLATE_STRICT") == "1":
        log = Path(shutil.copy(log, f"{project}-smoke-log.txt"))
    print(f"  the whole log: {log}", flush=True)
    return "FAILED"


def time_limit() -> float:
    with contextlib.suppress(ValueError):
        return float(os.environ.get("DDP_TEMPLATE_SMOKE_TIMEOUT", ""))
    return SMOKE_SECONDS


def excerpt(log: str) -> list[str]:
    """Return up to 30 lines of the log from its first traceback on. If there is none, return the last 15 lines."""
    lines = log.splitlines()
    first = next(
        (i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), None
    )
    return lines[-15:] if first is None else lines[first : first + 30]


def install(project: Path, python: str, has_torch: bool) -> tuple[str, str]:
    """Make .venv and install the project there. Return the new Python, and an error message, which may be empty.

    has_torch: `python` has a torch, which .venv takes as it is.
    """
    new_python = str(
        project / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    )
    pip, environment = (
        [new_python, "-m", "pip", "install", "-c", "constraints.txt"],
        dict(os.environ),
    )
    commands = [[python, "-m", "venv", ".venv"], [*pip, "torch"], [*pip, "-e", "."]]
    if has_torch:
        commands[1] = [python, "-c", KEEP_TORCH]
        # NVIDIA's containers pin numpy and others there; .venv gets its own
        environment.pop("PIP_CONSTRAINT", None)
    else:
        print(
            "Installing into .venv. PyTorch is a large download: gigabytes with CUDA.", flush=True
        )
    for command in commands:
        shown = shlex.join(command).replace(shlex.quote(KEEP_TORCH), "'…'")
        if has_torch and "PIP_CONSTRAINT" in os.environ:
            shown = f"PIP_CONSTRAINT= {shown}"
        print(f"$ {shown}", flush=True)
        code, _ = run(command, environment)
        if code != 0:
            return new_python, f"`{shown}` ended with exit code {code}"
    return new_python, ""

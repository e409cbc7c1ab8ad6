"""The smoke test at birth: finds a Python that has the dependencies and has it run `run.py smoke`.

Used by the template's hook, which then removes this folder from the new project. What is tested is left to
`run.py smoke`, the search to python_search.py, an orderly end to processes.py. Here it is decided and said what came of
it: PASSED, FAILED, NOT RUN, SKIPPED or INTERRUPTED. Runs in cookiecutter's Python, 3.10 or newer, without any library.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

from processes import ENDINGS, run
from python_search import candidate_pythons, find_python, read_requirements

SMOKE_SECONDS = 300.0
VERDICTS = ("smoke test: PASSED", "smoke test: FAILED")
LAUNCHER_VARIABLE = re.compile(r"(\w*_)?(RANK|WORLD_SIZE)$|(MASTER|TORCHELASTIC|SLURM|OMPI|PMI)_")


def run_first_test(project: Path, mode: str) -> str:
    """Tests the project as the answer `smoke_test` asks for, and returns the state that it printed."""
    if mode == "skip" or os.environ.get("DDP_TEMPLATE_SMOKE") == "0":
        return say("SKIPPED", "as you asked; `python run.py smoke` runs it")
    for number in ENDINGS:  # a closed terminal ends the test as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    try:
        return find_install_test(project, mode)
    except KeyboardInterrupt:
        shutil.rmtree(project / ".smoke", ignore_errors=True)
        return say("INTERRUPTED", f"the project is kept in {project}; `python run.py smoke` repeats the test")
    except Exception as error:  # whatever is odd about this machine, the project stays
        return say("NOT RUN", f"{type(error).__name__}: {error}")


def say(state: str, reason: str) -> str:
    print(f"smoke test: {state} ({reason})", flush=True)
    return state


def find_install_test(project: Path, mode: str) -> str:
    requirements = read_requirements((project / "pyproject.toml").read_text(encoding="utf-8")) if mode == "auto" else {}
    python, notes = find_python(candidate_pythons(os.environ), requirements)
    for note in notes:
        print(f"  {note}", flush=True)
    if python is None:
        which = "that has the dependencies " if requirements else ""
        return say("NOT RUN", f"no Python 3.11 or newer {which}was found")
    if mode == "venv":
        python, problem = install(project, python)
        if problem:
            return say("NOT RUN", problem)
    print(f"Smoke test with {python}:", flush=True)
    return test(project, python)


def test(project: Path, python: str) -> str:
    """Runs `run.py smoke`; only its own word together with exit code 0 is a PASSED."""
    seconds = time_limit()
    environment = {key: value for key, value in os.environ.items() if not LAUNCHER_VARIABLE.match(key)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    code, output = run([python, "run.py", "smoke"], environment, seconds, held_back=VERDICTS)
    verdict = next((line for line in reversed(output.splitlines()) if line.startswith(VERDICTS)), "")
    if code == 0 and verdict.startswith(VERDICTS[0]):
        print(verdict, flush=True)
        return "PASSED"
    if code is None:
        say("FAILED", f"timed out after {seconds:g} s; DDP_TEMPLATE_SMOKE_TIMEOUT sets another limit")
    elif code and verdict.startswith(VERDICTS[1]):
        print(verdict)
    else:
        say("FAILED", f"`run.py smoke` ended with exit code {code} and no result")
    log = project / ".smoke" / "log.txt"
    if not log.exists():  # it was ended, or did not come far enough to write one
        log.parent.mkdir(exist_ok=True)
        log.write_text(output, encoding="utf-8")
    elif "Traceback" not in output:
        print("".join(f"  | {line}\n" for line in excerpt(log.read_text(encoding="utf-8", errors="replace"))), end="")
    if os.environ.get("DDP_TEMPLATE_STRICT") == "1":  # cookiecutter will remove the project, the log should stay
        log = Path(shutil.copy(log, f"{project}-smoke-log.txt"))
    print(f"  the whole log: {log}", flush=True)
    return "FAILED"


def time_limit() -> float:
    with contextlib.suppress(ValueError):
        return float(os.environ.get("DDP_TEMPLATE_SMOKE_TIMEOUT", ""))
    return SMOKE_SECONDS


def excerpt(log: str) -> list[str]:
    """The lines of a log that say most: from its first traceback on, else the last ones."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), None)
    return lines[-15:] if first is None else lines[first : first + 30]


def install(project: Path, python: str) -> tuple[str, str]:
    """Makes .venv and installs the project there. Returns its Python and what went wrong, if something did."""
    new_python = str(project / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    pip = [new_python, "-m", "pip", "install", "-c", "constraints.txt"]
    print("Installing into .venv; PyTorch is a large download, gigabytes where it comes with CUDA.", flush=True)
    for command in ([python, "-m", "venv", ".venv"], [*pip, "torch"], [*pip, "-e", "."]):
        print(f"$ {shlex.join(command)}", flush=True)
        code, _ = run(command, os.environ)
        if code != 0:
            return new_python, f"`{shlex.join(command)}` ended with exit code {code}"
    return new_python, ""

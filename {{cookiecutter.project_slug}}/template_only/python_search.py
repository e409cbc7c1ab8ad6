"""Finds a Python that can run the new project: looks in the usual places and asks each Python which libraries it has.

Cookiecutter's own Python seldom has torch, because pipx and uvx isolate it. So the user's Python must be found.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

OLDEST_PYTHON = (3, 11)
# Without its tracker's library, a run warns and writes metrics.jsonl only.
TRACKERS = {"tensorboard", "wandb", "mlflow", "trackio"}
PROBE = """
import json, sys
found = {}
if sys.version_info >= (3, 11):
    from importlib import metadata
    for name in sys.argv[1:]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
print(json.dumps([list(sys.version_info[:3]), found]))
"""


def candidate_pythons(environment: Mapping[str, str]) -> list[str]:
    """Return the paths of Pythons that may have the dependencies, the likeliest first, without duplicates."""
    paths: list[str | None] = []
    if named := environment.get("DDP_TEMPLATE_PYTHON"):
        # The hook runs in the new folder, but a relative path was typed in another one.
        paths.append(shutil.which(named) or os.path.join(environment.get("PWD", ""), named))
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if prefix := environment.get(variable):
            places = [
                os.path.join(prefix, place)
                for place in ("bin/python", "Scripts/python.exe", "python.exe")
            ]
            paths.append(next(filter(os.path.exists, places), places[0]))
    paths.append(sys.executable)
    # every entry, because uvx puts its own Python first
    for folder in environment.get("PATH", "").split(os.pathsep):
        paths += [shutil.which(name, path=folder) for name in ("python3", "python")]
    # Not realpath: the Pythons of several virtual environments are links to one file.
    return list(dict.fromkeys(os.path.abspath(path) for path in paths if path))


def read_requirements(pyproject: str) -> dict[str, str]:
    """Return {library: lowest version} for the project's dependencies. pyproject: the text of pyproject.toml."""
    block = re.search(r"^dependencies = \[\n(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    assert block, "pyproject.toml lists no dependencies"
    return dict(re.findall(r'"([\w.-]+)>=([\d.]+)"', block[1]))


def find_python(
    candidates: Iterable[str], requirements: Mapping[str, str]
) -> tuple[str | None, list[str]]:
    """Return the first Python that can run the project, or None, and notes: why others cannot, what it lacks itself."""
    notes = []
    for python in candidates:
        try:  # reads versions without importing torch, which would take a second or two
            probe = [python, "-c", PROBE, *requirements]
            output = subprocess.check_output(
                probe,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                timeout=20,
            )
            version, found = json.loads(output.splitlines()[-1])
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            notes.append(f"{python} does not run")
            continue
        missing = missing_requirements(requirements, found)
        if tuple(version) < OLDEST_PYTHON:
            notes.append(f"{python} is Python {'.'.join(map(str, version))}, older than 3.11")
        elif set(missing) - TRACKERS:
            notes.append(f"{python} lacks {', '.join(missing)}")
        else:
            return python, notes + [
                f"{python} lacks {name}: metrics.jsonl only" for name in missing
            ]
    return None, notes


def find_base(
    candidates: Sequence[str], lowest_torch: str, is_named: bool
) -> tuple[str | None, bool, list[str]]:
    """Return the Python to make .venv with, or None, whether it has a torch to keep, and notes.

    The first Python with a torch that is new enough is taken, else the first one of all. If the user has named the
    first candidate, no other one's torch is taken.
    """
    python, notes = find_python(candidates[:1] if is_named else candidates, {"torch": lowest_torch})
    notes = [note for note in notes if not note.endswith(" lacks torch")]
    if python is not None:
        return python, True, notes
    python, more = find_python(candidates, {})
    return python, False, list(dict.fromkeys(notes + more))


def missing_requirements(requirements: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    missing = []
    for name, lowest in requirements.items():
        if name not in found:
            missing.append(name)
        elif is_older(found[name], lowest):
            missing.append(f"{name}>={lowest} (it has {found[name]})")
    return missing


def is_older(version: str, lowest: str) -> bool:
    """Return True if `version` is older than the release `lowest`, by pip's rules.

    The torch of a container may be a preview: 2.9.0a0+50eac811a6.nv25.9 is newer than 2.8 and older than 2.9.
    """
    parts = re.match(r"([\d.]*\d)[-_.]?(a|b|c|rc|pre|dev)?", version)
    if parts is None:
        return True
    numbers, wanted = ([int(number) for number in text.split(".")] for text in (parts[1], lowest))
    numbers += [0] * (len(wanted) - len(numbers))
    wanted += [0] * (len(numbers) - len(wanted))
    return numbers < wanted or (numbers == wanted and parts[2] is not None)

"""Python, torch, the other libraries and the config: is what pyproject.toml and config.yaml ask for there?"""

from __future__ import annotations

import platform
import re
import tomllib
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..validation import ConfigError
from .findings import Finding, Surroundings, in_one_line

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def check_python(_: Surroundings) -> list[Finding]:
    """This Python against requires-python."""
    lowest = _project().get("requires-python", "").removeprefix(">=")
    detail = f"{platform.python_version()}{f', {lowest} or newer wanted' if lowest else ''}"
    if _is_older(platform.python_version(), lowest):
        return [Finding("python", "broken", detail, f"Make the environment anew: python{lowest} -m venv .venv")]
    return [Finding("python", "ok", detail)]


def check_torch(around: Surroundings) -> list[Finding]:
    """Can torch be imported, and is it new enough?"""
    lowest, remedy = _lowest_versions().get("torch", ""), "Type: python -m pip install -c constraints.txt torch"
    try:
        found: str = around.torch.result().__version__
    except Exception as error:
        anew = remedy.replace("install", "install --force-reinstall", 1)
        return [Finding("torch", "broken", f"cannot be imported: {in_one_line(error)}", anew)]
    detail = f"{found}{f', {lowest} or newer wanted' if lowest else ''}"
    return [Finding("torch", "broken", detail, remedy) if _is_older(found, lowest) else Finding("torch", "ok", detail)]


def check_libraries(_: Surroundings) -> list[Finding]:
    """The other dependencies of pyproject.toml."""
    problems = []
    lowest_versions = {name: lowest for name, lowest in _lowest_versions().items() if name != "torch"}
    for name, lowest in lowest_versions.items():
        try:
            if _is_older(found := version(name), lowest):
                problems.append(f"{name} is {found}, {lowest} or newer wanted")
        except PackageNotFoundError:
            problems.append(f"{name} is missing")
    if problems:
        remedy = "Type: python -m pip install -c constraints.txt -e ."
        return [Finding("libraries", "warning", "; ".join(problems), remedy)]
    words = f"{len(lowest_versions)} new enough" if lowest_versions else f"{PYPROJECT.name} names none"
    return [Finding("libraries", "ok", words)]


def check_config(around: Surroundings) -> list[Finding]:
    """Does the config load? One finding for each mistake, in the words that train would use."""
    around.torch.result()  # without it there is no config either
    try:
        config = around.config.result()
    except ConfigError as error:
        found = [re.fullmatch(r"(.*?[^.])(?:\. (.*))?", line) for line in str(error).splitlines()]
        return [Finding("config", "broken", *(part or "" for part in match.groups())) for match in found if match]
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({Path(place.filename).name}, line {place.lineno})"
        return [Finding("config", "broken", f"{in_one_line(error)}{where}", "Mend that file.")]
    return [Finding("config", "ok", f"name={config.name}, strategy={config.strategy}")]


def _project() -> dict[str, Any]:
    if not PYPROJECT.is_file():
        return {}
    project: dict[str, Any] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    return project


def _lowest_versions() -> dict[str, str]:
    """{"torch": "2.13", …}: the dependencies with their lower bounds."""
    pattern = r"([\w.-]+)(?:\[.*?\])?\s*(?:>=\s*([\d.]+))?"
    wanted = [re.match(pattern, requirement) for requirement in _project().get("dependencies", [])]
    return {match[1]: match[2] or "" for match in wanted if match}


def _is_older(found: str, lowest: str) -> bool:
    """Compares the numbers alone: 2.13.0+cu126 is as new as 2.13."""
    ours, bound = (re.match(r"[\d.]*", text) for text in (found, lowest))
    assert ours is not None and bound is not None
    return [int(part) for part in re.findall(r"\d+", ours[0])] < [int(part) for part in re.findall(r"\d+", bound[0])]

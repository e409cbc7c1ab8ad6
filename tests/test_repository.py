"""Tests of the repository: pinned versions agree, Python holds no Jinja, questions are in order and have prompts."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from baking import PROJECT, ROOT

QUESTIONS = (
    "project_name project_slug package_name description author_name example device_ids size extra_strategies "
    "furniture tracker license smoke_test"
).split()


def read_toml(path: Path) -> dict[str, dict[str, object]]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def pinned(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}


def names(requirements: object) -> set[str]:
    assert isinstance(requirements, list)
    return {re.split("[<>=!]", requirement)[0].lower() for requirement in requirements}


def test_both_constraints_files_hold_the_same_versions() -> None:
    ours, theirs = pinned(ROOT / "constraints.txt"), pinned(ROOT / PROJECT / "constraints.txt")
    assert theirs.items() <= ours.items()
    assert theirs["torch"] == "2.13.0"
    assert len(theirs) > 30


def test_every_direct_dependency_is_pinned() -> None:
    project = read_toml(ROOT / PROJECT / "pyproject.toml")["project"]
    assert isinstance(extras := project["optional-dependencies"], dict)
    assert names(project["dependencies"]) | names(extras["dev"]) <= set(
        pinned(ROOT / PROJECT / "constraints.txt")
    )
    groups = read_toml(ROOT / "pyproject.toml")["dependency-groups"]
    assert names(groups["dev"]) <= set(pinned(ROOT / "constraints.txt"))


def test_every_question_is_in_order_and_has_a_prompt() -> None:
    context = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    assert [key for key in context if not key.startswith("_")] == QUESTIONS
    assert list(context["__prompts__"]) == QUESTIONS
    for key, value in context.items():
        if isinstance(value, list) and key != "_copy_without_render":
            assert set(context["__prompts__"][key]) - {"__prompt__"} <= set(value)


def test_python_of_the_project_holds_no_jinja(template: Path) -> None:
    sources = [*(template / PROJECT).rglob("*.py")]
    assert len(sources) > 20
    for source in sources:
        assert not re.search(r"\{\{ ?cookiecutter|\{%", source.read_text(encoding="utf-8")), source


def test_hooks_hold_jinja_in_one_line_only(template: Path) -> None:
    for hook in (template / "hooks").glob("*.py"):
        text = hook.read_text(encoding="utf-8")
        assert text.count("cookiecutter | tojson") == 1
        before, _, after = text.partition("# {% raw %}\n")
        assert after.endswith("# {% endraw %}\n")
        assert before.count("{{") + before.count("{%") == 1

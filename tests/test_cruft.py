"""Tests of cruft: create, check, diff and update a project, from a git repository that holds the template."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baking import PROJECT, bake, files_of, plain_environment

ANSWERS = {
    "project_name": 'A "quoted" \\ 名 😀',
    "project_slug": "my-net",
    "package_name": "net",
    "description": 'with "quotes" and \\',
    "example": "stub",
    "size": "full",
    "tracker": "none",
    "device_ids": "0,2",
}


def run(command: list[str], folder: Path) -> str:
    result = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=plain_environment(),
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout + (result.stderr if "create" in command else "")


def cruft(folder: Path, *arguments: str) -> str:
    return run([sys.executable, "-c", "from cruft._cli import app; app()", *arguments], folder)


def commit(folder: Path) -> None:
    run(["git", "init", "--quiet", "--initial-branch=main"], folder)
    run(["git", "add", "--all"], folder)
    run(["git", "commit", "--quiet", "--message=state"], folder)


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Path:
    commit(folder := Path(shutil.copytree(template, tmp_path / "template.git-clone")))
    return folder


def test_project_follows_the_template(repository: Path, tmp_path: Path) -> None:
    context = json.dumps({**ANSWERS, "smoke_test": "auto"})
    output = cruft(tmp_path, "create", str(repository), "--no-input", "--extra-context", context)
    assert "smoke test: SKIPPED" in output
    project = tmp_path / "my-net"
    by_cookiecutter = files_of(bake(repository, tmp_path / "plain", **ANSWERS))
    del by_cookiecutter[".template.json"]  # cruft keeps the answers itself
    assert {
        name: data for name, data in files_of(project).items() if name != ".cruft.json"
    } == by_cookiecutter

    commit(project)
    cruft(project, "check")
    assert cruft(project, "diff").strip() == ""

    readme, trainer = (
        repository / PROJECT / "README.md",
        repository / PROJECT / "template_package" / "new_module.py",
    )
    readme.write_text(
        readme.read_text(encoding="utf-8") + "\nA new line of the template.\n", encoding="utf-8"
    )
    trainer.write_text('"""New."""\n\nNAME = "template_package"\n', encoding="utf-8")
    (repository / PROJECT / "examples" / "stub" / "model.py").open("a", encoding="utf-8").write(
        "# new\n"
    )
    commit(repository)
    model = project / "net" / "config.py"
    model.write_text(
        "# the user's own line\n" + model.read_text(encoding="utf-8"), encoding="utf-8"
    )
    commit(project)

    with pytest.raises(AssertionError):
        cruft(project, "check")
    cruft(project, "update", "--skip-apply-ask")
    commit(project)
    cruft(project, "check")
    after = {name: data for name, data in files_of(project).items() if not name.startswith(".git/")}
    assert set(after) == {*by_cookiecutter, ".cruft.json", "net/new_module.py"}
    assert after["net/new_module.py"] == b'"""New."""\n\nNAME = "net"\n'
    assert after["README.md"].endswith(b"\nA new line of the template.\n")
    assert after["net/model.py"].endswith(b"# new\n")
    assert after["net/config.py"].startswith(b"# the user's own line\n")
    assert after["config.yaml"] == by_cookiecutter["config.yaml"]

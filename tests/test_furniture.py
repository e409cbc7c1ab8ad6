"""Tests of the files for CI, containers and editors, in a generated project and in the template itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_own_tests import CHECKS

from baking import ROOT, bake, plain_environment


@pytest.fixture(scope="module")
def project(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bake(template, tmp_path_factory.mktemp("furniture"), example="stub", package_name="net")


def steps_of(workflow: Path, job: str) -> dict[str, str]:
    """Return {name of the step: its commands} for one job."""
    steps = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"][job]["steps"]
    return {step.get("name", step["run"]): step["run"] for step in steps if "run" in step}


def run_as_actions_do(
    script: str, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = plain_environment({"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables})
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, encoding="utf-8"
    )


def test_steps_of_the_workflow_pass_in_a_new_project(project: Path) -> None:
    """Run ruff, and let pytest collect tests. Other tests run the project's own tests, its smoke test and mypy."""
    steps = steps_of(project / ".github" / "workflows" / "test.yml", "test")
    commands = [command for command in steps.values() if "pip install" not in command]
    assert commands == ["ruff check .", "mypy .", "pytest", "python run.py smoke"]
    assert ["mypy", "."] in CHECKS
    for command in ("ruff check .", "pytest"):
        result = run_as_actions_do(
            command, project, PYTEST_ADDOPTS="--collect-only -p no:cacheprovider"
        )
        assert result.returncode == 0, f"{command}:\n{result.stdout}{result.stderr}"


def test_torch_without_cuda_is_installed_in_the_version_of_the_constraints(project: Path) -> None:
    """Run the commands that install PyTorch, but with `echo` in place of `pip install`: nothing is downloaded."""
    workflow = steps_of(project / ".github" / "workflows" / "test.yml", "test")
    (install,) = (command for command in workflow.values() if "whl/cpu" in command)
    post_create = json.loads(
        (project / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8")
    )
    dockerfile = (project / "Dockerfile").read_text(encoding="utf-8")
    (in_image,) = re.findall(r"^RUN (python -m pip .*?) &&", dockerfile, re.MULTILINE)
    (pin,) = re.findall(
        r"^torch==.*", (project / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    for command in (install, in_image, post_create["postCreateCommand"].partition("&& pip")[0]):
        echo = re.sub(r"(python -m )?pip install", "echo", command)
        words = run_as_actions_do(echo, project, TORCH="cpu", PATH="/usr/bin:/bin").stdout.split()
        assert {pin, "https://download.pytorch.org/whl/cpu"} <= set(words)


def test_pre_commit_takes_the_ruff_of_the_constraints(project: Path) -> None:
    hooks = yaml.safe_load((project / ".pre-commit-config.yaml").read_text(encoding="utf-8"))[
        "repos"
    ][0]["hooks"]
    ruff = next(hook for hook in hooks if hook["id"] == "ruff")
    assert (
        ruff["additional_dependencies"][0]
        in (project / "constraints.txt").read_text(encoding="utf-8").split()
    )


def test_editor_starts_one_rank_and_two(project: Path) -> None:
    """Let the project itself read the arguments, because it refuses a wrong key or value."""
    launch = json.loads((project / ".vscode" / "launch.json").read_text(encoding="utf-8"))
    given = [
        [word.replace("${input:name}", "debug") for word in it["args"]]
        for it in launch["configurations"]
    ]
    assert [item["id"] for item in launch["inputs"]] == ["name"]
    code = """import json, sys
from pathlib import Path
from net.core.settings import read_command_line
for words in json.loads(sys.argv[1]):
    config = read_command_line(words, default_config=Path("config.yaml")).load_config()
    print(config.name, config.device_ids, config.loader.num_workers)"""
    output = run_as_actions_do(f"python -c '{code}' '{json.dumps(given)}'", project).stdout
    assert output == "debug ['cpu'] 0\ndebug ['cpu', 'cpu'] 0\n"


def test_image_gets_what_its_build_copies(project: Path) -> None:
    ignored = (project / ".dockerignore").read_text(encoding="utf-8").splitlines()
    dockerfile = (project / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        name
        for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE)
        for name in line.split()
    }
    assert copied == {"constraints.txt", "pyproject.toml", "README.md", "."}
    assert not (copied | {"net", "run.py", "config.yaml", "tests"}) & set(ignored)
    assert "touch net/__init__.py" in dockerfile


@pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed")
def test_uv_installs_what_pip_installs(project: Path, tmp_path: Path) -> None:
    """Let uv resolve the project with the constraints, in a dry run that installs none of its packages."""
    copy = Path(shutil.copytree(project, tmp_path / "project"))
    result = run_as_actions_do("uv venv && uv pip install --dry-run -c constraints.txt -e .", copy)
    assert result.returncode == 0, result.stderr
    assert "+ torch==2.13.0" in result.stderr


# ---- the template's own


def read_version() -> str:
    return str(json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))["_version"])


def test_first_section_of_the_changelog_is_the_version() -> None:
    headings = re.findall(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert headings[0] == read_version()
    assert len(set(headings)) == len(headings) > 1


@pytest.mark.parametrize("tag", ["right", "v9.9.9"])
def test_release_needs_the_tag_of_the_version(template: Path, tmp_path: Path, tag: str) -> None:
    steps = steps_of(template / ".github" / "workflows" / "release.yml", "release")
    version = read_version()
    copy = Path(shutil.copytree(template, tmp_path / "template"))
    check = steps["Compare the tag with the version, and take its section of the changelog"]
    result = run_as_actions_do(check, copy, TAG=f"v{version}" if tag == "right" else tag)
    assert (result.returncode == 0) == (tag == "right"), result.stderr
    if tag == "right":
        notes = (copy / "notes.md").read_text(encoding="utf-8")
        assert notes.startswith("- ") and "\n## " not in notes
        assert notes in (copy / "CHANGELOG.md").read_text(encoding="utf-8")


def test_workflow_tests_every_python_and_runs_commands_of_the_makefile(template: Path) -> None:
    workflow: Any = yaml.safe_load(
        (template / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    )
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == [
        "3.11",
        "3.12",
        "3.13",
        "3.14",
    ]
    targets = re.findall(
        r"^([\w-]+):.*## ", (template / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    commands = "\n".join(
        step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]
    )
    named = set(re.findall(r"make (?:PYTHON=\S+ )?([a-z-]+)", commands))
    assert {"test", "test-all", "test-cluster"} <= named <= set(targets)


def test_issue_forms_ask_for_something(template: Path) -> None:
    forms = [
        path
        for path in (template / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
        if path.stem != "config"
    ]
    assert len(forms) == 2
    for form in forms:
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert content["name"] and content["description"]
        assert any(field.get("validations", {}).get("required") for field in content["body"])

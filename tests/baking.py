"""Makes projects from a clean copy of the template, and lists the files that each should hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "{{cookiecutter.project_slug}}"
QUESTIONS: dict[str, Any] = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
CHOICES: dict[str, list[str]] = {
    key: value for key, value in QUESTIONS.items() if isinstance(value, list) and key[0] != "_"
}
"""{question: its answers}, of the multiple-choice questions."""
EXAMPLES = CHOICES["example"]
CONDITION = re.compile(rb"^(.*)# only with (\w+)=(\S+)$", re.MULTILINE)
"""Pattern of a line that a project has only with one answer; alone on its line, it stands for the file."""
ONLY_WITH = {
    "accelerate": [("extra_strategies", "accelerate")],
    "deepspeed|/zero/": [("extra_strategies", "deepspeed")],
    "horovod": [("extra_strategies", "horovod")],
    "library_environment": [
        ("extra_strategies", name) for name in ("accelerate", "deepspeed", "horovod")
    ],
    r"^\.(?!git|template)|^\.github|^Dockerfile|^AGENTS|^CITATION": [("furniture", "all")],
    "tensorboard": [("tracker", "tensorboard")],
    "wandb": [("tracker", "wandb")],
    "mlflow": [("tracker", "mlflow")],
    "trackio": [("tracker", "trackio")],
}
"""{pattern of file names: (question, answer) pairs, one of which a project needs to hold such a file}"""
IN_BOTH_SIZES = re.compile(
    r"[^/]+|\.\w+/.+"  # the files of the top folder, and those for CI, containers and editors
    r"|template_package/(__init__|dataset|errors|files|lab|model|policy|(core|tracking)/\w+"
    r"|commands/(__init__|evaluate|predict|smoke))\.py"
    r"|scripts/(multi_node|torchrun|update_from_template)\.sh"
    r"|tests/(test_|workload/)(dataset|model)\.py"
)
"""Pattern of the files that size=small shares with size=full."""
SETTINGS = {"size": "full", "smoke_test": "skip"}
"""What bake() answers unless a test says otherwise. Most tests are about what only the full size has."""
FOREIGN = (
    "DDP_CONFIG",
    "DDP_POLICY",
    "DDP_TEMPLATE_",
    "CONDA_",
    "VIRTUAL_ENV",
    "PYTEST_",
    "PYTHONPYCACHEPREFIX",
    "PYTHONDONTWRITEBYTECODE",
)


def export_template(destination: Path) -> Path:
    """Copy the files that git tracks or would track. Leave out caches, because cookiecutter would copy them, too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(command, cwd=ROOT, encoding="utf-8").split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # a tracked file may have been deleted
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name)
    return destination


def bake(template: Path, output_dir: Path, overwrite: bool = False, /, **answers: str) -> Path:
    """Make a project without running its smoke test. Return the project's folder."""
    options = {
        "no_input": True,
        "overwrite_if_exists": overwrite,
        "extra_context": {**SETTINGS, **answers},
    }
    return Path(cookiecutter(str(template), output_dir=str(output_dir), **options))


def cookiecutter_command(
    template: Path, output_dir: Path, answers: Mapping[str, str], python: str
) -> list[str]:
    """Return the command that makes a project. Its size is full, unless the answers say otherwise."""
    pairs = [f"{key}={value}" for key, value in {"size": "full", **answers}.items()]
    return [
        python,
        "-m",
        "cookiecutter",
        str(template),
        "--no-input",
        "-o",
        str(output_dir),
        *pairs,
    ]


def run_cookiecutter(
    template: Path,
    output_dir: Path,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    /,
    **answers: str,
) -> subprocess.CompletedProcess[str]:
    """Run cookiecutter as a user does, in an environment that names no other Python. stdout includes stderr."""
    return subprocess.run(
        cookiecutter_command(template, output_dir, answers, python),
        check=False,
        env=plain_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=280,
    )


def plain_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, without the variables that the hook or pytest reads, and with `changes`.

    A policy of the fork is not asked.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    return kept | {"DDP_POLICY": "off"} | dict(changes or {})


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def default_answers() -> dict[str, str]:
    """Return bake()'s answers to the multiple-choice questions, and the default name of the package."""
    first = {key: values[0] for key, values in CHOICES.items()}
    return first | SETTINGS | {"package_name": "ddp_experiment"}


def example_files(template: Path, example: str) -> dict[str, Path]:
    """Return {name in the project: file} for the files of an example. Those of the first one are in place."""
    files = {}
    for path in (template / PROJECT / "examples" / example).iterdir():
        if path.name not in {"README.txt", "config.yaml"} and "__pycache__" not in path.name:
            code = "tests/" if path.name.startswith("test_") else "template_package/"
            files[f"{code if path.suffix == '.py' else ''}{path.name}"] = path
    return files


def changes_of_example(template: Path, example: str) -> dict[str, dict[str, Any]]:
    """Return the sections of config.yaml that an example changes; for the first one, all sections."""
    path = template / PROJECT / "examples" / example / "config.yaml"
    path = path if path.is_file() else template / PROJECT / "config.yaml"
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {key: value for key, value in sections.items() if isinstance(value, dict)}


def expected_files(template: Path, answers: Mapping[str, str]) -> set[str]:
    """Return the names of the files that a project with these answers holds.

    These rules match parts of names, while the hook lists whole paths. So a file that the hook forgets is noticed.
    """
    files = files_of(template / PROJECT)
    names = set(files)
    not_of_a_project = ("examples/", "small/", "template_only/", "tests/machinery/")
    chosen = {name for name in names if not name.startswith(not_of_a_project)}
    if answers["size"] == "small":
        small = {name.removeprefix("small/") for name in names if name.startswith("small/")}
        chosen = {name for name in chosen if IN_BOTH_SIZES.fullmatch(name)} | small
    chosen.update(example_files(template, answers["example"]))
    if answers["size"] == "small":
        chosen.discard("tests/test_sentences.py")  # it reads reports
    for name in chosen & names:
        for before, question, answer in CONDITION.findall(files[name]):
            if not before.strip() and answers[question.decode()] not in (answer.decode(), "all"):
                chosen.discard(name)
    for word, owners in ONLY_WITH.items():
        if not any(answers[question] in (answer, "all") for question, answer in owners):
            chosen = {name for name in chosen if not re.search(word, name)}
    if answers["license"] != "none":
        chosen.add("LICENSE")
    chosen.add(".template.json")
    return {name.replace("template_package", answers["package_name"]) for name in chosen}

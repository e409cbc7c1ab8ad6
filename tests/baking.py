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

from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "{{cookiecutter.project_slug}}"
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
    r"|template_package/(__init__|dataset|errors|files|model|policy|tracking/(?!__init__)\w+)\.py"
    r"|template_package/core/(__init__|checkpoint|checks|config|data|evaluation|global_batch|optimizer|processes|random_states|ranks|settings|smoke|strategies|task)\.py"
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
    questions = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    choices = {
        key: value[0]
        for key, value in questions.items()
        if isinstance(value, list) and key[0] != "_"
    }
    return choices | SETTINGS | {"package_name": "ddp_experiment"}


def expected_files(template: Path, answers: Mapping[str, str]) -> set[str]:
    """Return the names of the files that a project with these answers holds.

    These rules match parts of names, while the hook lists whole paths. So a file that the hook forgets is noticed.
    """
    names = set(files_of(template / PROJECT))
    not_of_a_project = ("examples/", "small/", "template_only/", "tests/machinery/")
    chosen = {name for name in names if not name.startswith(not_of_a_project)}
    if answers["size"] == "small":
        small = {name.removeprefix("small/") for name in names if name.startswith("small/")}
        chosen = {name for name in chosen if IN_BOTH_SIZES.fullmatch(name)} | small
    for name in names:
        if name.startswith(f"examples/{answers['example']}/") and not name.endswith("config.yaml"):
            file = name.rpartition("/")[2]
            if answers["size"] == "small" and file == "test_sentences.py":  # it reads reports
                continue
            folder = (
                ""
                if not file.endswith(".py")
                else "tests/"
                if file.startswith("test_")
                else "template_package/"
            )
            chosen.add(f"{folder}{file}")
    for word, owners in ONLY_WITH.items():
        if not any(answers[question] in (answer, "all") for question, answer in owners):
            chosen = {name for name in chosen if not re.search(word, name)}
    if answers["license"] != "none":
        chosen.add("LICENSE")
    chosen.add(".template.json")
    return {name.replace("template_package", answers["package_name"]) for name in chosen}

"""Makes projects from a clean copy of the template, and says which files each should hold."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "{{cookiecutter.project_slug}}"
FOREIGN = ("DDP_TEMPLATE_", "CONDA_", "VIRTUAL_ENV", "PYTEST_", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")


def export_template(destination: Path) -> Path:
    """A copy of the files that git tracks or would track: no caches, which cookiecutter would render too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(command, cwd=ROOT, encoding="utf-8").split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # a tracked file may have been deleted
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name)
    return destination


def bake(template: Path, output_dir: Path, overwrite: bool = False, /, **answers: str) -> Path:
    """The folder of a new project, made without a smoke test."""
    context = {"smoke_test": "skip", **answers}
    options = {"no_input": True, "overwrite_if_exists": overwrite, "extra_context": context}
    return Path(cookiecutter(str(template), output_dir=str(output_dir), **options))


def cookiecutter_command(template: Path, output_dir: Path, answers: Mapping[str, str], python: str) -> list[str]:
    pairs = [f"{key}={value}" for key, value in answers.items()]
    return [python, "-m", "cookiecutter", str(template), "--no-input", "-o", str(output_dir), *pairs]


def run_cookiecutter(
    template: Path,
    output_dir: Path,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    /,
    **answers: str,
) -> subprocess.CompletedProcess[str]:
    """A run as people start it, in an environment that names no other Python; stdout holds stderr too."""
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
    """This process's environment without what tells the hook where to look, and with the changes."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    return kept | dict(changes or {})


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def expected_files(
    template: Path,
    package_name: str,
    example: str = "image",
    project_license: str = "MIT",
    extra_strategies: str = "none",
) -> set[str]:
    """The names of the files that a project with these answers holds, by the rules of CONTRIBUTING.md."""
    names = set(files_of(template / PROJECT))
    chosen = {name for name in names if not name.startswith(("examples/", "template_only/"))}
    for name in names:
        if name.startswith(f"examples/{example}/") and not name.endswith("config.yaml"):
            file = name.rpartition("/")[2]
            folder = "" if not file.endswith(".py") else "tests/" if file.startswith("test_") else "template_package/"
            chosen.add(f"{folder}{file}")
    for name in {"accelerate", "deepspeed", "horovod"} - {extra_strategies}:
        if extra_strategies != "all":
            if name == "deepspeed":
                chosen = {path for path in chosen if not path.startswith("template_package/strategies/zero/")}
            chosen -= {f"template_package/strategies/{name}.py", f"tests/test_{name}.py", f"scripts/install_{name}.sh"}
    if project_license != "none":
        chosen.add("LICENSE")
    return {name.replace("template_package", package_name) for name in chosen}

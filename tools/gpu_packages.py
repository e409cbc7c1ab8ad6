"""Finds what a Python lacks for the tests on a GPU, and downloads wheels for machines without a network.

`python tools/gpu_packages.py` ends with 1 and one line if this Python lacks a package, else with 0 and without a word.
`python tools/gpu_packages.py 3.12 x86_64` downloads all of them but torch for that Python and processor. The
script needs Python 3.9 or newer and no library.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path.insert(0, str(PROJECT / "template_only"))
from python_search import OLDEST_PYTHON, missing_requirements, read_requirements  # noqa: E402

WHEELS, SITE = ".cache/gpu-wheels", ".cache/gpu-site"
MAX_MEGABYTES = 60
NEEDED_BY = {
    "lightning-utilities": ["packaging", "typing_extensions"],
    "pydantic": ["annotated-types", "pydantic_core", "typing-inspection", "typing_extensions"],
    "pytest": ["iniconfig", "packaging", "pluggy", "Pygments"],
    "torchmetrics": ["packaging"],
}
"""{package: what it needs besides the packages of requirements()}"""


def requirements() -> dict[str, str]:
    """Return {package: lowest version} for the project without a tracker and an example, and for its tests."""
    lines = (PROJECT / "pyproject.toml").read_text(encoding="utf-8").splitlines(keepends=True)
    dependencies = read_requirements("".join(line for line in lines if "# only with" not in line))
    return dependencies | {"pytest": "8.3", "pytest-timeout": "2.3"}


def with_what_they_need(names: list[str]) -> list[str]:
    """Return the packages and what they need, without torch, which belongs to the machine."""
    found = {needed for name in names for needed in [name, *NEEDED_BY.get(name, [])]}
    return sorted(found - {"torch"}, key=str.lower)


def what_is_missing() -> str:
    """Return one line with the packages that this Python lacks and the commands that bring them, or nothing."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        return (
            f"{sys.executable} is older than Python 3.11. Name another one: PYTHON=/path/to/python3"
        )
    found = {}
    for name in requirements():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    missing = {
        name: missing_requirements({name: lowest}, found) for name, lowest in requirements().items()
    }
    names = [name for name in missing if missing[name]]
    if not names:
        return ""
    lack = (
        f"{sys.executable} lacks {', '.join(text for texts in missing.values() for text in texts)}."
    )
    if "torch" in names:
        remedy = "PYTHON=/path/to/python3, or after `make .venv/.ready`, .venv/bin/python"
        return f"{lack} Name one that has torch: {remedy}"
    version = f"GPU_PYTHON={sys.version_info.major}.{sys.version_info.minor} GPU_MACHINE={platform.machine()}"
    pip = f"{shlex.quote(sys.executable)} -m pip install --no-index --no-deps --find-links {WHEELS} --target {SITE}"
    return (
        f"{lack} Where there is a network: make gpu-wheels {version}. Then here: {pip} "
        f"{' '.join(with_what_they_need(names))} && export PYTHONPATH=$PWD/{SITE}${{PYTHONPATH:+:$PYTHONPATH}}"
    )


def download(version: str, machine: str) -> str:
    """Download the wheels, in the versions of constraints.txt. Return an error message, which may be empty."""
    shutil.rmtree(ROOT / WHEELS, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        WHEELS,
        "-c",
        "constraints.txt",
        "--no-deps",
    ]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}"]
    command += [
        f"--platform={tag}_{machine}"
        for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    ]
    code = subprocess.run(
        [*command, *with_what_they_need([*requirements()])], check=False, cwd=ROOT
    ).returncode
    sizes = [path.stat().st_size for path in (ROOT / WHEELS).glob("*.whl")]
    print(
        f"{len(sizes)} wheels for Python {version} on {machine} in {WHEELS}: {sum(sizes) / 1e6:.1f} MB.",
        end=" ",
    )
    print(
        "`make test-gpu PYTHON=python3` names those that a machine lacks, with the command that installs them."
    )
    if code:
        return f"`{shlex.join(command)}` ended with exit code {code}"
    return f"more than {MAX_MEGABYTES} MB" if sum(sizes) > MAX_MEGABYTES * 1e6 else ""


if __name__ == "__main__":
    sys.exit((download(*sys.argv[1:]) if sys.argv[1:] else what_is_missing()) or 0)

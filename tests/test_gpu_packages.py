"""Tests of the targets for GPU machines without a network: they install nothing and say what to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from gpu_packages import requirements, with_what_they_need
from packaging.requirements import Requirement

from baking import ROOT, plain_environment


def what_is_missing(packages: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the check in a Python that has these packages alone. {name: version}"""
    for name, version in packages.items():
        information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    command = [sys.executable, "-S", str(ROOT / "tools" / "gpu_packages.py")]
    environment = plain_environment({"PYTHONPATH": str(folder)})
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


def test_missing_packages_are_named_in_one_line_with_the_command_that_installs_them(
    tmp_path: Path,
) -> None:
    versions = requirements() | {"torch": "2.9.0a0+50eac811a6.nv25.9"}
    result = what_is_missing(versions, tmp_path / "all")
    assert (result.returncode, result.stdout + result.stderr) == (0, "")

    del versions["pydantic"]
    result = what_is_missing(versions | {"tqdm": "4.1"}, tmp_path / "some")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert f"lacks pydantic, tqdm>={requirements()['tqdm']} (it has 4.1)." in result.stderr
    assert (
        f"make gpu-wheels GPU_PYTHON={sys.version_info.major}.{sys.version_info.minor} "
        in result.stderr
    )
    (names,) = re.findall(r"--target \S+ (.*) &&", result.stderr)
    assert (
        names.split()
        == "annotated-types pydantic pydantic_core tqdm typing-inspection typing_extensions".split()
    )

    del versions["torch"]
    result = what_is_missing(versions, tmp_path / "torchless")
    assert result.returncode == 1
    assert "lacks torch, pydantic. Name one that has torch: PYTHON=" in result.stderr
    assert "gpu-wheels" not in result.stderr  # they hold no torch


@pytest.mark.parametrize("name", [name for name in requirements() if name != "torch"])
def test_wheels_are_complete(name: str) -> None:
    """The packages are installed without asking pip what they need."""
    requirement = [Requirement(text) for text in requires(name) or []]
    needed = {
        normal(one.name)
        for one in requirement
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }
    all_names = {normal(each) for each in requirements()}
    assert needed <= all_names | {normal(each) for each in with_what_they_need([name])}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
def test_gpu_tests_use_the_given_python_and_skip_without_a_gpu(template: Path) -> None:
    command = ["make", "test-gpu", f"PYTHON={os.path.relpath(sys.executable, template)}"]
    environment = plain_environment({"CUDA_VISIBLE_DEVICES": "", "PIP_NO_INDEX": "1"})
    result = subprocess.run(
        command, check=False, cwd=template, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    reasons = re.findall(r"^SKIPPED .*?: (.*)$", result.stdout, re.MULTILINE)
    assert len(reasons) > 5
    assert all("GPU" in reason for reason in reasons), reasons
    assert re.search(r"=+ \d+ skipped, \d+ deselected in ", result.stdout)
    assert not (template / ".venv").exists()

"""Tests of `make gpu-report`, which a GPU machine runs for the first time without anybody who could mend it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROWS = (
    "tests tests-small gpt-bf16-compile gpt-bf16 resnet-bf16 bert loader copies resnet-bf16-compile "
    "gpt-tf32 resnet-tf32 gpt-bf16-compile-libraries resnet-bf16-compile-libraries"
).split()
LIBRARIES = {"Accelerate": "accelerate", "Fabric": "lightning", "Lightning Trainer": "lightning"}
LIBRARIES |= {"transformers Trainer": "transformers"}


def report(
    *words: str, python: tuple[str, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    command = [
        "make",
        "--silent",
        "gpu-report",
        f"PYTHON={' '.join(python)}",
        f"ARGS={' '.join(words)}",
    ]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)


def read(folder: Path) -> tuple[dict[str, Any], str]:
    results = json.loads((folder / "results-gpu.json").read_text(encoding="utf-8"))
    return results, (folder / "RESULTS-GPU.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine; 2 minutes on two cores of its own
def test_rehearsal_fills_every_row_with_a_figure(tmp_path: Path) -> None:
    done = report("--rehearse", "--minutes 14", f"--output {tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    results, page = read(tmp_path)
    sections = dict(
        zip(*[iter(re.split(r"^## (.*)\n", page, flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    assert list(sections) == ROWS == results["names"], page
    assert "Every row was reached." in page
    for name in ROWS[:2]:
        skipped = re.findall(r"^\| `test_.*\| skipped: .*\| \d", sections[name], re.MULTILINE)
        assert len(skipped) > 30, page
    for name in ROWS[2:]:
        for entry in results["rows"][name]["entries"]:
            label, package = entry["label"], LIBRARIES.get(entry["label"])
            if package and find_spec(package) is None:
                assert f"{label}: {package} is not installed" in sections[name]
            else:
                assert re.search(
                    rf"^\| \**{re.escape(label)}\** \| \d+\.\d\d \| \d",
                    sections[name],
                    re.MULTILINE,
                ), page
    assert all((tmp_path / f"gpu-{theme}.svg").exists() for theme in ("light", "dark"))


def test_rows_of_earlier_runs_are_kept_and_name_their_own_card(tmp_path: Path) -> None:
    words = ("--rehearse", "--minutes 0", f"--output {tmp_path}")
    assert report(*words).returncode == 0
    results, page = read(tmp_path)
    assert f'`make gpu-report ARGS="--rows {",".join(ROWS)}"`' in page
    entry = {
        "label": "fp16",
        "milliseconds": 1.5,
        "startup_seconds": 3,
        "peak_memory_mib": 5,
        "final_loss": 0.7,
    }
    other = {"card": "NVIDIA H100 PCIe", "torch": "2.9.0", "memory_gib": 80}
    results["rows"]["bert"] = {
        "date": "2026-01-02 03:04",
        "machine": other,
        "entries": [entry],
        "is_complete": True,
    }
    (tmp_path / "results-gpu.json").write_text(json.dumps(results), encoding="utf-8")
    assert report(*words).returncode == 0
    kept, page = read(tmp_path)
    assert kept["rows"] == results["rows"] and "| fp16 | 1.50 | 1.000 |" in page
    assert "NVIDIA H100 PCIe, torch 2.9.0, 2026-01-02 03:04." in page


def test_python_without_the_packages_is_told_in_one_line() -> None:
    done = report(python=(sys.executable, "-I", "-S"))
    assert done.returncode != 0 and "lacks torch, numpy, pydantic" in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_that_do_not_exist_are_refused() -> None:
    done = report("--rehearse", "--rows gpt,bert")
    assert done.returncode != 0 and "there is no gpt; there are tests, tests-small" in done.stderr


@pytest.mark.slow
def test_loop_that_fails_is_a_line_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "safetensors.py").write_text(
        "raise RuntimeError('a library that is broken')\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = report("--rehearse", "--rows gpt-bf16-compile", f"--output {tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    _, page = read(tmp_path)
    assert re.search(
        r"^generated trainer:\n\n```\n(.*\n)+RuntimeError: a library that is broken\n```$",
        page,
        re.MULTILINE,
    )
    assert re.search(r"^\| bare \| \d+\.\d\d \| \d", page, re.MULTILINE), page

"""Tests the command `doctor`, which starts two CPU ranks. Delete this file with commands/doctor/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def consult(*words: str) -> str:
    command = [sys.executable, "run.py", "doctor", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    ).stdout


def test_two_ranks_are_tried_and_a_mistake_is_told() -> None:
    assert "an all-reduce over cpu, cpu works" in consult("device_ids=cpu,cpu")
    assert "broken   config: training.epoch=3" in consult("training.epoch=3")

"""Runs public cases of size=full's suite on a small project, too: its trainer is another one, the core is the same.

All of them, without -k, take ten minutes. Those that need a key of size=full then fail.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baking import plain_environment
from small_suite import make_small_project

CASES = "any_dtype or share_memory or lazy_layers or no_memory or eval_mode or no_tensor"
CASES += " or draws_from or told_and_change or mixed_dtypes or closure"
CASES += " or gathers_unequal or plain_script or mean_loss"
CASES += (
    " or plain_run or takes_the_place or trials_change or term or returns_rates or after_a_step"
)
CASES += " or replicas_that_differ or one_class"
CASES += (
    " or did_to_the_weights or draw_anew or without_an_optimizer or constant_with"
    " or never_comes or needs_two_samples"
    " or say_what_is_better or below_zero or without_a_state"
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_public_cases_hold_in_a_small_project(tmp_path: Path) -> None:
    project = make_small_project(tmp_path / "project")
    names = ["public_cases_scores", "public_cases_model", "global_batch"]
    names += ["hooks", "failing", "rehearsal"]
    files = [f"tests/machinery/test_{name}.py" for name in names]
    words = ["-q", "-p", "no:cacheprovider", "-k", f"({CASES}) and not average and not deepspeed"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *files],
        cwd=project,
        env=plain_environment({"PYTHONDONTWRITEBYTECODE": "1"}),
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) > 40

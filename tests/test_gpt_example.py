"""Tests of the gpt example as a user runs it: training on two ranks, and prediction on one rank and on three."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baking import bake, plain_environment

SMALL = """
    name=small data.block_size=32 model.hidden_size=32 model.num_layers=2 training.max_steps=50
    evaluation.every_steps=25 strategy=fsdp training.precision=bf16 training.activation_checkpointing=true
    logging.tracker=none
"""


@pytest.mark.slow
def test_gpt_logs_its_speed_and_a_sample_and_continues_prompts_alike_on_any_ranks(
    template: Path, tmp_path: Path
) -> None:
    project = bake(template, tmp_path, example="gpt")

    def run(*words: str) -> str:
        command = [sys.executable, "run.py", *words]
        return subprocess.check_output(
            command,
            cwd=project,
            env=plain_environment(),
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=120,
        )

    printed = run("device_ids=cpu,cpu", *SMALL.split())
    assert (
        "step 50: " in printed and "tokens/s on each device" in printed and "warning" not in printed
    )
    directory = project / "runs" / "small"
    first, last = (
        json.loads(line)["loss"]
        for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines()
        if json.loads(line)["split"] == "validation"
    )
    assert last < first < 5.545  # log(256), what a model that knows nothing loses
    samples = [
        (directory / "media" / f"step_000000{step}_sample.txt").read_text("utf-8")
        for step in (25, 50)
    ]
    assert min(map(len, samples)) > 100 and samples[0] != samples[1]

    (project / "prompts.txt").write_text(
        "HAMLET:\n\nTo be, or not to be: that is the question\n", encoding="utf-8"
    )
    answers = []
    for devices in ("cpu", "cpu,cpu,cpu"):
        run(
            "predict",
            "prompts.txt",
            "name=small",
            f"device_ids={devices}",
            "training.precision=fp32",
            "strategy=ddp",
        )
        answers.append((directory / "predictions.jsonl").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in answers[0].splitlines()]
    assert answers[0] == answers[1]
    assert [row["input"] for row in rows] == [
        "HAMLET:",
        "",
        "To be, or not to be: that is the question",
    ]
    assert len({row["continuation"] for row in rows}) == 3

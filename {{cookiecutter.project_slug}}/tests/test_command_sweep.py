"""Tests the command `sweep` with runs of two CPU ranks. Delete this file with commands/sweep/."""

from __future__ import annotations

import json

from conftest import Project


def test_runs_of_a_sweep_are_those_of_the_plain_command(project: Project) -> None:
    rates, words = ("0.001", "0.01"), ("device_ids=cpu,cpu", "training.max_steps=3")
    sweep = {"name": "s", "grid": {"optimizer.learning_rate": rates}}
    (project.folder / "sweep.json").write_text(json.dumps(sweep), encoding="utf-8")
    project.run("sweep", "sweep.json", *words)
    found = json.loads((project.directory("s") / "sweep.json").read_text(encoding="utf-8"))["runs"]
    assert len(found) == len(rates)
    for run in found:
        assert run["status"] == "complete"
        rate = run["settings"]["optimizer.learning_rate"]
        project.run(*words, f"optimizer.learning_rate={rate}", f"name=plain{rate}")
        in_sweep, plain = project.lines(f"s/{run['name']}"), project.lines(f"plain{rate}")
        assert [line["loss"] for line in in_sweep] == [line["loss"] for line in plain]

"""Tests the command `report` on a run of two CPU ranks. Delete this file with commands/report/."""

from __future__ import annotations

import json

from conftest import Project


def test_report_shows_the_best_loss_and_curves(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "training.max_steps=3")
    project.run("report")
    page = (project.directory("run") / "report.html").read_text(encoding="utf-8")
    best = json.loads((project.directory("run") / "summary.json").read_text())["best"]
    assert f"<dt>best.loss</dt><dd>{best['loss']:.4g}</dd>" in page
    assert page.count("<svg") >= 3  # curves

"""Evaluation counts every sample once, on any number of ranks and in micro-batches of any size."""

from __future__ import annotations

import pytest
import torch

from conftest import Project
from workload import dataset as workload_data
from workload import model as workload_model


def test_evaluation_is_exact_on_any_number_of_ranks(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "evaluation.micro_batch_size=5")
    trained = project.lines("run", "validation")[-1]
    # 37 samples: 12 or 13 a rank, in micro-batches of 4: the ranks' last ones are uneven.
    project.run("evaluate", "device_ids=cpu,cpu,cpu", "evaluation.checkpoint=last", "evaluation.micro_batch_size=4")
    results = [project.json("run", "evaluation.json")]
    project.session(["evaluate", "evaluation.checkpoint=last", "evaluation.micro_batch_size=6"], codes=[0])
    results.append(project.json("run", "evaluation.json"))
    for result in results:
        assert result["num_samples"] == 37 and result["split"] == "validation" and result["step"] == 21
        # Means of float32 micro-batches differ in the last bits; one sample too many would show in the third digit.
        assert result["loss"] == pytest.approx(trained["loss"], rel=1e-6)
        assert result["absolute_error"] == pytest.approx(trained["absolute_error"], rel=1e-6)


def test_evaluation_matches_a_plain_loop(project: Project) -> None:
    _, table, unknown = project.session(
        [],
        ["evaluate", "evaluation.checkpoint=best,last", "evaluation.split=test"],
        ["evaluate", "name=unknown"],
        codes=[0, 0, 2],
    )
    rows = [line.split() for line in table.splitlines() if "checkpoints/" in line]
    assert len(rows) == 2 and all(row[-1] == "11" for row in rows)
    assert len(project.json("run", "evaluation.json")["evaluations"]) == 2
    assert "does not exist" in unknown
    model = workload_model.build_model(workload_model.ModelConfig())
    model.load_state_dict(project.checkpoint("run", 21)["model"])
    data = workload_data.Numbers(workload_data.DataConfig(), 37, 2, 0.0)
    with torch.no_grad():
        errors = model(data.inputs) - data.targets
    line = project.lines("run", "validation")[-1]
    assert line["loss"] == pytest.approx(errors.square().mean().item(), rel=1e-6)
    assert line["absolute_error"] == pytest.approx(errors.abs().mean().item(), rel=1e-6)

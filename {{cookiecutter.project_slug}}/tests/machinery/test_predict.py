"""Tests that `run.py predict` answers each input once, in the order of the inputs, on any number of ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
import torch
from workload import dataset as workload_data
from workload import model as workload_model

from template_package.core.settings import read_command_line

from conftest import ROOT, Project

READ_INPUTS = """
def read_inputs(source: str, config: DataConfig) -> Any:
    data = Numbers(config, int(source), 7, 0.0)
    data.label_names = ["low", "high"]
    return data, [f"number {i}" for i in range(len(data))]


def build_datasets("""
PREDICT = """
def predict(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    outputs = model(batch.inputs)
    return {"label": (outputs[:, 0] > 0).long(), "value": outputs[:, 0], "both": outputs}


def build_metrics("""


def rows(project: Project) -> list[dict[str, Any]]:
    text = (project.directory("run") / "predictions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_rows_stand_in_the_order_of_the_inputs_each_once_on_any_number_of_ranks(
    project: Project,
) -> None:
    project.edit("dataset.py", "\ndef build_datasets(", READ_INPUTS)
    project.edit("model.py", "\ndef build_metrics(", PREDICT)
    project.run()
    model = workload_model.build_model(workload_model.ModelConfig())
    model.load_state_dict(torch.load(project.directory("run") / "checkpoints" / "best.pt")["model"])
    for num_inputs, devices in ((37, "cpu"), (37, "cpu,cpu,cpu"), (2, "cpu,cpu,cpu")):
        printed = project.run(
            "predict", str(num_inputs), f"device_ids={devices}", "evaluation.micro_batch_size=5"
        )
        data = workload_data.Numbers(workload_data.DataConfig(), num_inputs, 7, 0.0)
        with torch.no_grad():
            expected = model(data.inputs)
        found = rows(project)
        assert [row["input"] for row in found] == [f"number {i}" for i in range(num_inputs)]
        torch.testing.assert_close(torch.tensor([row["both"] for row in found]), expected)
        assert [row["label"] for row in found] == [
            ("low", "high")[int(value > 0)] for value in expected[:, 0].tolist()
        ]
        assert f"{num_inputs} rows: runs/run/predictions.jsonl" in printed
        assert printed.count("number ") == min(num_inputs, 20)


def test_ranks_of_fsdp_may_run_other_numbers_of_passes(project: Project) -> None:
    """As a text that ends early. Ranks waited for each other, or a gather met another one."""
    project.edit("dataset.py", "\ndef build_datasets(", READ_INPUTS)
    more = PREDICT.replace(
        "    outputs =",
        "    import os\n    for _ in range(3 * int(os.environ.get('RANK', 0))):\n"
        "        model(batch.inputs)\n    outputs =",
    )
    project.edit("model.py", "\ndef build_metrics(", more)
    project.run("training.max_steps=2")
    project.run("predict", "7")
    expected = rows(project)
    project.run("predict", "7", "device_ids=cpu,cpu", "strategy=fsdp")
    assert [row["value"] for row in rows(project)] == pytest.approx(
        [row["value"] for row in expected], rel=1e-5
    )


def test_elements_of_a_column_may_be_numbers_of_numpy_and_tensors(project: Project) -> None:
    project.edit("dataset.py", "\ndef build_datasets(", READ_INPUTS)
    single = PREDICT.replace("(outputs[:, 0] > 0).long()", "[*(outputs[:, 0] > 0).long().numpy()]")
    single = single.replace('"both": outputs', '"both": [*outputs]')
    project.edit("model.py", "\ndef build_metrics(", single)
    project.run("training.max_steps=2")
    project.run("predict", "3")
    assert {row["label"] for row in rows(project)} <= {"low", "high"}
    assert all(len(row["both"]) == 2 for row in rows(project))


def test_long_vectors_are_an_array(project: Project) -> None:
    project.edit("dataset.py", "\ndef build_datasets(", READ_INPUTS)
    wide = '"both": outputs, "embedding": outputs.repeat(1, 20)'
    project.edit("model.py", "\ndef build_metrics(", PREDICT.replace('"both": outputs', wide))
    project.run("training.max_steps=2")
    project.run("predict", "7", "device_ids=cpu,cpu,cpu")
    found = numpy.load(project.directory("run") / "predictions_embedding.npy")
    assert found.shape == (7, 40)
    both = torch.tensor([row["both"] for row in rows(project)], dtype=torch.float64)
    torch.testing.assert_close(torch.from_numpy(found), both.repeat(1, 20))
    assert all(row.keys() == {"input", "label", "value", "both"} for row in rows(project))


def test_long_lists_of_several_lengths_stay_in_the_lines(project: Project) -> None:
    """Each batch may be padded to another length."""
    project.edit("dataset.py", "\ndef build_datasets(", READ_INPUTS)
    ragged = '"both": outputs, "tokens": [[0] * (40 + len(outputs))] * len(outputs)'
    project.edit("model.py", "\ndef build_metrics(", PREDICT.replace('"both": outputs', ragged))
    project.run("training.max_steps=2")
    project.run("predict", "7", "device_ids=cpu,cpu")  # 4 and 3
    assert [len(row["tokens"]) for row in rows(project)] == [44] * 4 + [43] * 3


def test_what_is_missing_for_a_prediction_is_named(project: Project) -> None:
    assert "predict: needs read_inputs() in dataset.py" in project.run("predict", "5", code=2)
    project.edit("dataset.py", "\ndef build_datasets(", READ_INPUTS)
    assert "predict() in model.py" in project.run("predict", "5", code=2)
    project.edit("model.py", "\ndef build_metrics(", PREDICT)
    assert "there is no runs/run/checkpoints/best.pt. Train first" in project.run(
        "predict", "5", code=2
    )


def test_settings_may_come_before_the_command() -> None:
    line = read_command_line(["name=run", "predict", "digits.npy"], ROOT / "config.yaml")
    assert (line.command, line.words, line.rest) == ("predict", ["name=run"], ["digits.npy"])


def test_the_input_is_any_word_but_a_setting() -> None:
    def parse(*words: str) -> Any:
        line = read_command_line(["predict", *words], ROOT / "config.yaml")
        return line.rest, line.words

    assert parse("a file.json", "name=a") == (["a file.json"], ["name=a"])
    assert parse("training.tf32=false", "5") == (["5"], ["training.tf32=false"])
    assert parse("name=a", "model.x=1", "E = mc2") == (["E = mc2"], ["name=a", "model.x=1"])
    assert parse("- what = this?") == (["- what = this?"], [])


@pytest.mark.parametrize("words", [[], ["name=a"], ["two", "words"]])
def test_one_input_is_needed(project: Project, words: list[str]) -> None:
    output = project.run("predict", *words, code=2)
    assert (
        output.startswith("error: predict")
        and "takes one input. Type: python run.py predict INPUT" in output
    )

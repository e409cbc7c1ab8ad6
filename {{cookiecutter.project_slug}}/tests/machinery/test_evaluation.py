"""Tests that evaluation counts every sample once, on any number of ranks and in micro-batches of any size."""

from __future__ import annotations

import math
import re
import shutil

import pytest
import torch
from workload import dataset as workload_data
from workload import model as workload_model

from template_package.training.evaluation import class_table

from conftest import Project


def test_evaluation_is_exact_on_any_number_of_ranks(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "evaluation.micro_batch_size=5")
    trained = project.lines("run", "validation")[-1]
    # 37 samples: 12 or 13 a rank, in micro-batches of 4: the ranks' last ones are uneven.
    project.run(
        "evaluate",
        "device_ids=cpu,cpu,cpu",
        "evaluation.checkpoint=last",
        "evaluation.micro_batch_size=4",
    )
    results = [project.json("run", "evaluation.json")]
    project.run("evaluate", "evaluation.checkpoint=last", "evaluation.micro_batch_size=6")
    results.append(project.json("run", "evaluation.json"))
    for result in results:
        assert (
            result["num_samples"] == 37 and result["split"] == "validation" and result["step"] == 21
        )
        # Means of float32 micro-batches differ in the last bits; one sample too many would show in the third digit.
        assert result["loss"] == pytest.approx(trained["loss"], rel=1e-6)
        assert result["absolute_error"] == pytest.approx(trained["absolute_error"], rel=1e-6)


def test_evaluation_matches_a_plain_loop(project: Project) -> None:
    project.run()
    printed = project.run("evaluate", "evaluation.checkpoint=last", "evaluation.split=test")
    unknown = project.run("evaluate", "name=unknown", code=2)
    assert "checkpoints/step_00000021.pt (step 21), test split (11 samples): loss " in printed
    assert project.json("run", "evaluation.json")["split"] == "test"
    assert "train split (103 samples): loss " in project.run("evaluate", "evaluation.split=train")
    assert "there is no runs/unknown/checkpoints/best.pt. Train first" in unknown
    assert not project.directory("unknown").exists()
    model = workload_model.build_model(workload_model.ModelConfig())
    model.load_state_dict(project.checkpoint("run", 21)["model"])
    data = workload_data.Numbers(workload_data.DataConfig(), 37, 2, 0.0)
    with torch.no_grad():
        errors = model(data.inputs) - data.targets
    line = project.lines("run", "validation")[-1]
    assert line["loss"] == pytest.approx(errors.square().mean().item(), rel=1e-6)
    assert line["absolute_error"] == pytest.approx(errors.abs().mean().item(), rel=1e-6)


OTHER_METRICS = """
    from torchmetrics import MetricCollection, SpearmanCorrCoef
    from torchmetrics.classification import BinaryConfusionMatrix
    from torchmetrics.text import ROUGEScore

    rouge = ROUGEScore(rouge_keys=("rouge1", "rougeL"))
    return MetricCollection({"rouge": rouge, "rank": SpearmanCorrCoef(), "confusion_matrix": BinaryConfusionMatrix()})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    texts = [[" ".join(map(str, row)) for row in (2 * t).round().int().tolist()] for t in (outputs, batch.targets)]
    metrics["rouge"].update(*texts)
    metrics["rank"].update(outputs[:, 0], batch.targets[:, 0])
    metrics["confusion_matrix"].update(outputs[:, 0] > 0, batch.targets[:, 0] > 0)


def unused_update("""


def test_metrics_that_keep_lists_are_exact_where_ranks_are_uneven(project: Project) -> None:
    """torchmetrics' own synchronisation crashes here: the ranks' lists differ in length, and one list is empty."""
    old = """
    from torchmetrics import MeanAbsoluteError, MetricCollection

    return MetricCollection({"absolute_error": MeanAbsoluteError()})


def update_metrics("""
    project.edit("model.py", old, OTHER_METRICS)
    metric = [
        "evaluation.metric=rouge1_fmeasure",
        "evaluation.mode=max",
        "evaluation.micro_batch_size=3",
    ]
    project.run(*metric)
    names = {"rouge1_fmeasure", "rouge1_precision", "rougeL_recall", "rank", "loss"}
    assert names <= project.lines("run", "validation")[-1].keys()
    for num_validation in (37, 2):  # 12, 12 and 13 samples; 0, 1 and 1
        results = []
        for devices in ("cpu", "cpu,cpu,cpu"):
            project.run(
                "evaluate",
                *metric,
                f"data.num_validation={num_validation}",
                f"device_ids={devices}",
            )
            results.append(project.json("run", "evaluation.json"))
            report = project.json("run", "reports/validation_best.json")
            assert sum(map(sum, report["confusion_matrix"])) == num_validation
            results[-1]["report"] = report["confusion_matrix"]
        # Micro-batches of other sizes: float32 sums in another order. A lost sample shows in the second digit.
        alone, together = results
        assert together.pop("report") == alone.pop("report")
        assert {
            key: value for key, value in together.items() if isinstance(value, float)
        } == pytest.approx(
            {key: value for key, value in alone.items() if isinstance(value, float)}, rel=1e-5
        )
    for unknown in ("rouge", "confusion_matrix"):
        refused = project.run(
            "name=new", f"evaluation.metric={unknown}", "evaluation.mode=max", code=2
        )
        assert (
            "not among the numbers of an evaluation (loss, " in refused
            and "rouge1_fmeasure" in refused
        )


CONFUSION = """
def build_metrics(config: ModelConfig) -> "MetricCollection":
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryConfusionMatrix

    return MetricCollection({"confusion_matrix": BinaryConfusionMatrix()})


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    metrics.update(outputs[:, 0] > 0, batch.targets[:, 0] > 0)
"""


def test_best_evaluation_of_a_run_is_reported_by_class(project: Project) -> None:
    project.append("model.py", CONFUSION)
    named = "        self.label_names = ['低', 'high']\n        self.noise, "
    project.edit("dataset.py", "        self.noise, ", named)
    project.run("device_ids=cpu,cpu")
    report = project.json("run", "reports/validation_best.json")
    step = project.json("run", "summary.json")["best"]["step"]
    assert report["title"] == f"validation, checkpoint best (step {step})"
    assert (
        report["label_names"] == ["低", "high"] and sum(map(sum, report["confusion_matrix"])) == 37
    )
    printed = project.run("evaluate")
    assert project.json("run", "reports/validation_best.json") == report
    assert class_table(report) in printed


def test_weights_of_another_program_are_evaluated_on_data_with_a_fingerprint(
    project: Project,
) -> None:
    """A key that build_datasets() fills in was taken for a change: the file has no settings."""
    project.edit(
        "dataset.py",
        '    dtype: str = "float32"',
        '    dtype: str = "float32"\n    fingerprint: str | None = None',
    )
    project.edit("dataset.py", "    return (\n", '    config.fingerprint = "abc"\n    return (\n')
    project.run("training.max_steps=2")
    weights = project.directory("run") / "model.safetensors"
    output = project.run("evaluate", "name=fresh", f"evaluation.checkpoint={weights}")
    assert "validation split (37 samples)" in output and "trained with another" not in output
    other = project.run("evaluate", "evaluation.checkpoint=best")
    assert output.rpartition("samples): ")[2] == other.rpartition("samples): ")[2]


def test_other_data_than_the_runs_is_told(project: Project) -> None:
    project.run("training.max_steps=2")
    told = project.run(
        "evaluate", "training.max_steps=2", "data.num_validation=20", "evaluation.checkpoint=last"
    )
    assert (
        "trained with another data.num_validation (37 -> 20). It may have seen this split" in told
    )
    told = project.run("evaluate", "evaluation.checkpoint=last")
    assert "may have seen" not in told


def test_mode_that_would_keep_the_worst_is_refused(project: Project) -> None:
    output = project.run("evaluation.metric=absolute_error", "evaluation.mode=max", code=2)
    assert (
        "error: evaluation.mode=max" in output
        and "Set min." in output
        and "Traceback" not in output
    )


def test_evaluation_takes_the_micro_batch_of_training_that_fits_every_rank(
    project: Project,
) -> None:
    shown = "    if not module.training:\n        print(f'{len(batch.inputs)} samples at once')\n    errors = ("
    project.edit("model.py", "    errors = (", shown)
    # 2 samples fit on rank 1
    words = (
        "device_ids=cpu,cpu",
        "training.max_steps=2",
        "model.fault=memory_probe",
    )
    for size, largest in (("auto", 2), ("5", 5)):
        project.run(f"name={size}", f"evaluation.micro_batch_size={size}", *words)
        for rank in range(2):
            log = (project.directory(size) / "logs" / f"rank_{rank}.log").read_text(
                encoding="utf-8"
            )
            assert max(map(int, re.findall(r"(\d+) samples at once", log))) == largest
        (line,) = project.lines(size, "validation")
        assert line["num_samples"] == 37


def test_evaluate_settles_the_precision_over_the_ranks_as_training_does(project: Project) -> None:
    # as if CPUs were GPUs
    project.edit("core/strategies.py", '"bf16" if oldest >= 8', '"bf16" if oldest >= 0')
    words = ("device_ids=cpu,cpu", "training.precision=auto", "training.epochs=1")
    project.run(*words)
    loss = project.lines("run", "validation")[-1]["loss"]
    project.run("evaluate", "--config", "config.yaml", *words, "evaluation.checkpoint=last")
    assert project.json("run", "evaluation.json")["loss"] == pytest.approx(loss, rel=1e-6)
    project.run(
        "evaluate",
        "--config",
        "config.yaml",
        *words[:1],
        "training.precision=fp32",
        "evaluation.checkpoint=last",
    )
    assert project.json("run", "evaluation.json")["loss"] != pytest.approx(loss, rel=1e-6)


def test_metric_that_is_no_number_is_never_the_best(project: Project) -> None:
    """Row 14 of the public cases: nobody was told why there is no best.pt."""
    project.edit("model.py", "metrics.update(outputs,", "metrics.update(outputs * float('nan'),")
    output = project.run("evaluation.metric=absolute_error")
    assert (
        output.count("warning: evaluation.metric=absolute_error is nan, so no best.pt is kept") == 3
    )
    assert project.json("run", "summary.json")["best"] is None
    values = [line["absolute_error"] for line in project.lines("run", "validation")]
    assert len(values) == 3 and all(math.isnan(float(value)) for value in values)
    assert not (project.directory("run") / "checkpoints" / "best.pt").exists()


def test_checkpoint_is_named_by_any_path(project: Project) -> None:
    project.run("training.epochs=1")
    shutil.copy(project.directory("run") / "checkpoints" / "best.pt", project.folder / "copy.v2.pt")
    project.run("evaluate", "evaluation.checkpoint=copy.v2.pt")
    assert "a setting is key=value" in project.run("evaluate", "copy.v2.pt", code=2)
    assert (
        project.json("run", "evaluation.json")["loss"]
        == project.lines("run", "validation")[-1]["loss"]
    )

"""Tests that mistakes in the user's model end the run, mostly in the rehearsal, and that too little memory does not."""

from __future__ import annotations

import sys

import pytest
from test_training import DOUBLE, TOLERANCES, assert_matches, reference_run, settings

from conftest import Project

METRICS = """
def build_metrics(config: ModelConfig) -> "MetricCollection":
    from torchmetrics import ClasswiseWrapper, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

    wrapper = ClasswiseWrapper(MulticlassF1Score(2, average=None), labels=["low", "high"])
    return MetricCollection(
        {"accuracy": MulticlassAccuracy(2), "auroc": MulticlassAUROC(2, average=None), "f1": wrapper}
    )


def update_metrics(metrics: "MetricCollection", outputs: Tensor, batch: Batch) -> None:
    metrics.update(outputs.softmax(1), (batch.targets[:, 0] > 0).long())
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", ["memory_probe", "memory_later"])
def test_out_of_memory_on_one_rank_ends_in_the_same_weights(
    project: Project, fault: str, strategy: str
) -> None:
    output = project.run(*settings(2, *DOUBLE, f"model.fault={fault}", f"strategy={strategy}"))
    log = (project.directory("run") / "logs" / "rank_1.log").read_text(encoding="utf-8")
    assert "out of memory with micro-batches of 8 samples, trying 4" in log
    # a forward pass of FSDP needs all ranks
    is_tried_alone = fault == "memory_probe" and strategy == "ddp"
    assert ("starting again from the last checkpoint" in output) != is_tried_alone
    assert project.json("run", "summary.json")["micro_batch_size"] == 2, "what fits on rank 1"
    assert_matches(project, "run", reference_run("float64"), TOLERANCES["float64"])


def test_torchrun_gives_the_same_as_our_own_processes(project: Project) -> None:
    project.run("device_ids=cpu,cpu")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    project.run("name=torchrun", "device_ids=cpu,cpu", command=torchrun)
    assert project.lines("torchrun") == project.lines("run")


def test_model_is_built_once_a_rank(project: Project) -> None:
    project.edit(
        "model.py", "    model.config, ", '    print("a model is built")\n    model.config, '
    )
    project.run("device_ids=cpu,cpu")
    for rank in range(2):
        log = (project.directory("run") / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
        assert log.count("a model is built") == 1


def test_compute_loss_that_returns_the_loss_alone_is_refused(project: Project) -> None:
    project.append(
        "model.py",
        "pair = compute_loss\ndef compute_loss(*arguments: Any) -> Any: return pair(*arguments)[0]\n",
    )
    output = project.run("device_ids=cpu,cpu", code=2)
    assert (
        "must return two values: the loss, and the model's outputs" in output
        and "Traceback" not in output
    )


def test_loss_that_goes_around_the_model_is_refused(project: Project) -> None:
    output = project.run("device_ids=cpu,cpu", "model.fault=bypass", code=2)
    assert (
        "called model(...) 0 times" in output
        and "model.module" in output
        and "Traceback" not in output
    )


def test_parameter_without_gradient_in_a_later_step_ends_the_run_before_the_step_is_made(
    project: Project,
) -> None:
    words = ("device_ids=cpu,cpu", "model.fault=skip_later", "checkpoint.every_steps=1")
    output = project.run(*words, code=1)
    assert (
        "parameters that were not used in producing loss" in output
        and output.count(") failed:\n") == 1
    )
    last = max((project.directory("run") / "checkpoints").glob("step_*.pt"))
    assert last.stem == "step_00000002", "step 3 had gradients that were not averaged"


def test_parameter_without_gradient_is_named_and_the_run_stays_as_it_was(project: Project) -> None:
    words = ("device_ids=cpu,cpu", "model.has_unused_parameter=true", "training.epochs=1")
    project.run(*words, "ddp.find_unused_parameters=true")
    paths = [
        project.directory("run") / name for name in ("summary.json", "config.yaml", "metrics.jsonl")
    ]
    before = [path.read_bytes() for path in paths]
    output = project.run(*words, "training.epochs=2", code=2)
    assert "unused got no gradient" in output and "ddp.find_unused_parameters=true" in output
    assert [path.read_bytes() for path in paths] == before, (
        "a start that is refused changes nothing"
    )


def test_typo_in_update_metrics_is_told_before_the_first_step(project: Project) -> None:
    project.edit(
        "model.py",
        "metrics.update(outputs, batch.targets)",
        "metrics.update(outputs, batch.tragets)",
    )
    output = project.run("device_ids=cpu,cpu", code=1)
    assert "has no attribute 'tragets'" in output and output.count(") failed:\n") == 1
    assert not (project.directory("run") / "metrics.jsonl").exists()


@pytest.mark.parametrize("metric", ["auroc", "f1_low"])
def test_metric_that_gives_no_number_is_told_before_the_first_step_with_the_names_that_there_are(
    project: Project, metric: str
) -> None:
    project.append("model.py", METRICS)
    output = project.run(
        "device_ids=cpu,cpu", f"evaluation.metric={metric}", "evaluation.mode=max", code=2
    )
    assert "Traceback" not in output and not (project.directory("run") / "metrics.jsonl").exists()
    assert f"evaluation.metric={metric}: " in output
    assert "(loss, accuracy, multiclassf1score_low, multiclassf1score_high)" in output


def test_real_names_of_a_classwise_metric_are_accepted(project: Project) -> None:
    project.append("model.py", METRICS)
    name = "multiclassf1score_high"
    output = project.run("device_ids=cpu,cpu", f"evaluation.metric={name}", "evaluation.mode=max")
    assert output.count("no single number, so not recorded (try ClasswiseWrapper): auroc") == 1
    assert project.json("run", "summary.json")["best"].keys() == {name, "step"}
    assert all(
        0 <= line[name] <= 1 and "auroc" not in line for line in project.lines("run", "validation")
    )


def test_model_that_needs_two_samples_is_refused_before_the_first_step(project: Project) -> None:
    """There are 103 samples. Batches of 100 leave 3 (2 and 1 per rank), and batches of 96 leave 7 (2, 2, 2 and 1)."""
    project.edit(
        "model.py", "nn.Linear(6, 16), nn.Tanh()", "nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()"
    )
    words = ("device_ids=cpu,cpu", "training.global_batch_size=100", "training.epochs=1")
    output = project.run(*words, code=2)
    assert "training.global_batch_size=100: the model fails on an epoch's last 3 samples" in output
    assert "Traceback" not in output and not (project.directory("run") / "metrics.jsonl").exists()
    halves = (words[0], "training.global_batch_size=96", "training.micro_batch_size=2", words[2])
    assert "the model fails on an epoch's last 7 samples" in project.run(
        "name=halves", *halves, code=2
    )
    project.run("name=one", "device_ids=cpu", *words[1:])
    # 2 samples for each rank
    project.run("name=two", words[0], "training.global_batch_size=99", words[2])


def test_local_rank_0_alone_builds_first_however_long_it_takes(project: Project) -> None:
    """Local rank 0 may download data. The other ranks wait, even for longer than the time-out of a collective."""
    code = (
        "import time, torch.distributed as dist; time.sleep(4 * (dist.get_rank() == 0)); "
        "print(f'TASK {time.time()}\\n', end='')"
    )
    project.edit(
        "model.py",
        "    model: Any = nn.Seq",
        f"    {code.replace('TASK', 'built')}\n    model: Any = nn.Seq",
    )
    project.append(
        "dataset.py",
        f"former = build_datasets\n\n\ndef build_datasets(config):\n    {code}\n    return former(config)",
    )
    project.run("device_ids=cpu,cpu", "training.max_steps=1", "launch.timeout_minutes=0.02")
    times = []
    for rank in range(2):
        log = (project.directory("run") / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
        times.append(
            [
                float(line.split()[1])
                for line in log.splitlines()
                if line.startswith(("built", "TASK"))
            ]
        )
    assert [len(of_rank) for of_rank in times] == [2, 2]
    assert all(first < second for first, second in zip(*times, strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_outputs_are_dropped_before_the_backward_pass(project: Project, strategy: str) -> None:
    """A language model's logits are gigabytes, which the backward pass can use for gradients."""
    project.edit(
        "model.py",
        "    errors = (outputs",
        "    import weakref\n    outputs = outputs * 1.0\n    errors = (outputs",
    )
    state = "'dropped' if dropped() is None else 'held'"
    count = f"lambda _: print('outputs are ' + ({state}) + '\\n', end='')"
    watch = f"    dropped = weakref.ref(outputs)\n    if loss.requires_grad:\n        loss.register_hook({count})"
    project.edit("model.py", "    return loss, outputs", f"{watch}\n    return loss, outputs")
    output = project.run(
        "training.max_steps=3",
        "device_ids=cpu,cpu",
        f"strategy={strategy}",
        "logging.every_steps=2",
    )
    assert "outputs are held" not in output and output.count("outputs are dropped") >= 3, output

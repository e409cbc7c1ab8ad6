"""Tests of scores, and of what ranks share, in cases where public reports found other trainers silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from workload import dataset as workload_data

from conftest import Project

RANKS = ("cpu", "cpu,cpu")
SHORT = ("training.max_steps=4", "checkpoint.every_epochs=null", "evaluation.every_epochs=null")
SAVED, EVALUATED = "checkpoint.every_steps=1", "evaluation.every_steps=1"


def weights(project: Project, name: str, step: int = 4) -> dict[str, Any]:
    """Return the model's tensors that the run saved at this step."""
    content: dict[str, Any] = project.checkpoint(name, step)["model"]
    return content


def assert_same_weights(project: Project, *names: str) -> None:
    first, *others = [weights(project, name) for name in names]
    for name, other in zip(names[1:], others, strict=True):
        assert first.keys() == other.keys() and len(first) >= 6
        assert [key for key in first if not torch.equal(first[key], other[key])] == [], (
            names[0],
            name,
        )


RECALLS = """
def build_metrics(config: ModelConfig) -> Any:
    from torchmetrics import Metric, MetricCollection
    from torchmetrics.classification import BinaryF1Score, BinaryPrecision, BinaryRecall

    def recalls() -> dict[str, Any]:
        return {"low": BinaryRecall(0.45), "high": BinaryRecall(0.7)}

    class Counted(BinaryRecall):
        num_seen = 0

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.num_seen += len(preds)
            super().update(preds, target)

        def compute(self) -> Tensor:
            return torch.tensor(float(self.num_seen))

    class Gap(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MetricCollection(recalls())

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.inner.update(preds, target)

        def compute(self) -> Tensor:
            values = self.inner.compute()
            return values["low"] - values["high"]

        def reset(self) -> None:
            super().reset()
            self.inner.reset()

    grouped = {"precision": BinaryPrecision(0.7), "recall": BinaryRecall(0.7), "f1": BinaryF1Score(0.7)}
    groups = [["precision", "recall"], ["f1"]]
    return {
        "plain": MetricCollection(recalls(), prefix="x_"),
        "grouped": MetricCollection(grouped, compute_groups=groups),
        "inner": MetricCollection({"gap": Gap()}),
        "counted": MetricCollection({"seen": Counted()}),
    }[KIND]


def update_metrics(metrics: Any, outputs: Tensor, batch: Batch) -> None:
    metrics.update(batch.targets[:, 0].sigmoid(), torch.ones(len(batch.targets), dtype=torch.int64))
    print("groups", [*metrics.compute_groups.values()])
"""


@pytest.mark.parametrize("devices", RANKS)
@pytest.mark.parametrize("kind", ["plain", "grouped", "inner", "counted"])
def test_metrics_keep_states_of_their_own(project: Project, kind: str, devices: str) -> None:
    """Row 01 of the public cases. torchmetrics merges metrics whose states are equal after a rank's first batch.

    Further forms: a collection inside a metric, and a metric that remembers the batch of the dry run.
    """
    project.append("model.py", f"KIND = {kind!r}\n{RECALLS}")
    project.run(f"device_ids={devices}", "training.max_steps=1", "evaluation.micro_batch_size=1")
    (line,) = project.lines("run", "validation")
    p = workload_data.Numbers(workload_data.DataConfig(), 37, 2, 0.0).targets[:, 0].sigmoid()
    low, high = (p > 0.45).double().mean().item(), (p > 0.7).double().mean().item()
    assert high < 0.5 < low and (p[0] > 0.45) == (p[0] > 0.7), (
        "the first sample alone cannot tell them apart"
    )
    expected = {
        "plain": {"x_low": low, "x_high": high},
        "grouped": {"precision": 1.0, "recall": high, "f1": 2 * high / (1 + high)},
        "inner": {"gap": low - high},
        "counted": {"seen": 37.0 if devices == "cpu" else 19.0},  # rank 0 computes
    }[kind]
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    log = (project.directory("run") / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert ("groups [['precision', 'recall'], ['f1']]" in log) == (kind == "grouped"), (
        "the user's own groups stay"
    )


NOISE = """
deterministic = compute_loss


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    loss, outputs = deterministic(model, batch)
    return loss + (outputs * torch.randn_like(outputs)).mean(), outputs
"""
DRAWING_METRIC = """
import random

import numpy


def build_metrics(config: ModelConfig) -> Any:
    from torchmetrics import MeanMetric, MetricCollection

    class Drawing(MeanMetric):
        def compute(self) -> Tensor:
            return super().compute() + torch.rand(()) + random.random() + numpy.random.rand()

    return MetricCollection({"drawing": Drawing()})


def update_metrics(metrics: Any, outputs: Tensor, batch: Batch) -> None:
    metrics.update(torch.rand(len(outputs)))
"""


@pytest.mark.parametrize("devices", RANKS)
@pytest.mark.parametrize("code", [NOISE, DRAWING_METRIC], ids=["loss", "metric"])
def test_evaluation_draws_from_random_states_of_its_own(
    project: Project, code: str, devices: str
) -> None:
    """Row 13 of the public cases. Further form: a metric that draws, in compute() too, which rank 0 alone calls."""
    project.append("model.py", code)
    words = (f"device_ids={devices}", "model.dropout=0.5", *SHORT)
    project.run_many(
        {"never": [*words, "checkpoint.every_steps=4"], "often": [*words, SAVED, EVALUATED]}
    )
    assert_same_weights(project, "never", "often")
    lines = project.lines("often", "validation")
    assert len(lines) == 4
    best = min(lines, key=lambda line: float(line["loss"]))
    project.run("evaluate", "name=often", f"device_ids={devices}")
    result = project.json("often", "evaluation.json")
    assert {key: result[key] for key in best if key != "epoch"} == {
        key: best[key] for key in best if key != "epoch"
    }


PREDICT = """
def predict(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"drawn": torch.rand(len(batch.inputs))}
"""
INPUTS = """
def read_inputs(source: str, config: DataConfig) -> tuple[Any, list[str]]:
    return Numbers(config, 5, 4, 0.0), list("abcde")
"""


def test_predictions_that_draw_are_the_same_again(project: Project) -> None:
    """Row 13 of the public cases, a further form: `predict` of a model that samples."""
    project.append("model.py", PREDICT)
    project.append("dataset.py", INPUTS)
    project.run("training.max_steps=1")
    contents = []
    for devices in ("cpu", "cpu", "cpu,cpu"):
        project.run("predict", "x", f"device_ids={devices}", "evaluation.micro_batch_size=1")
        contents.append((project.directory("run") / "predictions.jsonl").read_bytes())
    assert contents[0] == contents[1] == contents[2] and contents[0].count(b"\n") == 5


CODED = """
class Coded(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.config, self.num_calls = body, body.config, 0
        self.register_buffer("code", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.body(inputs)
        if CONDITION:
            self.code.lerp_(outputs.detach().mean(0), 0.5)
        return outputs - self.code


former_model = build_model


def build_model(config: ModelConfig) -> nn.Module:
    return Coded(former_model(config))
"""
RESIDENT = CODED.replace("CONDITION", "self.training")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_that_training_reads_are_told_and_change_by_no_save_or_evaluation(
    project: Project, strategy: str
) -> None:
    """Row 03 of the public cases: an EMA codebook. Further form: under fsdp."""
    project.append("model.py", RESIDENT)
    words = ["device_ids=cpu,cpu", f"strategy={strategy}", *SHORT]
    cases = {
        "never": ["checkpoint.every_steps=4"],
        "saved": [SAVED],
        "evaluated": [SAVED, EVALUATED],
    }
    output = "".join(project.run(f"name={name}", *words, *case) for name, case in cases.items())
    assert output.count("these buffers differ between ranks: code; ") == 3, "one line a run"
    assert_same_weights(project, *cases)


def test_buffers_that_ddp_broadcasts_depend_on_no_save_evaluation_or_resume(
    project: Project,
) -> None:
    """Row 03 of the public cases: the remedy that the warning names."""
    project.append("model.py", RESIDENT)
    words = [
        "device_ids=cpu,cpu",
        "ddp.broadcast_buffers=true",
        "training.micro_batch_size=3",
        *SHORT,
    ]
    cases = {"never": ["checkpoint.every_steps=4"], "often": [SAVED, EVALUATED]}
    outputs = [project.run(f"name={name}", *words, *case) for name, case in cases.items()]
    project.rewind("often", 2, "resumed")
    outputs.append(project.run("name=resumed", *words, *cases["often"]))
    assert "differ between ranks" not in "".join(outputs)
    assert_same_weights(project, "never", "often", "resumed")


def test_evaluating_changes_no_buffer(project: Project) -> None:
    """Row 03 of the public cases, a further form: a queue that every forward fills, on one rank too."""
    project.append("model.py", CODED.replace("CONDITION", "True"))
    project.run_many(
        {"never": [*SHORT, "checkpoint.every_steps=4"], "often": [*SHORT, SAVED, EVALUATED]}
    )
    assert_same_weights(project, "never", "often")


FROZEN = """
def on_epoch_begin(model: nn.Module, epoch: int) -> None:
    model[1].train(epoch == 0)
"""


def test_batchnorm_that_is_frozen_later_has_the_same_statistics_on_all_ranks(
    project: Project,
) -> None:
    """Row 03 of the public cases, a further form: in eval mode, BatchNorm reads statistics that differ by rank."""
    project.edit(
        "model.py", "nn.Linear(6, 16), nn.Tanh()", "nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()"
    )
    project.append("model.py", FROZEN)
    words = [
        "device_ids=cpu,cpu",
        "data.num_samples=102",
        "training.global_batch_size=34",
        *SHORT,
        "training.max_steps=7",
    ]
    words += ["training.check_replicas_every_steps=1"]
    cases = {"never": ["checkpoint.every_steps=7"], "often": [SAVED, EVALUATED]}
    output = "".join(project.run(f"name={name}", *words, *case) for name, case in cases.items())
    project.rewind("often", 5, "resumed")
    output += project.run("name=resumed", *words, *cases["often"])
    assert "differ between ranks" not in output
    for name in ("often", "resumed"):
        pairs = zip(
            weights(project, "never", 7).values(), weights(project, name, 7).values(), strict=True
        )
        assert all(torch.equal(*pair) for pair in pairs), name


DTYPES = """
plain_model = build_model


def build_model(config: ModelConfig) -> nn.Module:
    model = plain_model(config)
    for name in ("int16", "uint16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool", "float16"):
        model.register_buffer(name, torch.randint(0, 2, (3, 2)).to(getattr(torch, name)).t())
    model.register_buffer("scalar", torch.tensor(7, dtype=torch.int16))
    model.register_buffer("empty", torch.empty(0, 3, dtype=torch.uint16))
    return model
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_of_any_dtype_are_shared_saved_and_resumed(project: Project, strategy: str) -> None:
    """Row 12 of the public cases: gloo and NCCL cannot send int16, uint16 and float8."""
    project.append("model.py", DTYPES)
    words = [f"strategy={strategy}", *SHORT, SAVED, EVALUATED]
    project.run(*words, "device_ids=cpu")
    two = [*words, "name=two", "device_ids=cpu,cpu", "training.check_replicas_every_steps=1"]
    assert "differ between ranks" not in project.run(*two)
    project.rewind("two", 2, "resumed")
    project.run(*two, "name=resumed")
    assert_same_weights(project, "two", "resumed")
    names = [name for name in weights(project, "two") if not name[0].isdigit()]
    assert len(names) == 9
    for name in names:
        one, other = weights(project, "run")[name], weights(project, "two")[name]
        assert one.dtype == other.dtype and torch.equal(one, other)
    project.run("evaluate", "name=two", "device_ids=cpu,cpu")


TABLES = """
class Shifted(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.config, self.num_calls = body, body.config, 0
        BEGIN

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "table") or self.table is None or len(self.table) < len(inputs):
            GROW
        return self.body(inputs) + self.table[: len(inputs), None]


former_model = build_model


def build_model(config: ModelConfig) -> nn.Module:
    return Shifted(former_model(config))
"""
MADE = 'self.register_buffer("table", torch.arange(len(inputs)).float(), persistent=False)'
BEGINNINGS = {
    "whole": (MADE.replace("len(inputs)", "103"), "pass"),
    "none": ('self.register_buffer("table", None, persistent=False)', MADE),
    "absent": ("pass", MADE),
    "one": (MADE.replace("len(inputs)", "1"), MADE),
    "resized": (
        MADE.replace("len(inputs)", "1"),
        "self.table.resize_(len(inputs)).copy_(torch.arange(len(inputs)))",
    ),
}


@pytest.mark.parametrize("devices", RANKS)
def test_tables_that_forward_makes_or_enlarges_train_as_whole_ones(
    project: Project, devices: str
) -> None:
    """Row 19 of the public cases. Further forms: a buffer enlarged in place, and tables as long as a rank's share."""
    text = (project.folder / "template_package" / "model.py").read_text(encoding="utf-8")
    former = text
    words = [f"device_ids={devices}", "training.global_batch_size=15", *SHORT, SAVED, EVALUATED]
    for name, (begin, grow) in BEGINNINGS.items():
        new = f"{text}\n\n{TABLES.replace('BEGIN', begin).replace('GROW', grow)}\n"
        project.edit("model.py", former, new)
        former = new
        project.run(f"name={name}", *words)
    assert_same_weights(project, *BEGINNINGS)
    losses = {
        name: [line["loss"] for line in project.lines(name, "validation")] for name in BEGINNINGS
    }
    assert losses == dict.fromkeys(BEGINNINGS, losses["whole"])


@pytest.mark.parametrize("devices", RANKS)
def test_saved_buffer_that_forward_makes_is_refused(project: Project, devices: str) -> None:
    """Row 19 of the public cases: a run could not be resumed from a checkpoint that holds it."""
    project.append(
        "model.py",
        TABLES.replace("BEGIN", "pass").replace("GROW", MADE.replace(", persistent=False", "")),
    )
    output = project.run(f"device_ids={devices}", code=2)
    assert (
        "model: forward made or resized the buffer table: " in output and "Traceback" not in output
    )


GATHERED = """
loss_of_rank = compute_loss


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    loss, outputs = loss_of_rank(model, batch)
    if outputs.requires_grad and torch.distributed.is_initialized():
        parts = [torch.empty_like(outputs) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, outputs.detach())
        loss = loss + 0.1 * (outputs @ torch.cat(parts).T).square().mean()
    return loss, outputs
"""


def test_loss_that_gathers_unequal_last_shares_ends_before_the_first_step(project: Project) -> None:
    """Row 10 of the public cases: batches of 8 leave 5 samples, 3 and 2 a rank. gloo aborts the rank that has 2."""
    project.append("model.py", GATHERED)
    words = ["device_ids=cpu,cpu", "training.global_batch_size=8", "training.epochs=1"]
    output = project.run(*words, "data.num_samples=21", code=1)
    assert "This was the trial of an epoch's last 5 samples, on 2 ranks." in output
    assert not (project.directory("run") / "metrics.jsonl").exists()
    project.run("name=equal", *words, "data.num_samples=22")
    assert len(project.lines("equal")) == 3


def test_mean_loss_of_an_epoch_counts_each_sample_once_wherever_it_was_begun(
    project: Project,
) -> None:
    """An epoch's last batch may be small: its loss alone said 1.3 where the epoch's mean was 2.9."""
    sizes, one = (16, 16, 3), "device_ids=cpu"
    words = ("data.num_samples=35", "training.epochs=3", "checkpoint.every_steps=1")
    project.run("name=run", one, *words)
    lines = project.lines("run")
    for epoch in (0, 3, 6):
        steps = lines[epoch : epoch + 3]
        wanted = sum(size * line["loss"] for size, line in zip(sizes, steps, strict=True)) / 35
        assert steps[2]["epoch_loss"] == pytest.approx(wanted, rel=1e-12)
        assert "epoch_loss" not in steps[0] | steps[1]
    project.rewind("run", 5, "same")
    project.run("name=same", one, *words)
    assert project.lines("same") == lines
    project.rewind("run", 4, "ranks")
    project.run("name=ranks", "device_ids=cpu,cpu", *words)
    assert project.lines("ranks")[5]["epoch_loss"] == pytest.approx(lines[5]["epoch_loss"])
    project.rewind("run", 4, "older")
    state = project.checkpoint("older", 4)
    del state["early_stopping"]["loss_sum"]  # a file of version 0.2
    torch.save(state, project.directory("older") / "checkpoints" / "step_00000004.pt")
    project.run("name=older", one, *words)
    assert "epoch_loss" not in project.lines("older")[5]
    assert project.lines("older")[8] == lines[8]


TERMS = """
_plain_loss = compute_loss


def compute_loss(model: nn.Module, batch: Batch) -> Any:
    loss, outputs = _plain_loss(model, batch)
    return {"own": loss, "size": 0.1 * outputs.square().mean()}, outputs
"""


@pytest.mark.parametrize("devices", RANKS)
def test_best_checkpoint_by_a_term_of_the_loss_is_the_one_with_the_smallest(
    project: Project, devices: str
) -> None:
    """With evaluation.mode=max, the default, the worst one was kept."""
    project.append("model.py", TERMS)
    words = f"device_ids={devices}", "evaluation.metric=own"
    output = project.run(*words, "evaluation.mode=max", code=2)
    assert "evaluation.mode=max: would keep the worst checkpoint of evaluation.metric=own" in output
    project.run(*words, "evaluation.mode=min")
    values = [line["own"] for line in project.lines("run", "validation")]
    assert project.json("run", "summary.json")["best"]["own"] == min(values) < max(values)


def test_figure_with_the_name_of_a_term_is_refused(project: Project) -> None:
    """It took the term's place in the log."""
    more = "def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:\n"
    project.append("model.py", TERMS + more + '    return {"own": outputs.mean()}')
    assert "own is a term of the loss, too. Rename it." in project.run(code=2)


def test_a_weighted_mean_is_told_in_bf16_too(project: Project) -> None:
    """Its tolerance of 3 % hid class weights, and precision=auto is bf16 on most GPUs."""
    project.append(
        "model.py",
        """
def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    outputs = model(batch.inputs).float()
    weights = 1 + batch.inputs[:, 0].abs()
    errors = (outputs - batch.targets).square().mean(1)
    return (errors * weights).sum() / weights.sum(), outputs
""",
    )
    for precision in ("fp32", "bf16"):
        output = project.run(f"training.precision={precision}", f"name={precision}")
        assert "the loss is no mean over samples" in output


CHANGING = """
_plain_loss = compute_loss


def compute_loss(model: nn.Module, batch: Batch) -> Any:
    loss, outputs = _plain_loss(model, batch)
    terms = {"own": loss}
    if CONDITION:
        terms["size"] = 0.1 * outputs.square().mean()
    return terms, outputs
"""


@pytest.mark.parametrize("devices", RANKS)
@pytest.mark.parametrize(
    "condition",
    [
        "batch.inputs[0, 0] > 0",
        "model.training and batch.inputs[0, 0] > 0",
        "len(batch.inputs) == 7",
    ],
)
def test_terms_of_the_loss_that_change_with_the_batch_are_refused(
    project: Project, condition: str, devices: str
) -> None:
    """Ranks added up terms of other names: a wrong loss was logged, or the ranks hung."""
    project.append("model.py", CHANGING.replace("CONDITION", condition))
    words = "training.global_batch_size=15", "training.micro_batch_size=7", "logging.every_steps=1"
    output = project.run(f"device_ids={devices}", *words, code=2)
    assert "compute_loss in model.py: the terms of its loss must have the same names" in output


def test_terms_of_another_name_on_each_rank_are_refused_before_step_1(project: Project) -> None:
    code = CHANGING.replace("CONDITION", "torch.distributed.get_rank()")
    project.append("model.py", code)
    output = project.run("device_ids=cpu,cpu", code=2)
    assert "compute_loss in model.py: the terms of its loss must have the same names" in output


@pytest.mark.parametrize("devices", RANKS)
def test_term_that_exists_in_training_alone_is_logged_there(project: Project, devices: str) -> None:
    project.append("model.py", CHANGING.replace("CONDITION", "model.training"))
    project.run(f"device_ids={devices}")
    assert "size" in project.lines("run")[0]
    assert "size" not in project.lines("run", "validation")[0]


@pytest.mark.parametrize("name", ["loss", "step"])
def test_metric_with_a_name_that_is_taken_is_refused(project: Project, name: str) -> None:
    """It took the place of the loss, or of the step, in metrics.jsonl."""
    project.append(
        "model.py",
        f"""
def build_metrics(config: ModelConfig) -> Any:
    from torchmetrics import MeanAbsoluteError, MetricCollection

    return MetricCollection({{"absolute_error": MeanAbsoluteError(), "{name}": MeanAbsoluteError()}})


def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {{"error": outputs.mean()}}
""",
    )
    output = project.run("device_ids=cpu,cpu", code=2)
    assert f"build_metrics in model.py: {name} is the name of another number" in output


@pytest.mark.parametrize("devices", RANKS)
def test_figure_of_a_batch_that_counts_nothing_does_not_count(
    project: Project, devices: str
) -> None:
    """A mean of nothing, 0/0, made the logged one NaN, in training but not in evaluation."""
    project.append(
        "model.py",
        """
def loss_weight(batch: Batch) -> Tensor:
    return (batch.inputs[:, 0] > 0.5).sum()


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    outputs, counts = model(batch.inputs), (batch.inputs[:, 0] > 0.5)
    errors = (outputs - batch.targets).square().mean(1)
    return (errors * counts).sum() / counts.sum().clamp(min=1), outputs


def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"error": (outputs - batch.targets)[batch.inputs[:, 0] > 0.5].abs().mean()}
""",
    )
    words = "training.micro_batch_size=1", "logging.every_steps=1", f"device_ids={devices}"
    project.run(*words, "training.max_steps=3")
    assert all(0 < line["error"] < 10 for line in project.lines("run"))


def test_replicas_that_differ_are_never_saved(project: Project) -> None:
    """Ranks that came to differ in the last epoch ended with 0."""
    hook = "def after_step(model: Any, step: int, log: Any) -> None:\n    if step == 17:\n"
    project.append("model.py", hook + "        model[3].bias.add_(torch.distributed.get_rank())")
    output = project.run("device_ids=cpu,cpu", code=1)
    assert "after step 21 '3.bias' differs between ranks" in output
    assert not (project.directory("run") / "checkpoints" / "step_00000021.pt").exists()


def test_a_weighted_mean_is_told_if_the_first_samples_are_of_one_class(project: Project) -> None:
    """A validation set sorted by class, as folders of images are, hid class weights from the trial."""
    project.append(
        "model.py",
        """
def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    outputs = model(batch.inputs)
    weights = 1 + (batch.inputs[:, 0] > 0)
    errors = (outputs - batch.targets).square().mean(1)
    return (errors * weights).sum() / weights.sum(), outputs
""",
    )
    project.append(
        "dataset.py",
        """
_plain = build_datasets


def build_datasets(config: DataConfig) -> Any:
    train, validation, test = _plain(config)
    order = sorted(range(len(validation)), key=lambda index: bool(validation[index].inputs[0] > 0))
    return train, torch.utils.data.Subset(validation, order), test
""",
    )
    output = project.run("training.micro_batch_size=8")
    assert "warning: the loss is no mean over samples" in output


def test_metric_may_have_the_name_of_a_figure_of_training(project: Project) -> None:
    """So that both are one curve: the metric's number counts in evaluations."""
    more = "def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:\n"
    project.append("model.py", more + '    return {"absolute_error": outputs.mean() - 100}')
    project.run("training.max_steps=2")
    assert project.lines("run")[0]["absolute_error"] < 0
    assert project.lines("run", "validation")[0]["absolute_error"] > 0


def test_loss_that_is_no_mean_loss_of_training_samples_is_told(project: Project) -> None:
    """Labels that only the training set lacks, and a sum that is never evaluated: one gradient per cut."""
    project.append(
        "model.py",
        """
def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    outputs = model(batch.inputs)
    known = ~batch.targets.isnan()
    return (outputs - batch.targets)[known].square().mean(), outputs
""",
    )
    words = ["training.max_steps=2"]
    told = "warning: the loss is no mean over samples"
    for devices in RANKS:
        assert told not in project.run(f"device_ids={devices}", *words, f"name=all-{len(devices)}")
    project.append(
        "dataset.py",
        """
_plain = build_datasets


class WithoutSome(torch.utils.data.Dataset):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        return item._replace(targets=item.targets + (float("nan") if index % 3 == 0 else 0))


def build_datasets(config: DataConfig) -> Any:
    train, *others = _plain(config)
    return WithoutSome(train), *others
""",
    )
    for devices in RANKS:
        assert told in project.run(f"device_ids={devices}", *words, f"name=some-{len(devices)}")
    project.append("model.py", "\ncompute_loss = lambda m, b: ((x := m(b.inputs)).sum(), x)")
    words += ["evaluation.every_epochs=null"]
    for devices in RANKS:
        assert told in project.run(f"device_ids={devices}", *words, f"name=sum-{len(devices)}")


def test_loss_that_draws_noise_is_a_mean_loss_but_a_sum_is_told(project: Project) -> None:
    """A diffusion model's halves draw otherwise than the whole: each run told it of a right loss."""
    project.append(
        "model.py",
        """
def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scale = torch.rand(len(batch.targets), 1)
    outputs = model(batch.inputs + 0.1 * scale * torch.randn_like(batch.inputs))
    return (outputs - batch.targets).square().mean(), outputs
""",
    )
    told = "warning: the loss is no mean over samples"
    for devices in RANKS:
        assert told not in project.run(f"device_ids={devices}", f"name=mean-{len(devices)}")
    project.edit(
        "model.py",
        "batch.targets).square().mean(), outputs",
        "batch.targets).square().sum(), outputs",
    )
    for devices in RANKS:
        assert told in project.run(f"device_ids={devices}", f"name=sum-{len(devices)}")


def test_metric_that_does_not_say_what_is_better_is_told(project: Project) -> None:
    """mode=min, left from a loss, keeps the smallest accuracy as best.pt."""
    more = "def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:\n"
    project.append("model.py", more + '    return {"accuracy": outputs.mean()}')
    words = "training.max_steps=1", "evaluation.metric=accuracy"
    line = "evaluation.mode=min: best.pt has the minimum of accuracy"
    assert line in project.run(*words, "evaluation.mode=min")
    assert "best.pt has" not in project.run(
        *words[:1], "evaluation.metric=loss", "evaluation.mode=min", "name=loss"
    )


def test_learning_rate_below_zero_is_refused(project: Project) -> None:
    """It trained upwards, and of one that is NaN the samples were blamed."""
    project.append(
        "model.py",
        "\ndef learning_rate(step: int, total_steps: int) -> float:\n    return 1 - (step - 1) / 4\n",
    )
    line = "learning_rate() in model.py returns -0.25 at step 6 of 6. Return 0 or more."
    assert line in project.run("training.max_steps=6", code=2)
    project.run("training.max_steps=5")


def test_metric_without_a_state_is_refused_on_two_ranks(project: Project) -> None:
    """Rank 0's own samples made its number, which was recorded as that of all."""
    project.append(
        "model.py",
        """
def build_metrics(config: ModelConfig) -> Any:
    from torchmetrics import MeanMetric, Metric, MetricCollection

    class Largest(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.value = torch.zeros(())

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.value = preds.max()

        def compute(self) -> Tensor:
            return self.value

    return MetricCollection({"largest": Largest(), "sum": MeanMetric() + MeanMetric()})


def update_metrics(metrics: Any, outputs: Tensor, batch: Batch) -> None:
    metrics["largest"].update(outputs, batch.targets)
    metrics["sum"].update(outputs)
""",
    )
    words = "training.max_steps=1", "evaluation.metric=loss", "evaluation.mode=min"
    project.run(*words)
    line = "build_metrics in model.py: Largest keeps its numbers where ranks cannot add them up"
    assert line in project.run(*words, "device_ids=cpu,cpu", "name=two", code=2)


RIGHT = {
    "other items in training": """
def compute_loss(model: nn.Module, batch: Any) -> Any:
    if model.training:
        batch, again = batch
        assert torch.equal(batch.inputs, again.inputs)
    outputs = model(batch.inputs)
    return (outputs - batch.targets).square().mean(), outputs
""",
    "a gradient of a gradient": """
def compute_loss(model: nn.Module, batch: Any) -> Any:
    inputs = batch.inputs.clone().requires_grad_()
    outputs = model(inputs)
    slopes = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]
    return ((outputs - batch.targets).square().mean(1) + slopes.square().sum(1)).mean(), outputs
""",
    "a mask from collate": """
def compute_loss(model: nn.Module, batch: Any) -> Any:
    outputs = model(batch.inputs) * batch.lengths[:, None]
    return (outputs - batch.targets * batch.lengths[:, None]).square().sum() / batch.lengths.sum(), outputs


def loss_weight(batch: Any) -> Tensor:
    return batch.lengths.sum()
""",
    "a batch size of its own": """
def compute_loss(model: nn.Module, batch: Any) -> Any:
    assert not model.training or len(batch.inputs) % 8 == 0
    outputs = model(batch.inputs)
    return (outputs - batch.targets).square().mean(), outputs
""",
    "a batch size of its own on one rank": """
def compute_loss(model: nn.Module, batch: Any) -> Any:
    is_other = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
    assert not model.training or not is_other or len(batch.inputs) % 8 == 0
    outputs = model(batch.inputs)
    return (outputs - batch.targets).square().mean(), outputs
""",
    "a codebook that follows the batches": """
_plain_model = build_model


def build_model(config: ModelConfig) -> nn.Module:
    model = _plain_model(config)
    model.register_buffer("code", torch.randn(2))
    return model


def compute_loss(model: nn.Module, batch: Any) -> Any:
    outputs = model(batch.inputs)
    loss = (outputs - batch.targets).square().mean() + (outputs - model.code).square().mean()
    if model.training:
        model.code.mul_(0.1).add_(batch.targets.mean(0))
    return loss, outputs
""",
    "an event": """
def compute_loss(model: nn.Module, batch: Any) -> Any:
    outputs = model(batch.inputs * (torch.rand(()) < 0.8))
    return (outputs - batch.targets).square().mean(), outputs
""",
    "dropout and noise": """
def compute_loss(model: nn.Module, batch: Any) -> Any:
    inputs = nn.functional.dropout(batch.inputs, 0.5, training=model.training)
    outputs = model(inputs + 0.1 * torch.randn_like(inputs)) * torch.rand(len(inputs), 1)
    return (outputs - batch.targets).square().mean(), outputs
""",
}
PAIRS = """
_plain = build_datasets


class Pairs(torch.utils.data.Dataset):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index], self.dataset[index]


def build_datasets(config: DataConfig) -> Any:
    train, *others = _plain(config)
    return Pairs(train), *others
"""
DRAWING = """
def collate(items: Any) -> Any:
    batch = torch.utils.data.default_collate(items)
    return batch._replace(lengths=1 + 4 * torch.rand(len(items)).round())
"""


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("devices", RANKS)
def test_right_mean_loss_is_not_told(project: Project, devices: str, kind: str) -> None:
    """Nor does its trial end the run. One sample has no parts, and two have two orders."""
    project.append("model.py", RIGHT[kind])
    if "items" in kind:
        project.append("dataset.py", PAIRS)
    if "collate" in kind:
        project.append("dataset.py", DRAWING)
    words = ["training.max_steps=2", "evaluation.every_epochs=null"]
    words = words if "gradient" in kind else ["training.drop_last=true", *words[:1]]
    for size in ("auto", "1", "2")[: 1 if "of its own" in kind else 3]:
        words = [*words[:2], f"training.micro_batch_size={size}", f"name={size}"]
        assert "no mean over" not in project.run(f"device_ids={devices}", *words)


def test_mean_loss_over_known_labels_is_told_beside_texts(project: Project) -> None:
    """Names of files in a batch, and a last number: it cannot be cut after it was collated."""
    more = """
def compute_loss(model: nn.Module, batch: Any) -> Any:
    if model.training:
        outputs = model(batch["inputs"])
        known = batch["lengths"] % 2 == 1
        errors = (outputs - batch["targets"]).square().mean(1)
        return errors[known].sum() / max(known.sum(), 1), outputs
    outputs = model(batch[0])
    return (outputs - batch[1]).square().mean(), outputs
"""
    project.append("model.py", more)
    more = """
def collate(items: Any) -> Any:
    if isinstance(items[0], tuple) and not isinstance(items[0], Batch):
        batch = torch.utils.data.default_collate([item for item, _ in items])._asdict()
        return {**batch, "paths": ["a.png"] * len(items), "number": len(items)}
    return torch.utils.data.default_collate(items)
"""
    project.append("dataset.py", PAIRS + more)
    words = "training.max_steps=2", "data.max_length=9"
    assert "warning: the loss is no mean over samples" in project.run(*words)

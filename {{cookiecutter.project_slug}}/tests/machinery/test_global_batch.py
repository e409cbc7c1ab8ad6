"""Tests of losses that compare the samples of a global batch: the same on any ranks, or refused.

The numbers in the docstrings are of a newcomer's trial, whose faults ended with exit code 0 and a wrong loss.
"""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workload.dataset import DataConfig, build_datasets

from template_package.core.data import epoch_order
from template_package.core.global_batch import gather_rows, own_rows

from conftest import PACKAGE, ROOT, Project

PAGE = ROOT.parent / "docs" / "how-to" / "contrastive.md"
RANKS = {1: "cpu", 2: "cpu,cpu", 4: "cpu,cpu,cpu,cpu"}
# Global batches of 16, 16 and 3 samples: with 4 ranks, the last one has none.
SHORT = ("data.num_samples=35", "training.global_batch_size=16", "training.epochs=2", "optimizer.name=sgd",
         "optimizer.learning_rate=0.3", "optimizer.weight_decay=0", "schedule.name=constant", "evaluation.metric=loss",
         "evaluation.mode=min")  # fmt: skip
CLIP = """
from torch.nn.functional import cross_entropy, normalize

from .core.global_batch import gather_rows, own_rows

loss_over = "global_batch"


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 2), nn.Linear(2, 2)
        self.log_scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normalize(self.left(inputs)), normalize(self.right(targets)), self.log_scale.exp()


def build_model(config: ModelConfig) -> nn.Module:
    return Towers()


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    left, right, scale = model(batch.inputs, batch.targets)
    labels = own_rows(left)
    forth = cross_entropy(scale * left @ gather_rows(right).T, labels)
    back = cross_entropy(scale * right @ gather_rows(left).T, labels)
    return (forth + back) / 2, left
"""
WITHOUT_GRADIENT = (
    CLIP
    + """

def gather_rows(rows: Tensor) -> Tensor:
    from .core.global_batch import gather_rows

    gathered = gather_rows(rows)
    return gathered.detach() if len(gathered) > len(rows) else rows
"""
)
BY_HAND = (
    CLIP
    + """

def gather_rows(rows: Tensor) -> Tensor:
    if not torch.distributed.is_initialized():
        return rows
    parts = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, rows)
    parts[torch.distributed.get_rank()] = rows
    return torch.cat(parts)
"""
)
NOT_A_NUMBER = CLIP.replace(
    "back) / 2", "back) / (float('nan') if 3 < len(gather_rows(left)) < 10 else 2)"
)
WITHOUT_GATHER = CLIP.replace("gather_rows(", "(").replace(
    "own_rows(left)", "torch.arange(len(left))"
)


def losses(project: Project, name: str) -> list[float]:
    return [line["loss"] for line in project.lines(name)]


def validation_losses(project: Project, name: str) -> list[float]:
    return [line["loss"] for line in project.lines(name, "validation")]


def train_plainly(num_steps: int) -> tuple[list[float], float]:
    """Return the losses of a script for one device, as anybody would write it, and the mean validation loss."""
    torch.manual_seed(42)  # as config.yaml of the tests
    left, right = nn.Linear(6, 2), nn.Linear(2, 2)
    log_scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(
        [*left.parameters(), *right.parameters(), log_scale], lr=0.3, momentum=0.9
    )
    train, validation, _ = build_datasets(DataConfig(num_samples=35))

    def loss_of(data: Any, rows: Tensor) -> Tensor:
        a, b = F.normalize(left(data.inputs[rows])), F.normalize(right(data.targets[rows]))
        logits, labels = log_scale.exp() * a @ b.T, torch.arange(len(rows))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    found: list[float] = []
    for epoch in range(2):
        for rows in torch.split(epoch_order(35, 42, epoch), 16):
            loss = loss_of(train, rows)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
    parts = torch.split(torch.arange(37), 16)
    with torch.no_grad():
        total = sum(loss_of(validation, rows).item() * len(rows) for rows in parts)
    return found[:num_steps], total / 37


@pytest.fixture
def clip(project: Project) -> Project:
    project.append("model.py", CLIP)
    return project


def test_curves_are_those_of_a_plain_script_on_any_ranks(clip: Project) -> None:
    """The last batch's 3 samples leave a rank of 4 without one. Its repeated sample gave 1.378 for 1.097."""
    wanted, wanted_validation = train_plainly(6)
    for number, devices in RANKS.items():
        output = clip.run(f"name=r{number}", f"device_ids={devices}", *SHORT)
        assert (
            "warning" not in output
        )  # "the loss is no mean over samples", for right and wrong ones
        assert losses(clip, f"r{number}") == pytest.approx(wanted, abs=1e-5)
        assert validation_losses(clip, f"r{number}")[-1] == pytest.approx(wanted_validation, abs=1e-5)  # fmt: skip
    found = set()
    for devices in RANKS.values():  # 4.172 or 2.125 before, by the devices
        clip.run("evaluate", "name=r2", f"device_ids={devices}", *SHORT)
        found.add(round(clip.json("r2", "evaluation.json")["loss"], 5))
    assert len(found) == 1


def test_fsdp_and_16_bits(clip: Project) -> None:
    wanted, _ = train_plainly(6)
    clip.run("name=fsdp", f"device_ids={RANKS[4]}", "strategy=fsdp", *SHORT)
    assert losses(clip, "fsdp") == pytest.approx(wanted, abs=1e-5)
    clip.run("name=bf16", f"device_ids={RANKS[4]}", "training.precision=bf16", *SHORT)
    assert losses(clip, "bf16") == pytest.approx(wanted, rel=0.05)


KILLED = """
loss_of_all, calls = compute_loss, []


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    import os
    from pathlib import Path

    calls.append(model.training)
    if sum(calls) == 9 and torch.distributed.get_rank() == 1 and Path("kill").exists():
        os.kill(os.getpid(), 9)
    return loss_of_all(model, batch)
"""


def test_run_that_was_killed_goes_on_with_other_ranks(clip: Project) -> None:
    words = [*SHORT, "checkpoint.every_steps=1"]
    wanted, _ = train_plainly(6)
    clip.append("model.py", KILLED)
    (clip.folder / "kill").touch()
    output = clip.run("name=run", f"device_ids={RANKS[4]}", *words, code=1)
    assert "SIGKILL" in output and 0 < len(losses(clip, "run")) < 6
    (clip.folder / "kill").unlink()
    clip.run("name=run", f"device_ids={RANKS[1]}", *words, "training.max_steps=4")
    clip.run("name=run", f"device_ids={RANKS[2]}", *words)
    assert losses(clip, "run")[-2:] == pytest.approx(wanted[-2:], abs=1e-5)
    assert losses(clip, "run")[:4] == pytest.approx(wanted[:4], abs=1e-5)


@pytest.mark.parametrize("devices", [RANKS[1], RANKS[2]])
def test_micro_batches_are_refused(clip: Project, devices: str) -> None:
    """micro_batch_size=16 changed step 1 from 4.34 to 2.94, silently; evaluation's loss from 4.17 to 2.13."""
    for section in ("training", "evaluation"):
        words = f"{section}.micro_batch_size=4", f"device_ids={devices}"
        output = clip.run("name=cut", *words, *SHORT, code=2)
        assert f"{section}.micro_batch_size=4: loss_over in model.py compares all samples" in output
    assert not (clip.directory("cut") / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("model", "told"),
    [(WITHOUT_GRADIENT, "the gradients differ by 0."),
     (WITHOUT_GATHER, "the loss of 8 samples is"),
     (BY_HAND, "the loss of 8 samples is"),
     (NOT_A_NUMBER, "the loss of 8 samples is nan")],
)  # fmt: skip
def test_declaration_is_proved_before_the_first_step(
    project: Project, model: str, told: str
) -> None:
    """A gather without gradients trained without a word, off by 0.15 after five steps."""
    project.append("model.py", model)
    for strategy in ("ddp", "fsdp"):
        words = f"name={strategy}", f"device_ids={RANKS[2]}", f"strategy={strategy}"
        output = project.run(*words, *SHORT, code=2)
        assert "compute_loss in model.py: on 2 ranks" in output and told in output
        assert not (project.directory(strategy) / "metrics.jsonl").exists()
    project.run("name=one", f"device_ids={RANKS[1]}", *SHORT)


def test_scalar_temperature_under_fsdp_is_refused(project: Project) -> None:
    """OpenCLIP's logit_scale is one: it ended in a traceback of fully_shard."""
    project.append("model.py", CLIP.replace("torch.ones(1)", "torch.ones(())"))
    words = f"device_ids={RANKS[2]}", *SHORT
    output = project.run("name=fsdp", "strategy=fsdp", *words, code=2)
    assert "Give scalars the shape (1,), or set strategy=ddp" in output
    project.run("name=ddp", *words)


def test_loss_that_draws_is_told(project: Project) -> None:
    text = CLIP.replace("(forth + back) / 2", "(forth + back) * torch.rand(())")
    project.append("model.py", text)
    output = project.run("name=run", f"device_ids={RANKS[2]}", *SHORT)
    assert "compute_loss draws random numbers" in output


def test_missing_declaration_is_told(project: Project) -> None:
    """The warning's remedy was loss_weight(), which cannot help."""
    project.append("model.py", CLIP.replace('loss_over = "global_batch"', ""))
    output = project.run("name=run", f"device_ids={RANKS[1]}", *SHORT, code=2)
    assert "gather_rows(), own_rows(): call them in compute_loss()" in output
    project.append("model.py", 'loss_over = "batch"')
    output = project.run("name=run", f"device_ids={RANKS[1]}", *SHORT, code=2)
    assert """loss_over is 'batch'. Write "samples" or "global_batch".""" in output


def test_undeclared_comparison_is_told(project: Project) -> None:
    text = WITHOUT_GATHER.replace('loss_over = "global_batch"', "").replace("gather_rows, ", "")
    project.append("model.py", text)
    output = project.run("name=run", f"device_ids={RANKS[1]}", *SHORT, "optimizer.learning_rate=2")
    assert "for a loss that compares samples loss_over" in output


WEIGHTED = (
    CLIP.replace("cross_entropy(scale", "mean_of(batch, scale")
    + """

def counts_of(batch: Batch) -> Tensor:
    return (gather_rows(batch.targets[:, 0]) < batch.targets[:, :1]).any(1)  # all but the least


def mean(batch: Batch, values: Tensor) -> Tensor:
    counts = counts_of(batch)
    return (values * counts).sum() / counts.sum().clamp(min=1)


def mean_of(batch: Batch, logits: Tensor, labels: Tensor) -> Tensor:
    return mean(batch, cross_entropy(logits, labels, reduction="none"))


def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    nearest = (outputs @ gather_rows(normalize(batch.targets)).T).argmax(1)
    return {"recall": mean(batch, (nearest == own_rows(outputs)).float())}


def loss_weight(batch: Batch) -> Tensor:
    return counts_of(batch).sum()
"""
)


def test_figures_and_weights_may_compare_samples(project: Project) -> None:
    """Outside of compute_loss(), gather_rows() acted as on one rank: step 1 was 3.87 in place of 3.74."""
    project.append("model.py", WEIGHTED)
    for number, devices in RANKS.items():
        project.run(f"name=r{number}", f"device_ids={devices}", *SHORT)
        for split in ("train", "validation"):
            for line, wanted in zip(
                project.lines(f"r{number}", split), project.lines("r1", split), strict=True
            ):
                for name in ("loss", "recall"):
                    assert line[name] == pytest.approx(wanted[name], abs=1e-5), (
                        number,
                        line["step"],
                    )


def test_metrics_may_not_compare_samples(clip: Project) -> None:
    """A rank without a sample does not call update_metrics(), so that the others would wait for it."""
    gathers = "\n\ndef update_metrics(metrics: Any, outputs: Tensor, batch: Batch) -> None:\n    gather_rows(outputs)\n"
    clip.append("model.py", gathers)
    output = clip.run("name=run", f"device_ids={RANKS[2]}", *SHORT, code=2)
    assert "gather_rows(), own_rows(): call them in compute_loss()" in output


def test_training_set_smaller_than_a_global_batch(clip: Project) -> None:
    """The run's own evaluations cut batches of the training set's size: 1.78, and `evaluate` said 2.79."""
    words = [*SHORT, "data.num_samples=6"]
    found = set()
    for number in (1, 2):
        clip.run(f"name=r{number}", f"device_ids={RANKS[number]}", *words)
        clip.run(
            "evaluate",
            f"name=r{number}",
            f"device_ids={RANKS[1]}",
            *words,
            "evaluation.checkpoint=last",
        )
        found |= {round(validation_losses(clip, f"r{number}")[-1], 4)}
        found |= {round(clip.json(f"r{number}", "evaluation.json")["loss"], 4)}
    assert len(found) == 1


def test_prediction_needs_no_global_batch(clip: Project) -> None:
    clip.append("model.py", PREDICT)
    clip.append("dataset.py", READ_INPUTS)
    clip.run(f"device_ids={RANKS[2]}", *SHORT)
    clip.run("predict", "5", f"device_ids={RANKS[2]}", *SHORT)
    text = (clip.directory("run") / "predictions.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == 5


PREDICT = """

def predict(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"left": model(batch.inputs, batch.targets)[0]}
"""
READ_INPUTS = """

def read_inputs(source: str, config: DataConfig) -> Any:
    data = Numbers(config, int(source), 7, 0.0)
    return data, [str(i) for i in range(len(data))]
"""


def test_two_rows_a_sample_are_refused(project: Project) -> None:
    text = CLIP.replace("gather_rows(right)", "gather_rows(torch.cat([right, right]))")
    project.append("model.py", text)
    output = project.run("name=run", f"device_ids={RANKS[2]}", *SHORT, code=2)
    assert "gather_rows: got the shape (8, 2) for 4 samples" in output


def test_last_batch_can_be_dropped(clip: Project) -> None:
    words = [*SHORT, "training.drop_last=true"]
    for number in (1, 4):
        clip.run(f"name=r{number}", f"device_ids={RANKS[number]}", *words)
        assert len(losses(clip, f"r{number}")) == 4
        assert clip.json(f"r{number}", "summary.json")["epochs"] == 2
    assert losses(clip, "r1") == pytest.approx(losses(clip, "r4"), abs=1e-5)
    assert losses(clip, "r1")[:2] == pytest.approx(train_plainly(2)[0], abs=1e-5)
    output = clip.run("name=r1", *words, "data.num_samples=40", "training.epochs=3", code=2)
    assert "was begun with" in output or "data.num_samples" in output
    output = clip.run("name=none", *words, "training.global_batch_size=36", code=2)
    assert "=36: there are 35 training samples, and drop_last drops all" in output


@pytest.mark.parametrize("fault", ["memory_probe", "memory_later"])
def test_memory_that_runs_out_ends_the_run(clip: Project, fault: str) -> None:
    """Half the negatives were left: step 1 was 3.64 in place of 4.34, told in rank 1's log only."""
    faults = """
loss_of_all = compute_loss
calls = []


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    calls.append(0)
    is_due = len(calls) == (1 if FAULT == "memory_probe" else 15)
    if is_due and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return loss_of_all(model, batch)
"""
    clip.append("model.py", f"FAULT = {fault!r}\n{faults}")
    output = clip.run("name=run", f"device_ids={RANKS[2]}", *SHORT, code=1)
    assert "memory ran out, and the loss compares all samples" in output
    assert "Traceback" not in output


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_supcon_of_the_docs_is_the_same_on_any_ranks(project: Project) -> None:
    """Labels, and a queue in a buffer: also after a stop, on another number of ranks."""
    for name in ("model.py", "dataset.py"):
        shutil.copy(ROOT / PACKAGE / name, project.folder / PACKAGE)
    shutil.copy(ROOT / "config.yaml", project.folder)
    (block,) = [block for block in blocks() if "queue" in block]
    project.append("model.py", f"from typing import Any\n\nimport torch\n\n{block}")
    words = [
        "evaluation.metric=loss",
        "evaluation.mode=min",
        "logging.tracker=none",
        "logging.every_steps=1",
    ]
    words += ["schedule.name=constant", "optimizer.name=sgd", "optimizer.learning_rate=0.1"]
    words += ["training.global_batch_size=100", "training.epochs=2", "checkpoint.every_steps=5"]
    for number, devices in RANKS.items():
        output = project.run(f"name=r{number}", f"device_ids={devices}", *words)
        assert "warning" not in output
        assert len(losses(project, f"r{number}")) == 26
        assert losses(project, f"r{number}") == pytest.approx(losses(project, "r1"), rel=1e-5)
    project.run("name=on", f"device_ids={RANKS[4]}", *words, "training.max_steps=7")
    project.run("name=on", f"device_ids={RANKS[2]}", *words)
    assert losses(project, "on") == pytest.approx(losses(project, "r1"), rel=1e-5)
    assert (
        losses(project, "r1")[-1] < max(losses(project, "r1")) - 0.2
    )  # the filling queue raises it first


def test_clip_of_the_docs_is_the_example() -> None:
    example = (ROOT / "examples" / "contrastive" / "model.py").read_text(encoding="utf-8")
    for line in ("labels = own_rows(", "+ find_", 'loss_over = "global_batch"'):
        assert line in example and line in blocks()[0]


def test_one_process_needs_no_group() -> None:
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    assert gather_rows(rows) is rows
    assert own_rows(rows).tolist() == [0, 1, 2]

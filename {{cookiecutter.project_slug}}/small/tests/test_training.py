"""Tests of whole runs: equal on any ranks, resumed to the bit, stopped with nothing lost."""

import signal
import sys
import time

import pytest
import torch

from template_package.core.data import epoch_order

from conftest import Project

DOUBLE = ("model.dtype=float64", "data.dtype=float64")
RANDOM = ("model.dropout=0.3", "data.noise=0.1")
PLAIN_LOOP = """
import sys
import torch
sys.path.insert(0, ".")
from template_package.dataset import DataConfig, build_datasets
from template_package.model import ModelConfig, build_model
from template_package.core.data import epoch_order

data = build_datasets(DataConfig(dtype="float64"))[0]
torch.manual_seed(42)
model = build_model(ModelConfig(dtype="float64"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for indices in epoch_order(len(data), 42, epoch).split(16):
        errors = (model(data.inputs[indices]) - data.targets[indices]).square().mean(1)
        errors.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(errors.mean().item())
"""


def test_any_ranks_and_micro_batches_train_as_a_plain_loop(project: Project) -> None:
    (project.folder / "plain.py").write_text(PLAIN_LOOP, encoding="utf-8")
    plain = project.start(command=(sys.executable, "plain.py"))
    expected = [float(line) for line in plain.communicate()[0].split()]
    words = [*DOUBLE, "optimizer.name=sgd", "optimizer.betas=0,0", "optimizer.weight_decay=0"]
    words += ["schedule.name=constant", "training.epochs=2"]
    for name, ranks, size in (("one", 1, "auto"), ("two", 2, "3"), ("three", 3, "auto")):
        devices = f"device_ids={','.join(['cpu'] * ranks)}"
        project.run(*words, devices, f"name={name}", f"training.micro_batch_size={size}")
        # float64, added in another order; a sample too many would show in the third digit.
        assert project.losses(name) == pytest.approx(expected, rel=1e-10)
    assert len(expected) == 14 and [*epoch_order(3, 42, 0)] != [0, 1, 2]
    evaluations = [project.lines(name, "validation") for name in ("one", "two", "three")]
    for lines in evaluations[1:]:
        for line, first in zip(lines, evaluations[0], strict=True):
            assert line["loss"] == pytest.approx(first["loss"], rel=1e-10)
            assert line["num_samples"] == 37


def test_fsdp_trains_as_ddp_and_a_run_moves_between_them(project: Project) -> None:
    two = (*DOUBLE, "device_ids=cpu,cpu", "schedule.name=constant")
    project.run(*two, "training.epochs=2")
    project.run(*two, "name=moving", "training.epochs=1")
    assert "resuming" in project.run(*two, "name=moving", "training.epochs=2", "strategy=fsdp")
    assert project.losses("moving") == pytest.approx(project.losses("run"), rel=1e-10)


def test_stopped_run_continues_as_if_it_had_not_been_stopped(project: Project) -> None:
    words = [*RANDOM, "device_ids=cpu,cpu", "checkpoint.every_steps=5"]
    words += ["model.seconds_per_step=0.05"]
    project.run(*words, "name=undisturbed")
    slow = project.start(*words, "loader.num_workers=1")  # workers draw the same
    metrics = project.directory("run") / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 2:
        assert slow.poll() is None
        time.sleep(0.01)
    slow.send_signal(signal.SIGTERM)
    output, _ = slow.communicate(timeout=60)
    assert slow.returncode == 143, output
    assert "resuming after step" in project.run(*words)
    for split in ("train", "validation"):
        assert project.lines("run", split) == project.lines("undisturbed", split)
    first, second = project.checkpoint("undisturbed", 21), project.checkpoint("run", 21)
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])


def test_failure_of_one_rank_is_told_once_and_ends_all(project: Project) -> None:
    output = project.run("device_ids=cpu,cpu", "model.fault=raise", code=1)
    assert output.count("Traceback") == 1 and "rank 1 (" in output
    assert "the fault that the test asked for" in output


def test_loss_that_is_computed_past_the_wrapper_is_refused(project: Project) -> None:
    code = """

def compute_loss(model, batch):
    outputs = getattr(model, "module", model)(batch.inputs)
    return (outputs - batch.targets).square().mean(), outputs
"""
    project.append("model.py", code)
    output = project.run("device_ids=cpu,cpu", code=2)
    assert "called model(...) 0 times" in output and "Traceback" not in output


def test_other_settings_under_the_same_name_are_refused(project: Project) -> None:
    project.run("training.epochs=1")
    output = project.run("training.epochs=1", "optimizer.learning_rate=0.1", code=2)
    assert "optimizer.learning_rate: 0.01 -> 0.1" in output and "choose another name" in output
    assert "is complete" in project.run("training.epochs=1")
    output = project.run("evaluate", "evaluation.split=test")
    assert "test split (11 samples)" in output


EVAL = """

former_build = build_model


def build_model(config):
    model = former_build(config)
    model[2].eval()
    return model


def after_step(model, step, log):
    assert model.training and not model[2].training
"""


def test_part_that_build_model_puts_in_eval_mode_stays_there(project: Project) -> None:
    project.append("model.py", EVAL)
    project.run("training.epochs=1", "evaluation.every_steps=2")


EPOCHS = """

def on_epoch_begin(model, epoch):
    if epoch == 1:
        torch.nn.init.zeros_(model[-1].weight)
"""


def test_what_on_epoch_begin_did_to_the_weights_is_not_done_again(project: Project) -> None:
    project.append("model.py", EPOCHS)
    words = ("training.epochs=2", "checkpoint.every_steps=10")
    project.run(*words, "name=undisturbed")
    project.run(*words)
    for file in ("step_00000014.pt", "best.pt"):  # as after a kill
        (project.directory("run") / "checkpoints" / file).unlink()
    assert "resuming after step 10 of 14" in project.run(*words)
    assert project.lines("run") == project.lines("undisturbed")
    output = project.run("training.epochs=1", "name=new", f"checkpoint.resume={BRANCH}", code=2)
    assert "it has done step 14, and this run ends at 7. Raise training.epochs" in output


BRANCH = "runs/run/checkpoints/step_00000014.pt"


def test_constant_with_the_name_of_a_function_is_refused(project: Project) -> None:
    project.append("model.py", "loss_weight = 0.01\n")
    output = project.run(code=2)
    assert "model.py: loss_weight is 0.01" in output and "Rename yours" in output


def test_one_rank_with_workers_ends_by_itself(project: Project) -> None:
    project.run("device_ids=cpu", "training.epochs=1", "loader.num_workers=1")


DRAWS = """

def before_step(model, step, log):
    print("DRAW", step, torch.rand(()).item())
"""


def test_hooks_draw_anew_in_each_step_and_alike_on_all_ranks(project: Project) -> None:
    project.append("model.py", DRAWS)
    project.run("device_ids=cpu,cpu", "training.epochs=1")
    logs = [project.directory("run") / "logs" / f"rank_{rank}.log" for rank in (0, 1)]
    texts = [log.read_text(encoding="utf-8").splitlines() for log in logs]
    first, second = ([line for line in text if line.startswith("DRAW")] for text in texts)
    assert first == second and len({line.split()[2] for line in first}) == 7


HELD = """

def build_optimizer(model, config):
    return torch.optim.SGD(model[-1].parameters(), lr=config.learning_rate)
"""
FROZEN = """

former_build = build_model


def build_model(config):
    model = former_build(config)
    model[:-1].requires_grad_(False)
    return model
"""


def test_parameters_without_an_optimizer_have_no_part_in_clipping(project: Project) -> None:
    project.append("model.py", HELD)
    words = ("training.max_gradient_norm=0.01", "training.epochs=1")
    project.run(*words, "name=held")
    project.append("model.py", FROZEN)
    project.run(*words, "name=frozen")
    held, frozen = project.lines("held"), project.lines("frozen")
    assert [line["loss"] for line in held] == pytest.approx([line["loss"] for line in frozen])
    assert held[-1]["gradient_norm"] == pytest.approx(frozen[-1]["gradient_norm"])


def test_set_of_names_has_the_same_order_in_every_process(project: Project) -> None:
    # one write a line, or an unbuffered Python mixes the words of two ranks
    words = "'ORDER ' + ' '.join({f'class {k}' for k in range(9)}) + '\\n'"
    project.append("dataset.py", f"\nprint({words}, end='')\n")
    outputs = [project.run(f"device_ids={ids}", f"name={len(ids)}") for ids in ("cpu", "cpu,cpu")]
    orders = [line for text in outputs for line in text.splitlines() if line.startswith("ORDER")]
    assert len(orders) == 3 and len({*orders}) == 1


BATCH_NORM = """

former_build = build_model


def build_model(config):
    model = former_build(config)
    model.append(nn.BatchNorm1d(2))
    return model
"""


def test_last_batch_that_the_model_cannot_take_is_told_at_the_start(project: Project) -> None:
    project.append("model.py", BATCH_NORM)
    output = project.run("training.global_batch_size=17", code=2)  # 103 samples: one is left
    assert "training.global_batch_size=17: the model fails on an epoch's last 1 samples" in output
    assert "train loss" not in output

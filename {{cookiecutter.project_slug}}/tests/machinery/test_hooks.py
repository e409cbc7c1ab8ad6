"""Tests of the optional functions of model.py, on one rank and on two, before and after a resume."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_training import DOUBLE
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conftest import Project

UNEVEN = ("training.global_batch_size=15", "training.micro_batch_size=3")
METRICS = """
def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"error": (outputs - batch.targets).abs().mean(), "largest": batch.inputs[:, 0].mean()}
"""
LOGGED_EPOCHS = """
def on_epoch_begin(model: nn.Module, epoch: int) -> None:
    print(f"[epoch {epoch} begins]", flush=True)
    model[0].requires_grad_(epoch >= 1)
"""


def on(num_ranks: int, *words: str) -> list[str]:
    return [f"device_ids={','.join(['cpu'] * num_ranks)}", *words]


def assert_close(
    lines: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-10
) -> None:
    """Assert that all lines have the expected keys, and numbers within a relative tolerance."""
    assert [line.pop("split") for line in lines] == [
        line.pop("split") for line in expected
    ] and lines
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=tolerance)


def test_training_metrics_are_means_over_the_global_batch_and_the_validation_set(
    project: Project,
) -> None:
    project.append("model.py", METRICS)
    words = (*DOUBLE, *UNEVEN, "logging.every_steps=3")
    project.run_many({f"on{n}": [*on(n, *words)] for n in (1, 2)})
    project.run_many({"whole": [*on(1, *DOUBLE, UNEVEN[0], "logging.every_steps=3")]})
    for split in ("train", "validation"):
        lines = [project.lines(name, split) for name in ("whole", "on1", "on2")]
        assert len(lines[0]) == (9 if split == "train" else 3)  # 7 steps an epoch: 3, 6, 7, 9, …
        for other in lines[1:]:
            # torchmetrics computes in float32
            assert_close(other, project.lines("whole", split), tolerance=1e-6)
    # torchmetrics computes the same over the same samples
    for line in project.lines("on2", "validation"):
        assert line["error"] == pytest.approx(line["absolute_error"], rel=1e-6)


def test_wrong_training_metrics_are_refused_before_step_1(project: Project) -> None:
    project.append("model.py", METRICS.replace('"error"', '"epoch"'))
    assert "training_metrics() in model.py: it must return" in project.run(
        "device_ids=cpu,cpu", code=2
    )


def test_training_metrics_with_names_that_change_are_refused(project: Project) -> None:
    project.append(
        "model.py",
        """
def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"rare" if batch.inputs[0, 0] > 0 else "error": outputs.mean()}
""",
    )
    output = project.run(
        "device_ids=cpu,cpu", "evaluation.micro_batch_size=2", "training.micro_batch_size=1", code=2
    )
    assert "the same names" in output


def test_evaluate_batch_gives_what_metrics_see(project: Project) -> None:
    project.append(
        "model.py",
        "def evaluate_batch(model: nn.Module, batch: Batch) -> Tensor:\n    return batch.targets",
    )
    project.run("device_ids=cpu,cpu", "training.max_steps=2")
    (line,) = project.lines("run", "validation")
    assert line["absolute_error"] == 0.0 and line["loss"] > 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_of_fsdp_may_generate_for_different_times(project: Project, precision: str) -> None:
    project.append(
        "model.py",
        """
def evaluate_batch(model: nn.Module, batch: Batch) -> Tensor:
    for _ in range(2 + 3 * torch.distributed.get_rank()):
        outputs = model(batch.inputs)
    return outputs
""",
    )
    words = (
        f"training.precision={precision}",
        "training.max_steps=9",
        "evaluation.micro_batch_size=7",
    )
    for strategy in ("ddp", "fsdp"):
        project.run("device_ids=cpu,cpu", *words, f"strategy={strategy}", f"name={strategy}")
    tolerance = 1e-5 if precision == "fp32" else 0.05
    for split in ("train", "validation"):
        assert_close(project.lines("fsdp", split), project.lines("ddp", split), tolerance)
    project.run("evaluate", "device_ids=cpu,cpu", *words, "strategy=fsdp", "name=fsdp")
    last = project.lines("fsdp", "validation")[-1]
    assert project.json("fsdp", "evaluation.json")["absolute_error"] == pytest.approx(
        last["absolute_error"], rel=1e-6
    )


def test_learning_rate_of_the_user_takes_the_place_of_the_schedule(project: Project) -> None:
    project.append(
        "model.py",
        "def learning_rate(step: int, total_steps: int) -> float:\n    return step / total_steps",
    )
    project.run("device_ids=cpu,cpu", "training.max_steps=4", "schedule.warmup_steps=3")
    assert [line["learning_rate"] for line in project.lines("run")] == pytest.approx(
        [0.0025, 0.005, 0.0075, 0.01]
    )


def test_frozen_part_trains_from_the_epoch_on_that_the_user_says(project: Project) -> None:
    project.append("model.py", LOGGED_EPOCHS)
    words = (*DOUBLE, *UNEVEN)
    for n in (1, 2):
        project.run(*on(n, *words), f"name=on{n}")
    initial = project.checkpoint("on2", 7)["model"]["0.weight"]
    later = project.checkpoint("on2", 14)["model"]["0.weight"]
    assert not torch.equal(initial, later)
    for step in (7, 14, 21):
        one, two = (project.checkpoint(name, step)["model"] for name in ("on1", "on2"))
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-10, atol=1e-12)
    log = (project.directory("on2") / "logs" / "rank_1.log").read_text(encoding="utf-8")
    assert [log.count(f"[epoch {epoch} begins]") for epoch in range(4)] == [1, 1, 1, 0]

    project.rewind("on2", 14, "again")
    project.run(*on(2, *words), "name=again")
    assert project.lines("again") == project.lines("on2")
    last, repeated = (project.checkpoint(name, 21) for name in ("on2", "again"))
    torch.testing.assert_close(repeated["model"], last["model"], rtol=0, atol=0)
    torch.testing.assert_close(
        repeated["optimizer"]["state"], last["optimizer"]["state"], rtol=0, atol=0
    )


def test_what_on_epoch_begin_sets_is_set_again_after_a_resume(project: Project) -> None:
    """This holds even for a checkpoint from the end of an epoch, saved before the hook is called for the next epoch."""
    hook = "def on_epoch_begin(model: Any, epoch: int) -> None:\n    model[2].p = 0.1 * epoch\n"
    project.append("model.py", f"{hook}    model[3].bias.data.fill_(epoch)")
    project.run("device_ids=cpu,cpu")
    for step in (7, 14):
        project.rewind("run", step, f"again{step}")
        project.run("device_ids=cpu,cpu", f"name=again{step}")
        assert project.lines(f"again{step}") == project.lines("run")


def test_what_on_epoch_begin_draws_is_the_same_on_all_ranks_and_after_a_resume(
    project: Project,
) -> None:
    """Each rank drew its own: from then on the replicas differed, and the run ended with 0."""
    hook = "def on_epoch_begin(model: Any, epoch: int) -> None:\n    if epoch:\n"
    project.append("model.py", f"{hook}        model[3].reset_parameters()")
    words = "model.dropout=0", "data.noise=0"
    project.run("device_ids=cpu", *words, "name=one")
    project.run("device_ids=cpu,cpu", *words)
    one, two = ([line["loss"] for line in project.lines(name)] for name in ("one", "run"))
    assert two == pytest.approx(one, rel=1e-4)
    project.rewind("run", 7, "again")
    project.run("device_ids=cpu,cpu", *words, "name=again")
    assert project.lines("again") == project.lines("run")


def test_what_on_epoch_begin_did_to_the_weights_is_not_done_again(project: Project) -> None:
    """A checkpoint from the middle of an epoch holds what the hook did to the weights."""
    hook = "def on_epoch_begin(model: Any, epoch: int) -> None:\n    if epoch == 1:\n"
    project.append("model.py", f"{hook}        torch.nn.init.zeros_(model[-1].weight)")
    words = ("training.epochs=2", "checkpoint.every_steps=10")
    project.run(*words)
    project.rewind("run", 10, "again")
    assert "resuming after step 10 of 14" in project.run(*words, "name=again")
    assert project.lines("again") == project.lines("run")
    resume = "checkpoint.resume=runs/run/checkpoints/step_00000014.pt"
    output = project.run("training.epochs=1", "name=new", resume, code=2)
    assert "it has done step 14, and this run ends at 7. Raise training.epochs" in output


def test_weights_that_on_epoch_begin_sets_otherwise_on_a_rank_end_the_run(project: Project) -> None:
    hook = (
        "def on_epoch_begin(model: Any, epoch: int) -> None:\n    if epoch:\n        import os\n\n"
    )
    project.append("model.py", f"{hook}        model[3].bias.data.fill_(int(os.environ['RANK']))")
    output = project.run("device_ids=cpu,cpu", code=1)
    assert "after step 14 '3.bias' differs between ranks" in output
    assert not (project.directory("run") / "checkpoints" / "step_00000014.pt").exists()


def test_schedule_may_change_where_learning_rate_takes_its_place(project: Project) -> None:
    project.run("training.max_steps=2")
    assert "schedule.name" in project.run("training.max_steps=4", "schedule.name=linear", code=2)
    project.append(
        "model.py", "def learning_rate(step: int, total_steps: int) -> float:\n    return 0.5"
    )
    project.run("training.max_steps=4", "schedule.name=linear")
    assert [line["learning_rate"] for line in project.lines("run")][2:] == [0.005, 0.005]


def test_part_that_the_user_sets_to_eval_mode_stays_in_it(project: Project) -> None:
    """The part stays in eval mode over steps and evaluations until the user sets it to training mode."""
    hooks = """
def on_epoch_begin(model: Any, epoch: int) -> None:
    model[2].train(epoch >= 2)

def after_step(model: Any, step: int, log: Any) -> None:
    print(f"[step {step}: {model[2].training} {model[0].training}]", flush=True)

def on_evaluation_end(model: Any, log: Any) -> None:
    assert not model[0].training
"""
    project.append("model.py", hooks)
    output = project.run("device_ids=cpu", "evaluation.every_steps=3")
    assert "on_evaluation_end() of model.py failed" not in output
    for step in range(1, 22):  # 7 steps an epoch
        assert f"[step {step}: {step > 14} True]" in output


def test_strategy_that_cannot_train_other_parameters_later_says_so(project: Project) -> None:
    project.append("model.py", LOGGED_EPOCHS)
    output = project.run("device_ids=cpu,cpu", "strategy=fsdp", code=2)
    assert "on_epoch_begin in model.py: it changed requires_grad after the first step" in output
    assert len(project.lines("run")) == 7


def test_thaw_keeps_what_an_optimizer_counts_in_its_groups(project: Project) -> None:
    """ScheduleFree and Prodigy count steps there: their counts began at 0 again."""
    project.append(
        "model.py",
        LOGGED_EPOCHS
        + """

class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = Counting(trained, 0.01)
    optimizer.param_groups[0]["trust"] = 0.5 if len(trained) == 6 else 1.0
    return optimizer
""",
    )
    project.run("device_ids=cpu,cpu", "schedule.name=linear")
    (group,) = project.checkpoint("run", 21)["optimizer"]["param_groups"]
    assert group["k"] == 21 and group["initial_lr"] == 0.01 and len(group["params"]) == 6
    assert group["trust"] == 0.5  # what build_optimizer() sets otherwise is its own
    project.run(
        "device_ids=cpu,cpu", "schedule.name=linear", "name=stopped", "training.max_steps=5"
    )
    project.run("device_ids=cpu,cpu", "schedule.name=linear", "name=stopped")
    (group,) = project.checkpoint("stopped", 21)["optimizer"]["param_groups"]
    assert (group["k"], group["trust"]) == (21, 0.5)


def test_frozen_part_does_not_move_before(project: Project) -> None:
    project.append("model.py", LOGGED_EPOCHS)
    project.run("device_ids=cpu,cpu", "checkpoint.every_steps=3", "training.epochs=1")
    first, last = (project.checkpoint("run", step)["model"] for step in (3, 6))
    assert torch.equal(first["0.weight"], last["0.weight"]) and not torch.equal(
        first["3.weight"], last["3.weight"]
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp fsdp.reshard_after_forward=false"])
def test_average_of_the_weights_is_torchs_own(project: Project, strategy: str) -> None:
    words = (*DOUBLE, *UNEVEN, "training.ema_decay=0.9", "checkpoint.every_steps=1")
    words = (*words, *f"strategy={strategy}".split())
    project.run(*on(2, *words))
    model = torch.nn.ParameterDict(
        {k.replace(".", "_"): v for k, v in project.checkpoint("run", 1)["model"].items()}
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    for step in range(1, 22):
        state = project.checkpoint("run", step)
        for name, weight in state["model"].items():
            model[name.replace(".", "_")].data.copy_(weight)
        average.update_parameters(model)
        for name, weight in state["average"].items():
            expected = average.module.get_parameter(name.replace(".", "_")).data
            torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-14)

    loss = project.lines("run", "validation")[-1]["loss"]
    project.run("evaluate", *on(2, *words), "evaluation.checkpoint=last")
    assert project.json("run", "evaluation.json")["loss"] == pytest.approx(loss, rel=1e-12)
    plain = (*DOUBLE, *UNEVEN, "name=plain")
    project.run(*on(2, *plain))
    # the steps are the same
    assert project.lines("plain") == project.lines("run") or "fsdp" in strategy
    assert project.lines("plain", "validation")[-1]["loss"] != pytest.approx(loss, rel=1e-6)

    project.rewind("run", 9, "again")  # in the middle of epoch 2
    project.run(*on(2, *words), "name=again")
    for step in (10, 21):
        one, two = (project.checkpoint(name, step) for name in ("run", "again"))
        torch.testing.assert_close(two["average"], one["average"], rtol=0, atol=0)
    assert project.lines("again", "validation") == project.lines("run", "validation")


def test_average_that_is_wanted_later_begins_with_the_weights_of_the_checkpoint(
    project: Project,
) -> None:
    project.run(*on(2, *DOUBLE, "checkpoint.every_steps=1", "training.epochs=1"))
    words = (
        "training.ema_decay=0.9",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=9",
        "training.epochs=2",
    )
    project.run(*on(2, *DOUBLE, *words))
    former, first = project.checkpoint("run", 7)["model"], project.checkpoint("run", 8)
    for name, weight in first["model"].items():
        torch.testing.assert_close(
            first["average"][name], 0.9 * former[name] + 0.1 * weight, rtol=1e-12, atol=1e-14
        )


def test_average_of_another_run_is_kept_where_steps_are_counted_anew(project: Project) -> None:
    project.run(
        "device_ids=cpu",
        *DOUBLE,
        "training.ema_decay=0.9",
        "training.max_steps=3",
        "checkpoint.every_steps=1",
    )
    path = project.directory("run") / "checkpoints" / "step_00000003.pt"
    words = (
        "name=other",
        f"checkpoint.resume={path}",
        "training.global_batch_size=64",
        "checkpoint.every_steps=1",
    )
    project.run("device_ids=cpu", *DOUBLE, "training.ema_decay=0.9", *words, "training.max_steps=1")
    former, first = project.checkpoint("run", 3)["average"], project.checkpoint("other", 1)
    for name, weight in first["model"].items():
        torch.testing.assert_close(
            first["average"][name], 0.9 * former[name] + 0.1 * weight, rtol=1e-12, atol=1e-14
        )


def test_hooks_on_evaluation_end_and_after_step_do_not_shift_the_run(project: Project) -> None:
    words = ("model.dropout=0.3", "data.noise=0.1", "training.max_steps=9")
    project.run("device_ids=cpu,cpu", *words, "name=plain")
    project.append(
        "model.py",
        """
def on_evaluation_end(model: nn.Module, log: Any) -> None:
    assert not model.training and not torch.is_grad_enabled()
    print("noise", torch.rand(3), flush=True)
    raise ValueError("a picture of the wrong shape")


def after_step(model: nn.Module, step: int, log: Any) -> None:
    torch.rand(step)
    print(f"[after step {step}]", flush=True)
""",
    )
    output = project.run("device_ids=cpu,cpu", *words, "name=hooked")
    assert project.lines("hooked") == project.lines("plain")
    assert (
        output.count("ValueError: a picture") == 2
        and "on_evaluation_end() of model.py failed" in output
    )
    log = (project.directory("hooked") / "logs" / "rank_1.log").read_text(encoding="utf-8")
    assert [log.count(f"[after step {step}]") for step in range(11)] == [0, *[1] * 9, 0]


def test_several_optimizers_step_together_and_resume(project: Project) -> None:
    """Muon trains the matrices and AdamW the rest. Each has its own learning rate, which follows the schedule."""
    project.append(
        "model.py",
        """
def build_optimizer(model: nn.Module, config: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=config.learning_rate)]
""",
    )
    words = (*UNEVEN, "schedule.name=linear")
    for n in (1, 2):
        project.run(*on(n, *words), f"name=on{n}")
    assert_close(project.lines("on2"), project.lines("on1"), tolerance=1e-3)
    assert project.lines("on2")[-1]["learning_rate"] == pytest.approx(0.02 / 21)
    project.rewind("on2", 14, "again")
    project.run(*on(2, *words), "name=again")
    assert project.lines("again") == project.lines("on2")
    groups = project.checkpoint("on2", 21)["optimizer"]["param_groups"]
    assert (
        [len(group["params"]) for group in groups] == [3, 3]
        and "ns_steps" in groups[0]
        and "betas" in groups[1]
    )


def test_untrained_parameters_and_an_average_of_too_many_steps_are_warned_of(
    project: Project,
) -> None:
    project.append(
        "model.py",
        """
def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=config.learning_rate)
""",
    )
    output = project.run("device_ids=cpu,cpu", "training.ema_decay=0.999")
    names = sorted(re.findall(r"warning: ([\w.]+) never changes: no optimizer has it", output))
    state = project.checkpoint("run", 21)
    assert (
        names == sorted(name for name, weight in state["model"].items() if weight.ndim < 2)
        and len(names) == 3
    )
    assert (
        "with training.ema_decay=0.999, 21 steps leave 98% of the first weights in the average"
        in output
    )
    project.append("model.py", "del build_optimizer\n")
    output = project.run("device_ids=cpu,cpu", "training.ema_decay=0.8", "name=quiet")
    assert "no optimizer has" not in output and "of the first weights" not in output


def test_plateau_lowers_the_rate_and_resumes(project: Project) -> None:
    words = (
        *DOUBLE,
        "schedule.name=plateau",
        "schedule.patience=1",
        "schedule.decay_factor=0.1",
        "training.epochs=8",
    )
    words = (*words, "evaluation.metric=error")
    project.append(
        "model.py", METRICS.replace("(outputs - batch.targets).abs().mean()", "torch.ones(())")
    )
    project.run(*on(2, *words))
    rates = [line["learning_rate"] for line in project.lines("run")]
    epochs = [rates[7 * epoch] for epoch in range(8)]
    assert epochs == pytest.approx([0.01] * 3 + [0.001] * 2 + [0.0001] * 2 + [0.00001])
    project.rewind("run", 28, "again")
    project.run(*on(2, *words), "name=again")
    assert project.lines("again") == project.lines("run")


def test_loss_that_is_no_mean_over_samples_is_told(project: Project) -> None:
    words = ("data.min_length=1", "data.max_length=9", "training.max_steps=2")
    assert "no mean over samples" not in project.run("device_ids=cpu,cpu", *words, "name=plain")
    assert "no mean over samples" in project.run(
        "device_ids=cpu,cpu", *words, "model.is_weighted=true"
    )
    assert "no mean over samples" in project.run("smoke", *words, "model.is_weighted=true")
    project.append(
        "model.py", "def loss_weight(batch: Batch) -> Tensor:\n    return batch.lengths.sum()"
    )
    weighted = project.run("device_ids=cpu,cpu", *words, "model.is_weighted=true", "name=weighted")
    assert "no mean over samples" not in weighted


def test_name_close_to_an_optional_function_is_told(project: Project) -> None:
    functions = (
        "train_metrics(outputs: Tensor, batch: Batch)",
        "on_epoch_begins(model: nn.Module, epoch: int)",
    )
    for function in functions:
        project.append("model.py", f"def {function} -> None:\n    pass")
    helper = "def lr_lambda(step: int) -> float:\n    return 1.0\n\n\n"  # learning_rate() calls it: not told
    project.append(
        "model.py",
        f"{helper}def learning_rate(step: int, total_steps: int) -> float:\n    return lr_lambda(step)",
    )
    project.edit(
        "dataset.py",
        "        self.inputs = ",
        "        self.sample_weight = 1.0\n        self.inputs = ",
    )
    output = project.run("device_ids=cpu,cpu", "training.max_steps=1")
    pairs = ("train_metrics", "training_metrics"), ("on_epoch_begins", "on_epoch_begin")
    for name, right in (*pairs, ("sample_weight", "sample_weights")):
        assert output.count(f"the trainer does not use {name}. Did you mean {right}?") == 1
    assert "lr_lambda" not in output


def test_missing_function_is_one_line_before_any_rank_starts(project: Project) -> None:
    project.edit("model.py", "def update_metrics(", "def update_metric(")
    refused = project.run("device_ids=cpu,cpu", code=2)
    assert (
        refused.startswith("error: model.py has no update_metrics().") and refused.count("\n") == 1
    )


def test_max_steps_alone_ends_a_run(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "training.epochs=null", "training.max_steps=9")
    assert [line["step"] for line in project.lines("run")] == [*range(1, 10)]
    refused = project.run("training.epochs=null", "name=other", code=2)
    assert refused.count("\n") == 1 and "training.epochs=null: needs an end of the run" in refused


def test_max_batches_evaluates_the_same_samples_on_any_number_of_ranks(project: Project) -> None:
    words = (*DOUBLE, "training.max_steps=2", "evaluation.max_batches=2")
    project.run_many({f"on{n}": [*on(n, *words)] for n in (1, 2, 3)})
    lines = [project.lines(f"on{n}", "validation")[-1] for n in (1, 2, 3)]
    assert [line["num_samples"] for line in lines] == [32] * 3
    assert_close(lines[1:], [lines[0].copy(), lines[0].copy()])


def test_training_does_not_depend_on_how_often_metrics_are_logged_that_change_their_arguments(
    project: Project,
) -> None:
    """A NumPy view of the batch, changed in place, is not seen by autograd. The backward pass must come before."""
    code = """
def training_metrics(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    batch.targets.numpy()[:] = 0
    return {"size": outputs.data.mul_(2).abs().mean()}
"""
    project.append("model.py", code)
    kept = "    errors = errors * batch.targets.mean(1) + outputs.square().mean(1)\n"  # autograd keeps both
    project.edit("model.py", "    loss = errors.mean()", f"{kept}    loss = errors.mean()")
    project.run("name=each", "logging.every_steps=1")
    project.run("name=seldom", "logging.every_steps=7")
    assert [line["loss"] for line in project.lines("seldom")] == [
        line["loss"] for line in project.lines("each")[6::7]
    ]


def test_constant_with_the_name_of_a_function_is_refused(project: Project) -> None:
    project.append("model.py", "loss_weight = 0.01")
    output = project.run(code=2)
    assert "model.py: loss_weight is 0.01" in output and "Rename yours" in output


def test_optional_function_that_is_none_counts_as_absent(project: Project) -> None:
    project.append(
        "model.py", "training_metrics = loss_weight = on_epoch_begin = after_step = None"
    )
    project.run("training.max_steps=2")


@pytest.mark.parametrize(("devices", "num_samples"), [("cpu", 9), ("cpu,cpu", 18)])
def test_loss_that_is_no_mean_is_told_however_the_samples_are_cut(
    project: Project, devices: str, num_samples: int
) -> None:
    """The rehearsed micro-batch is the largest: one sample has no halves."""
    project.edit("model.py", "errors.mean()", "errors.sum()")
    sizes = (f"data.num_validation={num_samples}", "training.micro_batch_size=2")
    assert "no mean over samples" in project.run(
        "training.max_steps=1", f"device_ids={devices}", *sizes
    )


BEFORE = """

def before_step(model: nn.Module, step: int, log: Any) -> None:
    norms = [parameter.grad.square().sum() for parameter in model.parameters()]
    norm = torch.stack([getattr(one, "full_tensor", lambda one=one: one)() for one in norms]).sum().sqrt()
    torch.rand(3)
    if torch.distributed.get_rank() == 0:
        print(f"before {step} {norm.item():.6g}")
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_before_step_sees_averaged_gradients_and_does_not_shift_the_run(
    project: Project, strategy: str
) -> None:
    words = ["device_ids=cpu,cpu", f"strategy={strategy}", "training.max_steps=4"]
    words += ["training.max_gradient_norm=0.01", "model.dropout=0.3"]
    project.run(*words, "name=plain")
    project.append("model.py", BEFORE)
    output = project.run(*words, "name=hooked")
    assert project.lines("hooked") == project.lines("plain")
    told = [line.split() for line in output.splitlines() if line.startswith("before ")]
    assert [step for _, step, _ in told] == ["1", "2", "3", "4"]
    norms = [line["gradient_norm"] for line in project.lines("plain")]
    assert [float(norm) for *_, norm in told] == pytest.approx(norms, rel=1e-4)


DRAWS = """

def before_step(model: nn.Module, step: int, log: Any) -> None:
    print("DRAW before", step, torch.rand(()).item(), flush=True)


def after_step(model: nn.Module, step: int, log: Any) -> None:
    print("DRAW after", step, torch.rand(()).item(), flush=True)
"""


def test_hooks_draw_anew_each_time_and_alike_on_all_ranks(project: Project) -> None:
    project.append("model.py", DRAWS)
    project.run("device_ids=cpu,cpu", "training.max_steps=5")
    logs = [project.directory("run") / "logs" / f"rank_{rank}.log" for rank in (0, 1)]
    texts = [log.read_text(encoding="utf-8").splitlines() for log in logs]
    first, second = ([line for line in text if line.startswith("DRAW")] for text in texts)
    assert first == second and len({line.split()[3] for line in first}) == 10


TERMS = """

former_loss = compute_loss


def compute_loss(model: nn.Module, batch: Batch) -> Any:
    loss, outputs = former_loss(model, batch)
    size = outputs.square().mean()
    return RETURNED, outputs
"""


def test_terms_of_the_loss_are_trained_as_their_sum_and_logged_alone(project: Project) -> None:
    words = (*DOUBLE, "training.max_steps=4", "training.micro_batch_size=3")
    project.append("model.py", TERMS.replace("RETURNED", "loss + 0.1 * size"))
    project.run(*words, "name=sum", "device_ids=cpu")
    project.edit("model.py", "loss + 0.1 * size", '{"error": loss, "size": 0.1 * size}')
    for name, devices in (("one", "cpu"), ("two", "cpu,cpu")):
        project.run(*words, f"name={name}", f"device_ids={devices}")
        for split in ("train", "validation"):
            expected = [line["loss"] for line in project.lines("sum", split)]
            lines = project.lines(name, split)
            assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-10)
            sums = [line["error"] + line["size"] for line in lines]
            assert sums == pytest.approx(expected, rel=1e-10) and len(lines) > 0
    project.edit("model.py", '"size": 0.1', '"step": 0.1')
    output = project.run(*words, "name=taken", code=2)
    assert "name the terms of the loss otherwise than step" in output


HELD = """

def build_optimizer(model: nn.Module, config: Any) -> Any:
    return torch.optim.SGD(model[-1].parameters(), lr=config.learning_rate)
"""
FROZEN = """

former_build = build_model


def build_model(config: ModelConfig) -> nn.Module:
    model: Any = former_build(config)
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

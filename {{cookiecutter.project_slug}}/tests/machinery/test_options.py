"""Tests that each option has a visible effect, and that faults such as a flipped bit or a NaN loss end the run."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import config_of
from torch import Tensor, nn

from template_package.config import load_config
from template_package.core.checks import check_finite, checksum
from template_package.core.ranks import Rank
from template_package.core.strategies import settle_precision
from template_package.errors import ConfigError, FailureError
from template_package.strategies.base import Strategy

from conftest import ROOT, Project


class Block(nn.Linear):
    """A layer that counts how often it runs."""

    num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.tanh(super().forward(inputs))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([Block(4, 4), Block(4, 4)])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def prepared(model: nn.Module, **options: Any) -> Strategy:
    config = config_of(**options)
    settle_precision(config, Rank())
    strategy = Strategy(config, Rank())
    strategy.prepare(model, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    return strategy


def backward(strategy: Strategy, scale: float = 1.0) -> Tensor:
    torch.manual_seed(0)
    with strategy.autocast():
        outputs: Tensor = strategy.model(torch.randn(8, 4))
    strategy.backward(outputs.float().square().mean() * scale, 1.0)
    return outputs


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)],
)
def test_precision_is_that_of_the_forward_pass(precision: str, dtype: torch.dtype) -> None:
    strategy = prepared(nn.Linear(4, 4), precision=precision)
    assert backward(strategy).dtype == dtype
    assert strategy.module.weight.dtype == torch.float32
    config = load_config(ROOT / "config.yaml")
    settle_precision(config, Rank())
    assert config.training.precision == "fp32"


def test_precision_fits_the_oldest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    generations = {0: (8, 6), 1: (7, 5)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: generations[device.index]
    )
    first, second = (torch.device("cuda", index) for index in (0, 1))
    for devices, precision in (((first,), "bf16"), ((second,), "fp16"), ((first, second), "fp16")):
        config = load_config(ROOT / "config.yaml")
        settle_precision(config, Rank(devices=devices))
        assert config.training.precision == precision


def test_fp16_clips_the_true_gradients_and_skips_a_step_that_overflows() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    strategy = prepared(model, precision="fp16")
    # low enough for nothing to overflow
    strategy.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    backward(strategy, scale=10.0)
    strategy.unscale()
    norm = strategy.optimizer_step(max_gradient_norm=0.01)
    torch.manual_seed(1)
    plain = prepared(nn.Linear(4, 4), precision="bf16")
    backward(plain, scale=10.0)
    assert norm is not None
    true_norm = torch.cat(
        [p.grad.flatten() for p in plain.module.parameters() if p.grad is not None]
    ).norm()
    assert norm.item() == pytest.approx(true_norm.item(), rel=0.05)
    before = model.weight.detach().clone()
    backward(strategy, scale=float("inf"))
    strategy.optimizer_step(max_gradient_norm=None)
    assert torch.equal(model.weight, before)


def test_transposed_buffer_is_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL, which the test imitates, refuses tensors that are not contiguous. gloo accepts them."""

    def broadcast(tensor: Tensor, src: int) -> None:
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        tensor.fill_(7)

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    model, table = nn.Linear(2, 2), torch.zeros(3, 2).t()
    model.register_buffer("table", table)
    strategy = Strategy(config_of(), Rank(rank=1, world_size=2))
    strategy.prepare(model)
    strategy.synchronize_buffers()
    sent = torch.full((2, 12), 7, dtype=torch.uint8).view(torch.float32)
    assert torch.equal(table, sent) and not table.is_contiguous()


def test_activation_checkpointing_runs_blocks_again_with_the_same_gradients() -> None:
    torch.manual_seed(0)
    plain, again = Blocks(), Blocks()
    again.load_state_dict(plain.state_dict())
    backward(prepared(plain))
    strategy = prepared(again, activation_checkpointing=True)
    backward(strategy)
    calls = [[block.num_calls for block in model.blocks] for model in (plain, again)]
    assert calls == [[1, 1], [2, 2]]
    for first, second in zip(plain.parameters(), again.parameters(), strict=True):
        assert (
            first.grad is not None
            and second.grad is not None
            and torch.equal(first.grad, second.grad)
        )
    assert strategy.state_dict()["model"].keys() == plain.state_dict().keys()
    with pytest.raises(ConfigError, match="has no nn"):
        prepared(nn.Linear(4, 4), activation_checkpointing=True)


@pytest.mark.slow
def test_compile_compiles_and_keeps_names() -> None:
    torch.manual_seed(0)
    plain = Blocks()
    strategy = prepared(plain, compile=True)
    torch.manual_seed(0)
    expected = plain.forward(torch.randn(8, 4))
    torch.testing.assert_close(backward(strategy), expected)
    names = list(strategy.state_dict()["model"])
    assert plain._compiled_call_impl is not None and not any("_orig_mod" in name for name in names)


def test_numerics_reach_torch() -> None:
    former = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        prepared(nn.Linear(4, 4), tf32=False, deterministic=True)
        assert (
            torch.get_float32_matmul_precision() == "highest"
            and not torch.backends.cudnn.allow_tf32
        )
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        prepared(nn.Linear(4, 4))
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.benchmark
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(former[0])
        torch.backends.cudnn.benchmark = former[1]


def test_flipped_bit_is_named(project: Project) -> None:
    words = (
        "device_ids=cpu,cpu",
        "model.fault=flip",
        "optimizer.learning_rate=0",
        "optimizer.weight_decay=0",
    )
    output = project.run(*words, "training.check_replicas_every_steps=2", code=1)
    assert "'3.weight' differs between ranks" in output and "after step 4" in output
    assert output.count("Traceback") == 1
    # without the key once, in every run
    first = project.run("name=first", *words, "model.fault_step=1", code=1)
    assert "'3.weight' differs between ranks" in first and "after step 1" in first


def test_loss_that_is_not_finite_ends_all_ranks_before_it_is_saved(project: Project) -> None:
    words = ("device_ids=cpu,cpu", "checkpoint.every_steps=1")
    # On one rank, in one sample; once where the logging finds it, and once where only the save does.
    for name, more in (("logged", []), ("saved", ["logging.every_steps=100"])):
        output = project.run(f"name={name}", *words, "data.nan_index=17", *more, code=1)
        found = re.search(r"the loss of step (\d+), or its gradient, is not finite", output)
        assert found and output.count("error: ") == 1 and "Traceback" not in output, output
        states = [
            torch.load(path, weights_only=True)
            for path in project.directory(name).glob("checkpoints/*.pt")
        ]
        assert len(states) == int(found[1]) - 1 > 0
        assert all(
            weight.isfinite().all() for state in states for weight in state["model"].values()
        )


def test_first_step_that_was_not_finite_is_named() -> None:
    progress = SimpleNamespace(loss_sum=0.0)
    losses = [(torch.tensor(1.0), 1, 16), (torch.tensor(2.5), 2, 3)]
    check_finite(losses, progress, Rank())
    assert losses == [] and progress.loss_sum == 1.0 * 16 + 2.5 * 3
    losses = [
        (torch.tensor(value), step, 16)
        for step, value in ((3, float("inf")), (4, float("nan")), (5, 1.0))
    ]
    with pytest.raises(FailureError, match="the loss of step 3,"):
        check_finite(losses, progress, Rank())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_checksum_tells_constants_and_single_bits_apart(dtype: torch.dtype) -> None:
    zeros, ones = torch.zeros(4, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype)
    flipped = zeros.clone()
    flipped.view(-1).view(torch.uint8)[-1] = 1
    assert len({int(checksum(tensor)) for tensor in (zeros, ones, flipped)}) == 3
    assert checksum(ones.t()) == checksum(ones) and checksum(ones[0, 0]) != checksum(zeros[0, 0])


def test_checksum_depends_on_places() -> None:
    numbers = torch.arange(64, dtype=torch.float32)
    assert checksum(numbers) != checksum(numbers.roll(1)) and checksum(numbers) != checksum(
        numbers.flip(0)
    )


def test_early_stopping_ends_all_ranks_after_the_same_epoch(project: Project) -> None:
    words = [
        "device_ids=cpu,cpu",
        "optimizer.learning_rate=0",
        "training.early_stopping_epochs=2",
        "training.epochs=9",
    ]
    project.run(*words)
    summary = project.json("run", "summary.json")
    assert (summary["status"], summary["epochs"]) == ("complete", 3)
    output = project.run(*words)
    assert "is complete" in output and "raise training.early_stopping_epochs;" in output


def test_compression_changes_the_gradients_a_little_and_a_profile_is_written(
    project: Project,
) -> None:
    fixed = ["device_ids=cpu,cpu", "training.epochs=1"]
    cases = {
        "plain": fixed,
        "fp16": [*fixed, "ddp.gradient_compression=fp16", "logging.profile_steps=[2,3]"],
        "unused": [*fixed, "model.has_unused_parameter=true", "ddp.find_unused_parameters=true"],
        "static": [
            *fixed,
            "model.has_unused_parameter=true",
            "ddp.static_graph=true",
            "training.micro_batch_size=4",
        ],
    }
    project.run_many(cases)
    plain, fp16, unused, static = ([line["loss"] for line in project.lines(name)] for name in cases)
    assert fp16 != plain and fp16 == pytest.approx(plain, rel=1e-2)
    assert unused == pytest.approx(plain, rel=1e-6)
    # the parameter is found unused in the first step
    assert static == pytest.approx(plain, rel=1e-6)
    # A parameter that never had a gradient has no optimizer state; the run continues all the same.
    for name in ("unused", "static"):
        project.run(f"name={name}", *cases[name], "training.epochs=2")
        assert [line["step"] for line in project.lines(name)] == list(range(1, 15))
    for rank in (0, 1):
        trace = json.loads(
            (project.directory("fp16") / "profile" / f"rank_{rank}.json").read_text(
                encoding="utf-8"
            )
        )
        assert any(
            "Linear" in event["name"] or "addmm" in event["name"] for event in trace["traceEvents"]
        )


def test_optimizer_of_the_users_own_is_used(project: Project) -> None:
    own = (
        "def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:\n"
        "    first, *rest = model.parameters()\n"
        "    import numpy\n"
        "    rate = numpy.float64(0.5 * config.learning_rate)  # a float that torch.load would not read\n"
        "    groups = [{'params': [first], 'lr': rate}, {'params': rest}]\n"
        "    return torch.optim.RMSprop(groups, lr=config.learning_rate)\n\n\n"
    )
    project.edit("model.py", "def rank()", own + "def rank()")
    project.run("training.epochs=1", "schedule.name=constant")
    state = project.checkpoint("run", 7)["optimizer"]
    assert [group["lr"] for group in state["param_groups"]] == [0.005, 0.01]
    assert "square_avg" in state["state"]["0.weight"]


NO_FLOAT64 = """
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .core.ranks import Rank


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in tree_leaves(result)):
            raise TypeError(f"the MPS framework does not support float64: {function}")
        return result


former_loss = compute_loss
modes = []


def compute_loss(model, batch):
    if not modes:
        modes.append(NoFloat64().__enter__())
    return former_loss(model, batch)
"""


def test_no_sum_takes_float64_where_the_device_has_none(project: Project) -> None:
    """The test imitates a Mac's GPU: from the first forward pass on, every operation with a float64 result fails."""
    project.append("model.py", NO_FLOAT64 + "Rank.sum_dtype = torch.float32\n")
    own_process = [sys.executable]  # the mode would stay in the session's
    words = (
        "training.max_gradient_norm=1",
        "training.ema_decay=0.9",
        "training.global_batch_size=30",
    )
    project.run(*words, command=own_process)
    assert project.json("run", "summary.json")["best"]["loss"] > 0
    project.edit("model.py", "Rank.sum_dtype = torch.float32", "")
    assert "does not support float64" in project.run("name=float64", code=1, command=own_process)

"""Tests of the optimizer against plain torch, and of the learning rate against closed forms and torch's schedulers."""

import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from configs import config_of
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
)

from template_package.config import ScheduleConfig
from template_package.core.config import OptimizerConfig, unread_keys
from template_package.core.logs import StepClock
from template_package.core.optimizer import build_optimizer, set_learning_rate
from template_package.core.ranks import Rank, pack, unpack
from template_package.errors import Interrupted
from template_package.strategies.base import Strategy
from template_package.training.schedule import learning_rate

PEAK = 0.02


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 3),
    )
    # so that summing in another order shows only in the last digits
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module) -> Tensor:
    inputs = torch.linspace(-1, 1, 5 * 16, dtype=torch.float64).reshape(5, 1, 4, 4)
    loss: Tensor = model(inputs).square().mean()
    return loss


def rates(config: ScheduleConfig, total_steps: int) -> list[float]:
    return [learning_rate(config, PEAK, step, total_steps) for step in range(1, total_steps + 1)]


def torch_rates(
    scheduler_class: type[LRScheduler], num_steps: int, **arguments: Any
) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = scheduler_class(optimizer, **arguments)
    values = []
    for _ in range(num_steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


# The optimizer


def test_weight_decay_is_on_matrices_and_kernels_alone() -> None:
    model = make_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.5))
    groups = {
        group["weight_decay"]: {names[id(p)] for p in group["params"]}
        for group in optimizer.param_groups
    }
    assert groups == {
        0.5: {"0.weight", "4.weight"},
        0.0: {"0.bias", "1.weight", "1.bias", "4.bias"},
    }


def test_frozen_parameters_are_left_out_and_a_group_without_any_too() -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim >= 2)
    optimizer = build_optimizer(model, OptimizerConfig())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


@pytest.mark.parametrize(
    ("name", "plain", "arguments"),
    [
        ("adamw", AdamW, {"betas": (0.8, 0.95)}),
        ("adam", Adam, {"betas": (0.8, 0.95)}),
        ("sgd", SGD, {"momentum": 0.8}),
    ],
)
def test_steps_equal_those_of_torchs_plain_optimizer(
    name: str, plain: type[Optimizer], arguments: dict[str, Any]
) -> None:
    ours, reference = make_model(), make_model()
    config = OptimizerConfig(
        name=cast(Any, name), learning_rate=0.1, weight_decay=0.3, betas=[0.8, 0.95]
    )
    optimizer = build_optimizer(ours, config)
    groups = [
        {"params": [p], "weight_decay": 0.3 if p.ndim > 1 else 0.0} for p in reference.parameters()
    ]
    unfused = plain(groups, lr=0.1, fused=False, **arguments)  # type: ignore[call-arg]
    for _ in range(3):
        for model, stepped in ((ours, optimizer), (reference, unfused)):
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            stepped.step()
            stepped.zero_grad()
    for actual, expected in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_the_fused_kernel_is_used_where_there_is_one(name: str) -> None:
    model = make_model()
    assert all(
        group["fused"]
        for group in build_optimizer(model, OptimizerConfig(name=cast(Any, name))).param_groups
    )
    complex_model = nn.ParameterList([torch.zeros(2, 2, dtype=torch.complex64)])
    for without in (complex_model, model.to("meta")):
        optimizer = build_optimizer(without, OptimizerConfig(name=cast(Any, name)))
        assert not any(group["fused"] for group in optimizer.param_groups)


# The schedule


@pytest.mark.parametrize("total_steps", [1, 2, 7, 100])
def test_schedules_without_warmup_equal_torchs(total_steps: int) -> None:
    floor = 0.001
    cosine = ScheduleConfig(name="cosine", min_learning_rate=floor)
    expected = torch_rates(CosineAnnealingLR, total_steps, T_max=total_steps, eta_min=floor)
    assert rates(cosine, total_steps) == pytest.approx(expected, rel=1e-9)
    linear = ScheduleConfig(name="linear", min_learning_rate=floor)
    ends = {"start_factor": 1.0, "end_factor": floor / PEAK}
    expected = torch_rates(LinearLR, total_steps, total_iters=total_steps, **ends)
    assert rates(linear, total_steps) == pytest.approx(expected, rel=1e-9)
    assert rates(ScheduleConfig(name="constant"), total_steps) == [PEAK] * total_steps


def test_step_schedule_equals_torchs_at_fractions_of_the_run() -> None:
    config = ScheduleConfig(name="step", milestones=[0.07, 0.1, 0.7], decay_factor=0.5)
    for total_steps, milestones in (
        (1, [1, 1, 1]),
        (10, [1, 1, 7]),
        (30, [3, 3, 21]),
        (100, [7, 10, 70]),
    ):
        expected = torch_rates(MultiStepLR, total_steps, milestones=milestones, gamma=0.5)
        assert rates(config, total_steps) == pytest.approx(expected, rel=1e-9)


def test_step_schedule_stops_at_the_floor() -> None:
    config = ScheduleConfig(
        name="step", milestones=[0.5, 0.75], decay_factor=0.1, min_learning_rate=0.001
    )
    assert rates(config, 8) == pytest.approx([PEAK] * 4 + [0.002] * 2 + [0.001] * 2)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "step"])
def test_warmup_is_linear_and_the_schedule_takes_the_steps_after_it(name: str) -> None:
    config = ScheduleConfig(name=cast(Any, name), warmup_steps=5, milestones=[0.5])
    warm = torch_rates(LinearLR, 5, start_factor=1 / 5, total_iters=4)
    assert rates(config, 20)[:5] == pytest.approx(warm, rel=1e-9)
    assert rates(config, 20)[4:6] == [PEAK, PEAK]
    if name != "step":  # its milestones are fractions of the whole run
        assert rates(config, 20)[5:] == rates(replace(config, warmup_steps=0), 15)
    else:
        assert rates(config, 20)[9:11] == pytest.approx([PEAK, PEAK / 10])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "step"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 4, 1000])
def test_rates_stay_between_zero_and_the_peak_at_every_edge(name: str, warmup_steps: int) -> None:
    config = ScheduleConfig(
        name=cast(Any, name), warmup_steps=warmup_steps, min_learning_rate=0.001
    )
    for total_steps in (1, 2, 3, 4):
        values = [
            learning_rate(config, PEAK, step, total_steps) for step in range(1, total_steps + 3)
        ]
        assert all(0 < value <= PEAK for value in values)
        if warmup_steps >= total_steps:
            assert values[:total_steps] == pytest.approx(
                [PEAK * step / warmup_steps for step in range(1, total_steps + 1)]
            )
        elif name != "step" or warmup_steps == 0:  # a milestone may lie within the warm-up
            assert values[warmup_steps] == PEAK  # a run of one step trains at the peak, not at 0


def test_cosine_at_the_points_known_by_heart() -> None:
    config = ScheduleConfig(name="cosine", warmup_steps=10, min_learning_rate=0.01)
    at = {step: learning_rate(config, PEAK, step, 110) for step in (5, 11, 61, 111, 500)}
    assert at == pytest.approx({5: PEAK / 2, 11: PEAK, 61: (PEAK + 0.01) / 2, 111: 0.01, 500: 0.01})
    assert learning_rate(config, PEAK, 36, 110) == pytest.approx(
        0.01 + (PEAK - 0.01) * (1 + math.sqrt(0.5)) / 2
    )


# Both together


def test_groups_of_the_built_optimizer_get_exactly_the_value() -> None:
    optimizer = build_optimizer(make_model(), OptimizerConfig(learning_rate=PEAK))
    assert [group["lr"] for group in optimizer.param_groups] == [PEAK, PEAK]
    set_learning_rate(optimizer, 0.1 + 0.2, PEAK)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 + 0.2] * 2


def test_groups_of_a_users_optimizer_keep_their_ratio_to_the_peak() -> None:
    first, second = make_model().parameters(), make_model().parameters()
    groups: list[dict[str, Any]] = [{"params": first, "lr": PEAK / 10}, {"params": second}]
    optimizer = SGD(groups, lr=PEAK)
    for value in (PEAK, PEAK / 2, 0.0, PEAK / 4):  # from the initial rates each time, also after 0
        set_learning_rate(optimizer, value, PEAK)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [value / 10, value]
        )
    saved = optimizer.state_dict()
    resumed = SGD(
        [{"params": make_model().parameters()}, {"params": make_model().parameters()}], lr=1.0
    )
    resumed.load_state_dict(saved)
    set_learning_rate(resumed, PEAK, PEAK)
    assert [group["lr"] for group in resumed.param_groups] == pytest.approx([PEAK / 10, PEAK])


def test_hooks_of_the_users_count_no_step_when_a_state_is_loaded() -> None:
    calls: list[int] = []
    first, second = (Strategy(config_of(), Rank()) for _ in range(2))
    for strategy in (first, second):
        strategy.prepare(nn.Linear(2, 2), lambda module: torch.optim.AdamW(module.parameters()))
        strategy.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    first.backward(first.model(torch.ones(1, 2)).sum(), 1.0)
    first.optimizer_step(None)
    assert len(calls) == 1
    second.load_state_dict(first.state_dict())
    assert len(calls) == 1
    second.backward(second.model(torch.ones(1, 2)).sum(), 1.0)
    second.optimizer_step(None)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.SGD, torch.optim.Rprop])
def test_state_of_any_form_and_an_empty_group_are_loaded(kind: Any) -> None:
    first, second = (Strategy(config_of(), Rank()) for _ in range(2))
    for strategy in (first, second):
        torch.manual_seed(0)
        groups = [{"params": []}, {"params": None}]

        def build(module: nn.Module, groups: list[Any] = groups) -> Optimizer:
            groups[1]["params"] = list(module.parameters())
            optimizer: Optimizer = kind(groups, lr=0.1)
            return optimizer

        strategy.prepare(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), build)
    for _ in range(2):
        first.backward(first.model(torch.ones(2, 4)).square().sum(), 1.0)
        first.optimizer_step(None)
    second.load_state_dict(unpack(pack(first.state_dict())))  # as from a file
    for strategy in (first, second):
        strategy.backward(strategy.model(torch.ones(2, 4)).square().sum(), 1.0)
        strategy.optimizer_step(None)
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_pause_that_a_request_to_stop_ends_counts_as_no_time_in_steps() -> None:
    clock = StepClock(0)
    with suppress(Interrupted), clock.paused():
        time.sleep(1)
        raise Interrupted
    assert clock.seconds < 0.8


@pytest.mark.parametrize("total_steps", [10, 37, 200])
def test_one_cycle_equals_torchs_scheduler(total_steps: int) -> None:
    own = rates(ScheduleConfig(name="one_cycle"), total_steps)
    expected = torch_rates(
        OneCycleLR, total_steps, max_lr=PEAK, total_steps=total_steps, cycle_momentum=False
    )
    assert own == pytest.approx(expected, rel=1e-9, abs=1e-12) and max(own) == pytest.approx(
        PEAK, rel=0.05
    )


def test_warm_up_may_be_a_fraction_of_the_run() -> None:
    for name in ("cosine", "linear", "constant", "plateau"):
        fraction, steps = (
            ScheduleConfig(name=cast(Any, name), warmup_steps=warmup) for warmup in (0.1, 20)
        )
        assert rates(fraction, 200) == rates(steps, 200)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "step", "plateau", "one_cycle"])
def test_keys_that_a_schedule_does_not_read_change_no_rate_and_others_do(name: str) -> None:
    """Only the evaluations read schedule.patience, under plateau."""
    config = config_of()
    other = {
        "milestones": [0.25],
        "decay_factor": 0.5,
        "min_learning_rate": 0.05,
        "warmup_steps": 9,
    }

    def rates(**changes: Any) -> list[float]:
        config.schedule = ScheduleConfig(name=cast(Any, name), **changes)
        return [learning_rate(config.schedule, 0.1, step, 20, step // 4) for step in range(1, 21)]

    unread = {key for key, value in other.items() if rates() == rates(**{key: value})}
    unread |= {"patience"} if name != "plateau" else set()
    assert set(unread_keys(config)) == {f"schedule.{key}" for key in unread}

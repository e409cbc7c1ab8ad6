"""Tests that every strategy trains with every optimizer, every precision and every schedule."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from test_strategies import DEVICES, MARKED, SINGLE

from template_package.config import ScheduleConfig, TrainingConfig
from template_package.core.config import OptimizerConfig

from conftest import Project

VALUES: dict[str, tuple[str, ...]] = {  # a new value of a key is tried as well
    f"{section}.{key}": get_args(get_type_hints(kind)[key])
    for section, key, kind in (
        ("optimizer", "name", OptimizerConfig),
        ("training", "precision", TrainingConfig),
        ("schedule", "name", ScheduleConfig),
    )
}
NOT_ON_CPU = {("accelerate", "fp16")}  # refused in words: README
# of each strategy: run i takes the i-th value of each key, from its start again
NUM_RUNS = max(map(len, VALUES.values()))


@pytest.mark.parametrize("strategy", [pytest.param(SINGLE), *MARKED])
def test_every_strategy_trains_with_every_optimizer_precision_and_schedule(
    project: Project, strategy: str
) -> None:
    """Row 16 of the public cases: fsdp and SGD never ran together."""
    name = "ddp" if strategy == SINGLE else strategy
    words = [
        f"strategy={name}",
        f"device_ids={DEVICES.get(strategy, 'cpu,cpu')}",
        "training.max_steps=2",
    ]
    cases, pairs = {}, set()
    for number in range(NUM_RUNS):
        chosen = {key: values[number % len(values)] for key, values in VALUES.items()}
        if (strategy, chosen["training.precision"]) in NOT_ON_CPU:
            chosen["training.precision"] = "auto"
        pairs |= set(chosen.items())
        cases[f"{number}"] = [
            *words,
            "training.epochs=1",
            *(f"{key}={value}" for key, value in chosen.items()),
        ]
    missing = {(key, value) for key, values in VALUES.items() for value in values} - pairs
    assert missing <= {
        ("training.precision", precision) for of, precision in NOT_ON_CPU if of == strategy
    }
    project.run_many(cases)
    for case in cases:
        first, second = project.lines(case)
        assert first["loss"] > 0 and second["loss"] != first["loss"], case
        assert project.json(case, "summary.json")["steps"] == 2

"""Tests of strategy=accelerate: it computes what DDP computes, and `accelerate launch` cannot override config.yaml."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
from configs import config_of

from template_package.core.ranks import Rank
from template_package.errors import ConfigError

from conftest import Project

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="Accelerate is not installed"
)

WORDS = [
    "device_ids=cpu,cpu",
    "training.epochs=1",
    "training.micro_batch_size=4",
    "training.max_gradient_norm=0.5",
]
OPTIONS: dict[str, list[str]] = {
    "plain": [],
    "unclipped": ["training.max_gradient_norm=null"],
    "bf16": ["training.precision=bf16"],
    "compressed": ["ddp.gradient_compression=fp16"],
    "unused": ["model.has_unused_parameter=true", "ddp.find_unused_parameters=true"],
    "recomputed": ["training.activation_checkpointing=true"],
    "checked": ["training.check_replicas_every_steps=1"],
}


def test_options_compute_what_ddp_computes(project: Project) -> None:
    project.edit("model.py", ", nn.Linear(16, 2)", ", nn.BatchNorm1d(16), nn.Linear(16, 2)")
    strategies = ("accelerate", "ddp")
    cases = {
        f"{s}-{name}": [f"strategy={s}", *WORDS, *more]
        for name, more in OPTIONS.items()
        for s in strategies
    }
    project.run_many(cases)
    for name in OPTIONS:
        # the same arithmetic in the same order: equal bit for bit
        for split in (
            "train",
            "validation",
        ):
            lines, expected = (project.lines(f"{s}-{name}", split) for s in strategies)
            assert lines == expected and len(lines) == (7 if split == "train" else 1), name
    plain, compressed = (
        project.lines(f"accelerate-{name}")[-1]["loss"] for name in ("plain", "compressed")
    )
    assert plain != compressed
    output = project.run("strategy=accelerate", *WORDS, "model.has_unused_parameter=true", code=2)
    assert "unused got no gradient" in output


@pytest.mark.slow
def test_accelerate_launch_starts_the_same_run(project: Project) -> None:
    # Not --cpu: accelerate would then start one process, whatever --num_processes says, and run.py the two ranks.
    flags = ["--main_process_port=0", "--multi_gpu", "--num_processes=2"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    project.run("strategy=accelerate", *WORDS, command=command)
    project.run("name=own", "strategy=accelerate", *WORDS)
    assert project.lines("run") == project.lines("own")
    assert project.json("run", "summary.json")["world_size"] == 2


def test_one_rank_is_the_plain_loop(project: Project) -> None:
    output = project.run("strategy=accelerate", *WORDS, "device_ids=cpu", "training.precision=bf16")
    project.run("name=plain", *WORDS, "device_ids=cpu", "training.precision=bf16")
    assert project.lines("run") == project.lines("plain")
    assert "Warning" not in output


def strategy_of(**options: Any) -> Any:
    from template_package.strategies.accelerate import AccelerateStrategy

    return AccelerateStrategy(config_of(**options), Rank())


def test_fp16_on_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training.precision=fp16.*bf16 or fp32"):
        strategy_of(precision="fp16")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        (
            "ACCELERATE_MIXED_PRECISION",
            "bf16",
            r"training.precision=fp32: accelerate launch asks for bf16",
        ),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", r"training.compile=true"),
        ("ACCELERATE_USE_FSDP", "true", r"accelerate launch asks for fsdp.*strategy=fsdp"),
        (
            "ACCELERATE_USE_DEEPSPEED",
            "true",
            r"accelerate launch asks for deepspeed.*strategy=deepspeed",
        ),
    ],
)
def test_what_accelerate_launch_asks_for_is_refused_not_ignored(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words):
        strategy_of(precision="fp32")


def test_launchers_wishes_that_agree_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("ACCELERATE_MIXED_PRECISION", "bf16"), ("ACCELERATE_USE_CPU", "True")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")  # the loader's business
    strategy = strategy_of(precision="bf16")
    assert (
        strategy._accelerator.mixed_precision == "bf16"
        and strategy._accelerator.gradient_accumulation_steps == 1
    )

"""Tests of strategy=deepspeed: each stage computes what DDP computes, and any strategy can load the checkpoints."""

from __future__ import annotations

import math
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from configs import config_of
from torch import nn

from template_package.config import load_config
from template_package.core.ranks import Rank
from template_package.errors import ConfigError
from template_package.options_deepspeed import Options

from conftest import ROOT, Project
from test_resuming import RANDOM, assert_equal

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

MAX_NORM = 0.5
WORDS = [
    "training.epochs=1",
    "training.micro_batch_size=4",
    f"training.max_gradient_norm={MAX_NORM}",
]
# Seven steps of sums in another order; in bf16 and fp16 what is rounded before it is added up, to 8 and 11 bits.
SAME = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
OFFLOAD = "deepspeed.extra={zero_optimization: {offload_optimizer: {device: cpu}}}"
OPTIONS = {  # of each stage
    0: {"fp32": [], "fp16": ["training.precision=fp16"]},
    1: {
        "fp32": [],
        "bf16": ["training.precision=bf16"],
        "sgd": ["optimizer.name=sgd"],
        "unclipped": [],
    },
    2: {"fp32": [], "fp16": ["training.precision=fp16"], "offload": [OFFLOAD]},
    3: {
        "fp32": ["training.check_replicas_every_steps=1"],
        "bf16": ["training.precision=bf16"],
        "fp16": ["training.precision=fp16"],
        "recomputed": ["training.activation_checkpointing=true"],
    },
}


def words(stage: int | None, num_ranks: int = 2) -> list[str]:
    """Return the settings of a run with the ZeRO stage `stage` of DeepSpeed, or with DDP if `stage` is None."""
    strategy = (
        ["strategy=ddp"]
        if stage is None
        else ["strategy=deepspeed", f"deepspeed.zero_stage={stage}"]
    )
    return [f"device_ids={','.join(['cpu'] * num_ranks)}", *strategy, *WORDS]


def assert_same(project: Project, name: str, reference: str) -> None:
    """Assert that two runs have the same metrics and the same last checkpoint, within rounding errors."""
    tolerance = SAME[project.json(reference, "summary.json")["precision"]]
    for split in ("train", "validation"):
        lines, others = project.lines(name, split), project.lines(reference, split)
        assert len(lines) == len(others) > 0, name
        for line, other in zip(lines, others, strict=True):
            assert line.keys() == other.keys()
            for key in line.keys() - {"split"}:
                value, expected = float(line[key]), float(other[key])
                # fp16's first scale is too high
                if key == "gradient_norm" and not math.isfinite(expected):
                    assert not math.isfinite(value)
                else:
                    assert value == pytest.approx(expected, rel=tolerance), (name, key)
    step = project.lines(name)[-1]["step"]
    state, other = project.checkpoint(name, step), project.checkpoint(reference, step)
    assert state["scaler"] == other["scaler"]
    assert state["model"].keys() == other["model"].keys() and len(state["model"]) >= 6
    torch.testing.assert_close(state["model"], other["model"], rtol=tolerance, atol=tolerance)
    parts = state["optimizer"]["state"]
    assert parts.keys() == other["optimizer"]["state"].keys() and len(parts) >= 6
    for key, part in parts.items():
        torch.testing.assert_close(
            part, other["optimizer"]["state"][key], rtol=tolerance, atol=tolerance
        )
    groups, others = state["optimizer"]["param_groups"], other["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [group["params"] for group in others]


def test_every_stage_computes_what_ddp_computes(project: Project) -> None:
    # A weight with two names, a frozen one, and batch normalization, whose statistics are each rank's own.
    project.edit(
        "model.py",
        ", nn.Linear(16, 2)",
        ", nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 2)",
    )
    project.edit(
        "model.py", "model.config, model",
        "model[6].weight = model[3].weight\n    model[6].bias.requires_grad_(False)\n    model.config, model",
    )  # fmt: skip
    cases = {
        f"{stage}-{name}": [*words(stage), *more]
        for stage, of in OPTIONS.items()
        for name, more in of.items()
    }
    references = {
        name: more
        for of in OPTIONS.values()
        for name, more in of.items()
        if name not in ("fp32", "offload")
    }
    cases |= {
        f"ddp-{name}": [*words(None), *more] for name, more in {**references, "fp32": []}.items()
    }
    for name in ("1-unclipped", "ddp-unclipped"):
        cases[name] = [*cases[name], "training.max_gradient_norm=null"]
    project.run_many(cases)
    for stage, options in OPTIONS.items():
        for name in options:
            reference = "fp32" if name == "offload" else name
            assert_same(project, f"{stage}-{name}", f"ddp-{reference}")
    assert project.checkpoint("3-fp16", 7)["scaler"]["scale"] < 65536, (
        "a step must have been skipped"
    )
    assert sum(line["gradient_norm"] > MAX_NORM for line in project.lines("3-fp32")) >= 3, (
        "clipping must matter"
    )


FROZEN_GROUP = """
def build_optimizer(model, config):
    groups = [{"params": model[number].parameters(), "weight_decay": 0.1 * number} for number in (0, 3, 5)]
    return torch.optim.AdamW(groups, lr=config.learning_rate)


def rank()"""


def test_group_that_trains_nothing_goes_in_and_out_of_checkpoints(project: Project) -> None:
    project.edit("model.py", "def rank()", FROZEN_GROUP.lstrip())
    project.edit(
        "model.py", "model.config, model", "model[0].requires_grad_(False)\n    model.config, model"
    )
    more = ["schedule.name=constant", "checkpoint.every_steps=2", "training.max_steps=3"]
    cases = {str(stage): [*words(stage), *more] for stage in (None, 0, 1, 3)}
    for reader, writer in ((1, None), (3, 1), (None, 3)):
        path = project.directory(str(writer)) / "checkpoints" / "step_00000002.pt"
        cases[f"{reader}-from-{writer}"] = [*words(reader), *more, f"checkpoint.resume={path}"]
    project.run_many(cases)
    expected = project.checkpoint("None", 3)
    assert len(expected["optimizer"]["state"]) == 4
    for name in cases:
        state = project.checkpoint(name, 3)
        torch.testing.assert_close(
            state["model"], expected["model"], rtol=SAME["fp32"], atol=SAME["fp32"]
        )
        assert state["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys(), name
        assert state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"], name


def test_checkpoints_pass_from_stage_to_stage_on_uneven_ranks(project: Project) -> None:
    # Three ranks: no weight divides by three, and of two samples the third rank has none.
    chain = [None, 1, 3, 2, 0, 3, None]
    cases = {"whole": [*words(None, 3), "training.global_batch_size=2", "training.max_steps=14"]}
    path = "auto"
    for number, stage in enumerate(chain, start=1):
        more = [
            "training.global_batch_size=2",
            f"training.max_steps={2 * number}",
            f"checkpoint.resume={path}",
        ]
        name = f"link{number}"
        cases[name] = [*words(stage, 3), *more, "schedule.name=constant"]
        path = str(project.directory(name) / "checkpoints" / f"step_{2 * number:08d}.pt")
    cases["whole"] += ["schedule.name=constant"]
    project.run_many(cases)
    losses = [line["loss"] for number in range(1, 8) for line in project.lines(f"link{number}")]
    assert losses == pytest.approx(
        [line["loss"] for line in project.lines("whole")], rel=SAME["fp32"]
    )
    last, whole = project.checkpoint("link7", 14), project.checkpoint("whole", 14)
    torch.testing.assert_close(last["model"], whole["model"], rtol=SAME["fp32"], atol=SAME["fp32"])
    project.run("evaluate", "name=link3", *words(3, 2), "evaluation.checkpoint=last")
    of_three = project.json("link3", "evaluation.json")
    project.run("evaluate", "name=link3", *words(None, 1), "evaluation.checkpoint=last")
    assert of_three["loss"] == pytest.approx(
        project.json("link3", "evaluation.json")["loss"], rel=1e-6
    )


def test_one_rank_needs_no_launcher_and_compiles_nothing(project: Project, tmp_path: Path) -> None:
    built = tmp_path / "extensions"
    built.mkdir()
    process = project.start(*words(3, 1), TORCH_EXTENSIONS_DIR=str(built))
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert not list(built.iterdir())
    printed = output + errors
    assert not any(word in printed for word in ("WARNING", "Warning", "DeepSpeed", "deprecated")), (
        printed
    )
    project.run("name=plain", *words(None, 1))
    assert_same(project, "run", "plain")


def test_stage_3_resumes_exactly(project: Project) -> None:
    more = [*words(3), *RANDOM, "checkpoint.every_steps=4"]
    path = project.directory("run") / "checkpoints" / "step_00000004.pt"
    project.run_many({"run": more, "resumed": [*more, f"checkpoint.resume={path}"]})
    lines = project.lines("run")[4:]
    del lines[-1]["epoch_loss"]  # of an epoch that another run has begun
    assert project.lines("resumed") == lines
    assert_equal(project.checkpoint("resumed", 7), project.checkpoint("run", 7))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.slow
def test_its_launcher_starts_the_same_run(project: Project) -> None:
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus=2",
        f"--master_port={free_port()}",
    ]
    project.run(*words(2), command=command)
    project.run("name=own", *words(2))
    assert project.lines("run") == project.lines("own")


def test_parameter_without_gradient_is_named(project: Project) -> None:
    output = project.run(*words(2), "model.has_unused_parameter=true", code=2)
    assert "unused got no gradient" in output and "Traceback" not in output
    more = ["model.fault=skip_later", "training.micro_batch_size=8"]  # on one rank of two
    for stage in (0, 3):
        output = project.run(*words(stage), *more, f"name={stage}", code=2)
        assert (
            "0.bias, 0.weight, 3.bias, 3.weight, 5.weight got no gradient in this step" in output
        ), output
        assert len(project.lines(str(stage))) == 2 and "Traceback" not in output, (
            "and the third step has no line"
        )


def test_gradient_that_is_no_number_ends_the_run(project: Project) -> None:
    old = 'raise torch.OutOfMemoryError("the fault that the test asked for")'
    project.edit("model.py", old, "return _ * torch.nan")
    output = project.run(*words(1), "model.fault=memory_later", code=1)
    assert "a gradient is not finite" in output and "Traceback" not in output
    assert len(project.lines("run")) == 1


def strategy_of(monkeypatch: pytest.MonkeyPatch, stage: int, **options: Any) -> Any:
    from template_package.strategies.deepspeed import DeepSpeedStrategy

    for name in ("DS_ACCELERATOR", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # what the strategy sets is taken back after the test
    config: Any = config_of(**options)
    config.deepspeed = Options(zero_stage=stage)
    return DeepSpeedStrategy(config, Rank(store=dist.HashStore()))


def test_models_that_it_cannot_cut_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scalar, double = nn.Linear(2, 2), nn.Linear(2, 2).double()
    scalar.scale = nn.Parameter(torch.ones(()))

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(
        ConfigError, match=r"parameter scale is torch.float32 of shape \(\).*shape \(1,\)"
    ):
        strategy_of(monkeypatch, 1).prepare(scalar, build)
    with pytest.raises(ConfigError, match=r"weight is torch.float64.*training.precision"):
        strategy_of(monkeypatch, 0).prepare(double, build)
    with pytest.raises(ConfigError, match=r"training.compile=true.*deepspeed.zero_stage=2"):
        strategy_of(monkeypatch, 3, compile=True).prepare(nn.Linear(2, 2), build)


def test_mpirun_may_number_ranks_otherwise_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")  # with device_ids=1,0, say
    strategy = strategy_of(monkeypatch, 1)
    assert os.environ["LOCAL_RANK"] == "0"
    strategy.prepare(nn.Linear(2, 2), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "1"


def test_extra_settings_are_read_as_json() -> None:
    word = "deepspeed.extra={zero_optimization: {reduce_bucket_size: 5e8, overlap_comm: False, stages: [1, a]}}"
    config: Any = load_config(ROOT / "config.yaml", [word])
    expected = {"reduce_bucket_size": 500_000_000, "overlap_comm": False, "stages": [1, "a"]}
    assert config.deepspeed.extra == {"zero_optimization": expected}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"gradient_clipping": 1.0},
            r"deepspeed.extra.gradient_clipping: is made from training.max_gradient_norm",
        ),
        (
            {"zero_optimization": {"stage": 2}},
            r"zero_optimization.stage: is made from deepspeed.zero_stage",
        ),
        ({"zero_optimization": {"overlap_com": True}}, r"DeepSpeed refuses it:.*overlap_com"),
        ({"zero_optimization": 3}, r"DeepSpeed refuses it"),
    ],
)
def test_settings_that_contradict_are_refused(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], words: str
) -> None:
    strategy_of(monkeypatch, 1)
    from template_package.strategies.zero.settings import build_settings

    with pytest.raises(ConfigError, match=words):
        build_settings(Options(extra=extra), None, "fp32", 100)


def test_extra_settings_reach_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy_of(monkeypatch, 1)
    from template_package.strategies.zero.settings import build_settings

    extra = {
        "zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 7},
        "wall_clock_breakdown": True,
    }
    settings = build_settings(Options(zero_stage=2, extra=extra), 0.5, "bf16", 100)
    assert settings["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": False,
        "reduce_bucket_size": 7,
    }
    assert settings["gradient_clipping"] == 0.5 and settings["wall_clock_breakdown"] is True
    assert (
        settings["torch_autocast"]["dtype"] == "bfloat16"
        and settings["torch_autocast"]["enabled"] is True
    )


def test_optimizer_that_looks_at_whole_matrices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy_of(monkeypatch, 1)
    from template_package.strategies.zero.settings import check_optimizer

    optimizer = torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(
        ConfigError, match=r"Adafactor would see the weights as flat pieces.*zero_allow_untested"
    ):
        check_optimizer(optimizer, Options(zero_stage=1))
    check_optimizer(optimizer, Options(zero_stage=0))
    check_optimizer(optimizer, Options(zero_stage=3, extra={"zero_allow_untested_optimizer": True}))

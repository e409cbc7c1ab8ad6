"""Tests of every strategy: it trains as one process does, evaluates exactly, and loads every strategy's checkpoints."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from configs import config_of
from safetensors.torch import load_file
from torch import nn
from workload import model as workload_model

from template_package.config import load_config
from template_package.core.optimizer import set_learning_rate
from template_package.core.ranks import Rank
from template_package.errors import ConfigError
from template_package.strategies import base, create_strategy

from conftest import PACKAGE, ROOT, Project, Session
from test_resuming import RANDOM, assert_equal

LIBRARIES = {  # what each strategy needs besides torch itself
    "ddp": "torch",
    "data_parallel": "torch",
    "fsdp": "torch",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "horovod": "horovod",
}
STRATEGIES = [
    name
    for name, library in LIBRARIES.items()
    if (ROOT / PACKAGE / "strategies" / f"{name}.py").exists() and find_spec(library)
]
MARKED = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name not in STRATEGIES, reason=f"{library} or the file is not there"
        ),
    )
    for name, library in LIBRARIES.items()
]
SINGLE = "single"  # one process on one device, which all others must equal
# the others: two ranks; torch has DataParallel on GPUs only
DEVICES = {
    SINGLE: "cpu",
    "data_parallel": "cpu",
}

MAX_NORM = 0.5
# 103 samples in global batches of 16, the last of 7: two ranks have unequal shares then, and two micro-batches before.
COMMON = [
    "training.max_steps=20",
    "training.micro_batch_size=4",
    f"training.max_gradient_norm={MAX_NORM}",
    "schedule.name=constant",
    "checkpoint.every_steps=10",
    "checkpoint.every_epochs=null",
]
CASES = {
    "fp32": ["training.precision=fp32"],
    "bf16": ["training.precision=bf16"],
    "random": list(RANDOM),
    "small": ["training.global_batch_size=1"],  # one of the ranks has no sample
    "weighted": [
        "model.is_weighted=true",
        "data.max_length=9",
    ],  # a loss_weight, unequal between ranks
}
LOSS_WEIGHT = "def loss_weight(batch: Batch) -> Tensor:\n    return batch.lengths.sum()"
"""The weight is the number of samples, because all lengths are 1, except in the case `weighted`."""
# What 20 steps of AdamW make of sums in another order. A wrong weight, order or clipping is off by more than 1e-3.
SAME_RUN = 2e-4
# Two steps from the same state: sums in another order; in bf16 (8 bits) also what is rounded before it is added up.
NEXT_LOSSES = {"fp32": 1e-5, "bf16": 1e-3}


class Runs:
    """The runs of every strategy, which are trained when they are first needed."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._trained: set[str] = set()

    def of(self, strategy: str) -> Project:
        """Return the project in which the cases of `strategy` have been trained, as runs named "<strategy>-<case>"."""
        if strategy not in self._trained:
            self._trained.add(strategy)
            self.project.run_many(
                {f"{strategy}-{case}": [*words(strategy), *more] for case, more in CASES.items()}
            )
        return self.project


def words(strategy: str) -> list[str]:
    """Return the settings of a run with `strategy`, without the settings of a case."""
    name = "ddp" if strategy == SINGLE else strategy
    return [f"strategy={name}", f"device_ids={DEVICES.get(strategy, 'cpu,cpu')}", *COMMON]


@pytest.fixture(scope="module")
def runs(template_project: Any, session: Session, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("strategies") / "project"
    shutil.copytree(template_project, folder, ignore=shutil.ignore_patterns("__pycache__"))
    project = Project(folder, session)
    project.append("model.py", LOSS_WEIGHT)
    return Runs(project)


def figures(project: Project, name: str, key: str) -> list[float]:
    return [line[key] for line in project.lines(name)]


@pytest.mark.parametrize("case", ["fp32", "small", "weighted"])
@pytest.mark.parametrize("strategy", MARKED)
def test_trains_as_one_process(runs: Runs, strategy: str, case: str) -> None:
    runs.of(SINGLE)
    project, reference, name = runs.of(strategy), f"{SINGLE}-{case}", f"{strategy}-{case}"
    summary = project.json(name, "summary.json")
    assert summary["strategy"] == strategy and summary["steps"] == 20
    assert summary["num_devices"] == len(words(strategy)[1].split(","))
    for key in ("loss", "gradient_norm"):
        assert figures(project, name, key) == pytest.approx(
            figures(project, reference, key), rel=SAME_RUN
        ), key
    norms = figures(project, name, "gradient_norm")
    assert sum(norm > MAX_NORM for norm in norms) >= 5 and max(norms) > 2 * MAX_NORM, (
        "clipping must matter"
    )
    weights = project.checkpoint(reference, 20)["model"]
    trained = project.checkpoint(name, 20)["model"]
    assert trained.keys() == weights.keys() and len(weights) == 6
    for key, weight in weights.items():
        torch.testing.assert_close(trained[key], weight, rtol=SAME_RUN, atol=SAME_RUN)


# 37 in batches of 5 divide nowhere; of 1, a rank has none
@pytest.mark.parametrize("num_samples", [37, 1])
@pytest.mark.parametrize("strategy", MARKED)
def test_evaluation_is_exact(runs: Runs, strategy: str, num_samples: int) -> None:
    path = runs.of(SINGLE).directory(f"{SINGLE}-fp32") / "checkpoints" / "step_00000010.pt"
    results = []
    for other in (SINGLE, strategy):
        name = f"name={other}-evaluated"
        batches = [f"data.num_validation={num_samples}", "evaluation.micro_batch_size=5"]
        runs.project.run("evaluate", name, *words(other), *batches, f"evaluation.checkpoint={path}")
        results.append(runs.project.json(f"{other}-evaluated", "evaluation.json"))
    expected, result = results
    assert result["num_samples"] == num_samples
    # float32 errors of each sample, added up in another order
    for key in (
        "loss",
        "absolute_error",
    ):
        assert result[key] == pytest.approx(expected[key], rel=1e-6), key


@pytest.mark.parametrize("strategy", MARKED)
def test_goes_on_from_a_checkpoint_of_any_strategy(runs: Runs, strategy: str) -> None:
    writers = [SINGLE, *STRATEGIES]
    cases = {}
    for writer in writers:
        for precision in NEXT_LOSSES:
            path = (
                runs.of(writer).directory(f"{writer}-{precision}")
                / "checkpoints"
                / "step_00000010.pt"
            )
            more = [
                f"checkpoint.resume={path}",
                "training.max_steps=12",
                "evaluation.every_epochs=null",
            ]
            cases[f"{strategy}-from-{writer}-{precision}"] = [
                *words(strategy),
                *CASES[precision],
                *more,
            ]
    runs.project.run_many(cases)
    for writer in writers:
        for precision, tolerance in NEXT_LOSSES.items():
            lines = runs.project.lines(f"{strategy}-from-{writer}-{precision}")
            expected = runs.project.lines(f"{writer}-{precision}")[10:12]
            assert (
                [line["step"] for line in lines] == [11, 12] == [line["step"] for line in expected]
            )
            for key in ("loss", "gradient_norm"):
                values = [line[key] for line in lines]
                assert values == pytest.approx([line[key] for line in expected], rel=tolerance), (
                    writer,
                    precision,
                )


@pytest.mark.parametrize("strategy", MARKED)
def test_resumed_run_equals_uninterrupted_run(runs: Runs, strategy: str) -> None:
    project, name = runs.of(strategy), f"{strategy}-random"
    project.rewind(name, 10, f"{name}-resumed")  # in the middle of the second epoch
    output = project.run(f"name={name}-resumed", *words(strategy), *CASES["random"])
    assert "resuming after step 10" in output
    for split in ("train", "validation"):
        assert project.lines(f"{name}-resumed", split) == project.lines(name, split)
    state, resumed = (project.checkpoint(run, 20) for run in (name, f"{name}-resumed"))
    assert assert_equal(state, resumed) >= 6 + 3 * 6  # weights, AdamW's state


@pytest.mark.parametrize("strategy", MARKED)
def test_best_checkpoint_and_weights_are_whole(runs: Runs, strategy: str) -> None:
    project, name = runs.of(strategy), f"{strategy}-fp32"
    folder = project.directory(name)
    best = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
    exported = load_file(folder / "model.safetensors")
    plain = workload_model.build_model(workload_model.ModelConfig())
    plain.load_state_dict(exported)
    assert_equal(best["model"], exported)
    for key, parameter in plain.named_parameters():
        state = best["optimizer"]["state"][key]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
    lines = project.lines(name, "validation")
    assert best["step"] == min(lines, key=lambda line: line["loss"])["step"]


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "data_parallel"])
def test_all_ranks_begin_with_the_buffers_of_rank_0(project: Project, strategy: str) -> None:
    table = (
        "torch.tensor(float(torch.distributed.is_initialized() and torch.distributed.get_rank()))"
    )
    project.edit(
        "model.py",
        "    model.config, model",
        f"    model.register_buffer('table', {table})\n    model.config, model",
    )
    project.edit("model.py", "else model(inputs)\n", "else model(inputs) + module.table\n")
    words = ("training.epochs=1", "evaluation.every_epochs=null", "training.micro_batch_size=8")
    project.run("name=one", *words)
    project.run("name=two", "device_ids=cpu,cpu", f"strategy={strategy}", *words)
    for line, expected in zip(project.lines("two"), project.lines("one"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_groups_of_an_optimizer_of_ones_own_are_taken_up(is_frozen: bool) -> None:
    def create() -> base.Strategy:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(not is_frozen)
        strategy = base.Strategy(config_of(), Rank())
        strategy.prepare(
            model, lambda _: torch.optim.AdamW([{"params": layer.parameters()} for layer in model])
        )
        return strategy

    first, second = create(), create()
    set_learning_rate(first.optimizer, 0.1, 0.2)
    first.backward(first.model(torch.ones(1, 2)).sum(), 1.0)
    first.optimizer_step(None)
    second.load_state_dict(first.state_dict())
    # the config's, in every step; a state does not bring it
    set_learning_rate(second.optimizer, 0.1, 0.2)
    assert_equal(second.state_dict(), first.state_dict())


@pytest.mark.parametrize(
    "strategy", [case for case in MARKED if case.values[0] in ("accelerate", "deepspeed")]
)
def test_torchrun_starts_the_same_run(runs: Runs, strategy: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    more = [*words(strategy), "training.max_steps=2", "evaluation.every_epochs=null"]
    runs.project.run(f"name={strategy}-torchrun", *more, command=torchrun)
    runs.project.run(f"name={strategy}-own", *more)
    lines = runs.project.lines(f"{strategy}-torchrun")
    assert lines == runs.project.lines(f"{strategy}-own") and len(lines) == 2


@pytest.mark.parametrize("library", ["accelerate", "deepspeed"])
def test_missing_library_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    if not (ROOT / PACKAGE / "strategies" / f"{library}.py").exists():
        pytest.skip("this project was made without it")
    for name in ("DS_ACCELERATOR", "LOCAL_RANK"):  # so that what is set there is taken back
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, library, None)  # as if it could not be found
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.strategies.{library}", raising=False)
    config = replace(load_config(ROOT / "config.yaml"), strategy=library)
    with pytest.raises(
        ConfigError, match=rf"{library} is not installed.*pip install .*'\.\[{library}\]'"
    ):
        create_strategy(config, Rank())

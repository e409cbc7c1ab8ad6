"""Tests that the two sizes of a project do the same: equal runs, each continues and evaluates the other's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baking import bake, plain_environment
from warm import run_warm

WORDS = ("logging.every_steps=1", "logging.tracker=none", "training.epochs=2", "name=run")
SPEEDS = ("samples_per_second",)


@pytest.fixture(scope="module")
def projects(template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sizes")
    return {size: bake(template, folder / size, size=size) for size in ("small", "full")}


def run(project: Path, runs: Path, *words: str) -> str:
    code, printed = run_warm(project, *words, *WORDS, DDP_RUNS_FOLDER=str(runs))
    assert code == 0, printed
    return printed


def lines_of(runs: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (runs / "run" / "metrics.jsonl").read_text("utf-8").splitlines())
    return [{k: v for k, v in line.items() if k not in SPEEDS} for line in lines]


def test_both_sizes_train_the_same_to_the_last_bit(
    projects: dict[str, Path], tmp_path: Path
) -> None:
    for devices in ("cpu", "cpu,cpu"):
        for size, project in projects.items():
            run(project, tmp_path / size / devices, f"device_ids={devices}")
        small, full = (lines_of(tmp_path / size / devices) for size in ("small", "full"))
        assert small == full and len(small) == 42


@pytest.mark.parametrize(("first", "second"), [("small", "full"), ("full", "small")])
def test_a_run_goes_on_and_is_evaluated_in_the_other_size(
    projects: dict[str, Path], tmp_path: Path, first: str, second: str
) -> None:
    two = "device_ids=cpu,cpu"
    run(projects[first], tmp_path / "whole", two)
    run(
        projects[first],
        tmp_path / "moved",
        two,
        "training.max_steps=25",
        "checkpoint.every_steps=5",
    )
    for path in (tmp_path / "moved" / "run" / "checkpoints").glob("step_*25.pt"):
        path.unlink()  # its last step is that of a run whose schedule ends there
    assert "resuming after step" in run(projects[second], tmp_path / "moved", two)
    steps = [line["step"] for line in lines_of(tmp_path / "moved") if line["split"] == "train"]
    assert steps == [*range(1, 41)]
    run(projects[second], tmp_path / "whole", "evaluate", two)
    result = json.loads((tmp_path / "whole" / "run" / "evaluation.json").read_text("utf-8"))
    best = [line for line in lines_of(tmp_path / "whole") if line["step"] == result["step"]][-1]
    assert result["accuracy"] == best["accuracy"] and result["loss"] == best["loss"]


def test_nodes_of_a_small_run_that_would_train_something_else_are_refused(
    projects: dict[str, Path], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank, seed in enumerate(("seed=1", "seed=2")):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "GROUP_RANK": str(rank),
        }
        variables |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"DDP_RUNS_FOLDER": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "run.py", "device_ids=cpu", seed, *WORDS],
                cwd=projects["small"],
                stderr=subprocess.PIPE,
                encoding="utf-8",
                env=plain_environment(variables),
            )
        )
    told = "".join(rank.communicate(timeout=100)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2], told
    assert told.count("rank 1 would not train what rank 0 does: seed: 1 -> 2") == 1, told


@pytest.mark.parametrize("ends", [("exit 143", "exit 143"), ("kill -TERM $$", "exit 1")])
def test_ranks_that_end_in_the_same_moment_were_stopped(
    projects: dict[str, Path], ends: tuple[str, str]
) -> None:
    """A scheduler may tell one rank alone. The exit code is 143, even if no rank is left when one looks.

    A rank that was told before it trained ends at once, and the other one fails, since it has lost its peer.
    """
    text = f"""
import subprocess
from ddp_experiment.core import launch

ranks = [subprocess.Popen(["sh", "-c", end]) for end in {ends}]
for rank in ranks:
    rank.wait()
asked = []
launch._watch(ranks, asked)
print(launch._judge([rank.poll() for rank in ranks], asked, None, None))
"""
    command = [sys.executable, "-c", text]
    printed = subprocess.check_output(command, cwd=projects["small"], encoding="utf-8")
    assert printed.split()[-1] == "143"


# As ScheduleFree does, it steps one set of weights, and another one, here their mean, is evaluated and saved.
MEAN_OF_ITERATES = """
import torch

class Means(torch.optim.SGD):
    is_training = False

    def step(self):
        assert self.is_training
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.add_(parameter.detach() - mean, alpha=1 / state["count"])
                state["own"] = parameter.detach().clone()

    def train(self):
        self._take("own", True)

    def eval(self):
        self._take("mean", False)

    def _take(self, name, is_training):
        self.is_training = is_training
        for parameter, state in self.state.items():
            parameter.data.copy_(state[name])


def build_optimizer(model, config):
    return Means(model.parameters(), lr=config.learning_rate)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "full"])
def test_optimizer_with_two_sets_of_weights_is_told_which_one_is_wanted(
    template: Path, tmp_path: Path, size: str
) -> None:
    project = bake(template, tmp_path, size=size, example="stub")
    with next(project.glob("*/model.py")).open("a", encoding="utf-8") as file:
        file.write(MEAN_OF_ITERATES)
    for runs in ("whole", "twice"):
        for steps in (20, 25, 30) if runs == "twice" else (30,):
            words = ("device_ids=cpu,cpu", f"training.max_steps={steps}", "schedule.name=constant")
            run(project, tmp_path / runs, *words, "checkpoint.every_steps=5")
    whole, twice = (tmp_path / runs / "run" / "checkpoints" for runs in ("whole", "twice"))
    assert len([*whole.glob("*.pt")]) > 2
    for path in whole.glob("*.pt"):
        state, other = torch.load(path), torch.load(twice / path.name)
        for name, of_parameter in state["optimizer"]["state"].items():
            assert torch.equal(state["model"][name], of_parameter["mean"])
            assert not torch.equal(state["model"][name], of_parameter["own"])
            assert torch.equal(state["model"][name], other["model"][name])


def test_memory_that_runs_out_names_the_key_that_helps(template: Path, tmp_path: Path) -> None:
    project = bake(template, tmp_path, size="small", example="stub")
    with (project / "ddp_experiment" / "model.py").open("a", encoding="utf-8") as model:
        model.write(
            "\n\ndef compute_loss(model, batch):\n    raise torch.OutOfMemoryError('out')\n"
        )
    for devices in ("cpu", "cpu,cpu"):
        code, printed = run_warm(project, f"device_ids={devices}", "logging.tracker=none")
        assert code == 1
        remedy = "error: a device's memory is full. Set a smaller training.micro_batch_size"
        assert printed.splitlines()[-1].startswith(remedy), printed

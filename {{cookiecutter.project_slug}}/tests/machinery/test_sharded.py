"""Tests of checkpoint.sharded: the state is that of one file, whoever reads it, and steps go on while it is written."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import config_of
from huggingface_hub import load_torch_model
from safetensors.torch import load_file
from test_disk import mounted, needs_mounts
from workload import model as workload_model

from template_package.core.checkpoint import load_checkpoint
from template_package.training.sharded import Checkpoints, crc, read_whole

from conftest import Project
from test_resuming import RANDOM, assert_equal

FSDP = ["strategy=fsdp", "checkpoint.every_steps=5", *RANDOM]
TWO = [*FSDP, "device_ids=cpu,cpu"]
SHARDED = [*TWO, "checkpoint.sharded=true"]


def state_of(path: Path) -> dict[str, Any]:
    """Return a checkpoint of either kind, whole."""
    state = Checkpoints(path.parent, config_of().checkpoint).load(path)
    return {key: value for key, value in read_whole(state).items() if key != "config"}


def folders(project: Project, name: str) -> list[str]:
    return sorted(path.name for path in (project.directory(name) / "checkpoints").iterdir())


def rewind(project: Project, name: str, step: int, new_name: str) -> None:
    """Copy a run without the checkpoints after `step`, as if it had been killed there."""
    shutil.copytree(project.directory(name), project.directory(new_name))
    for path in (project.directory(new_name) / "checkpoints").iterdir():
        if int(path.stem[5:]) > step:
            shutil.rmtree(path)


ODD = """
class Odd(nn.Sequential):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.norm, self.model = nn.BatchNorm1d(2), nn.Parameter(torch.ones(2))
        self.register_parameter("a/b", nn.Parameter(torch.ones(2)))

    def forward(self, inputs):
        return self.norm(super().forward(inputs)) * self.model * getattr(self, "a/b")


_build = build_model


def build_model(config):
    model = _build(config)
    odd = Odd(*model)
    odd.config, odd.num_calls = config, 0
    return odd
"""


@pytest.mark.parametrize(
    "words", [[], ["training.ema_decay=0.9"], ["training.precision=bf16"], ["odd"]]
)
def test_state_is_that_of_one_file_and_a_run_goes_on_from_it_to_the_same_bits(
    project: Project, words: list[str]
) -> None:
    if words == ["odd"]:  # statistics that differ between ranks, and names that are ours too
        project.append("model.py", ODD)
        words = ["data.noise=0.2"]
    project.run("name=plain", *TWO, *words)
    project.run("name=run", *SHARDED, *words)
    assert folders(project, "run")[-3:] == [f"step_{n:08d}.dcp" for n in (15, 20, 21)]
    assert project.lines("run") == project.lines("plain")
    checkpoints = project.directory("run") / "checkpoints"
    for path in checkpoints.iterdir():
        plain = "best.pt" if path.name.startswith("best") else f"{path.stem}.pt"
        expected = load_checkpoint(project.directory("plain") / "checkpoints" / plain)
        expected.pop("config")
        assert assert_equal(state_of(path), expected) >= 6 + 3 * 6
    models = [project.directory(name) / "model.safetensors" for name in ("run", "plain")]
    assert models[0].read_bytes() == models[1].read_bytes()
    rewind(project, "run", 15, "resumed")
    assert "resuming after step 15" in project.run("name=resumed", *SHARDED, *words)
    assert project.lines("resumed") == project.lines("run")
    last = "checkpoints/step_00000021.dcp"
    first, second = (state_of(project.directory(name) / last) for name in ("run", "resumed"))
    assert_equal(first, second)
    project.run("evaluate", "name=run", *SHARDED, *words)
    best = project.json("run", "summary.json")["best"]
    metric = {"loss", "absolute_error"} & best.keys()
    assert all(project.json("run", "evaluation.json")[key] == best[key] for key in metric)


def test_any_strategy_on_any_ranks_goes_on_from_it(project: Project) -> None:
    words = ["checkpoint.every_steps=5", "training.ema_decay=0.9"]
    project.run(
        "name=run", "strategy=fsdp", "checkpoint.sharded=true", "device_ids=cpu,cpu", *words
    )
    expected = [line["loss"] for line in project.lines("run")]
    others = {
        "ddp": ["strategy=ddp", "device_ids=cpu,cpu"],
        "one": ["device_ids=cpu"],
        "three": ["strategy=fsdp", "device_ids=cpu,cpu,cpu", "checkpoint.sharded=true"],
        "replicas": [
            *("strategy=fsdp", "device_ids=cpu,cpu,cpu,cpu"),
            *("fsdp.replicas=2", "checkpoint.sharded=true"),
        ],
        "alone": ["strategy=fsdp", "device_ids=cpu", "checkpoint.sharded=true"],
    }
    for name, more in others.items():
        rewind(project, "run", 15, name)
        project.run(f"name={name}", *more, *words)
        losses = [line["loss"] for line in project.lines(name)]
        assert losses == pytest.approx(expected, rel=1e-5), name
    # a better evaluation in one file takes the place of the best folder
    assert sum(name.startswith("best") for name in folders(project, "ddp")) == 1


def test_damaged_folders_are_told_and_the_one_before_is_taken(project: Project) -> None:
    project.run("name=run", *SHARDED)
    checkpoints, choose = project.directory("run") / "checkpoints", random.Random(3)
    parts = sorted(checkpoints.glob("step_00000021.dcp/__*"))
    assert len(parts) == 2
    for number, name in enumerate([*(part.name for part in parts), ".metadata", "rest.pt"]):
        shutil.copytree(project.directory("run"), project.directory(f"bit{number}"))
        path = project.directory(f"bit{number}") / "checkpoints" / "step_00000021.dcp" / name
        bits = bytearray(path.read_bytes())
        bits[choose.randrange(len(bits) // 4, len(bits) // 2)] ^= 4
        path.write_bytes(bytes(bits))
        output = project.run(f"name=bit{number}", *SHARDED, "training.epochs=4")
        assert "step_00000021.dcp" in output and "cannot be used" in output, name
        assert "resuming after step 20" in output
    (checkpoints / "step_00000021.dcp" / parts[1].name).unlink()
    (checkpoints / "step_00000099.dcp.part").mkdir()
    output = project.run("name=run", *SHARDED, "training.epochs=4")
    assert "cannot be used" in output and "resuming after step 20" in output
    assert not list(checkpoints.glob("*.part"))


SLOW = """
_crc = crc


def crc(path):
    time.sleep({seconds})
    return _crc(path)
"""


def test_steps_go_on_while_it_is_written_and_a_dead_disk_is_told(project: Project) -> None:
    project.append("training/sharded.py", SLOW.format(seconds=1))
    words = [
        "checkpoint.every_steps=10",
        "checkpoint.every_epochs=null",
        "evaluation.every_epochs=null",
    ]
    started_at = time.monotonic()
    project.run("name=run", *SHARDED, *words)  # saves after 10, 20 and 21 of 21 steps
    # each takes 1 or 2 seconds, and the wait for the one before is all that a step sees
    assert time.monotonic() - started_at > 3
    times = {
        path.name: path.stat().st_mtime
        for path in (project.directory("run") / "checkpoints").iterdir()
    }
    assert len(times) == 3
    project.append("training/sharded.py", SLOW.format(seconds=600))
    process = project.start("name=dead", *SHARDED, *words, "launch.timeout_minutes=0.05")
    output = "".join(process.communicate(timeout=120))
    assert process.returncode == 1
    assert "no progress for launch.timeout_minutes; see runs/dead/logs/rank_0.log" in output
    # step 20 was reached, whose save waits for that of step 10
    assert max(line["step"] for line in project.lines("dead")) >= 14
    assert not list((project.directory("dead") / "checkpoints").glob("step*.dcp"))


def test_failure_of_the_run_costs_no_checkpoint_that_is_being_written(project: Project) -> None:
    project.append("training/sharded.py", SLOW.format(seconds=1))
    words = [*SHARDED, "checkpoint.every_epochs=null", "evaluation.every_epochs=null"]
    project.run("name=run", *words, "model.fault=raise", "model.fault_step=8", code=1)
    assert folders(project, "run") == ["step_00000005.dcp"]


def test_folder_that_would_run_code_is_refused(project: Project) -> None:
    project.run("name=run", *SHARDED, "training.max_steps=5")
    folder = project.directory("run") / "checkpoints" / "step_00000005.dcp"
    target = project.folder / "code was run"
    metadata = folder / ".metadata"
    metadata.write_bytes(pickle.dumps(Evil(str(target))))
    sums = {**json.loads((folder / "crc.json").read_text()), ".metadata": crc(metadata)}
    (folder / "crc.json").write_text(json.dumps(sums))
    output = project.run("evaluate", "name=run", f"evaluation.checkpoint={folder}", *TWO, code=2)
    assert "cannot be used" in output and "mkdir" in output
    assert not target.exists()


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_other_commands_take_it(project: Project) -> None:
    project.run("name=run", *SHARDED, "training.max_steps=5")
    best = next((project.directory("run") / "checkpoints").glob("best_*.dcp"))
    project.run("name=weights", "device_ids=cpu", *RANDOM, f"checkpoint.initial_weights={best}")
    project.run("name=other", *TWO, f"checkpoint.resume={best}")
    path = project.folder / "best.pth"  # weights of another program
    torch.save(
        read_whole(Checkpoints(best.parent, config_of().checkpoint).load(best))["model"], path
    )
    project.run("evaluate", "name=run", f"evaluation.checkpoint={path}", *SHARDED)
    assert "PASSED" in project.run("smoke", *SHARDED, command=[sys.executable])


@pytest.mark.parametrize("words", [SHARDED, ["device_ids=cpu", *RANDOM]])
def test_export_writes_what_hugging_face_reads(project: Project, words: list[str]) -> None:
    project.run("name=run", *words, "training.max_steps=5")
    checkpoints = Checkpoints(project.directory("run") / "checkpoints", config_of().checkpoint)
    weights = read_whole(checkpoints.load(checkpoints.best))["model"]
    folder = project.directory("run") / "export"
    assert "must be one of fp32, bf16" in project.run("export", "int8", code=2)
    project.run("export", "bf16")
    (file,) = (folder / "bf16").iterdir()
    found = load_file(file)
    for name, value in weights.items():
        expected = value.bfloat16() if value.is_floating_point() else value
        assert torch.equal(found[name], expected) and found[name].dtype == expected.dtype

    project.edit("commands/export.py", "PART_BYTES = 5 * 10**9", "PART_BYTES = 300")
    project.run("export", "fp32", "evaluation.checkpoint=best")
    parts = sorted((folder / "fp32").glob("*.safetensors"))
    assert len(parts) > 1
    for part in map(load_file, parts):
        assert sum(value.nbytes for value in part.values()) <= 300 or len(part) == 1
    index = json.loads((folder / "fp32" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    model = workload_model.build_model(workload_model.ModelConfig())
    load_torch_model(model, folder / "fp32")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    project.edit("commands/export.py", "PART_BYTES = 300", "PART_BYTES = 10**9")
    project.run("export", "fp32")
    assert [path.name for path in (folder / "fp32").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_signal_while_it_is_written_costs_no_step_that_was_saved(
    project: Project, number: int
) -> None:
    words = [*SHARDED, "model.seconds_per_step=0.05"]
    project.run("name=undisturbed", *words)
    project.append("training/sharded.py", SLOW.format(seconds=0.15))
    process = project.start(*words)
    part = project.directory("run") / "checkpoints" / "step_00000010.part"
    deadline = time.monotonic() + 100
    while not part.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert part.exists()
    process.send_signal(number)
    output = "".join(process.communicate(timeout=100))
    if number == signal.SIGTERM:
        assert process.returncode == 143, output
        saved = project.json("run", "summary.json")["steps"]
        assert f"step_{saved:08d}.dcp" in folders(project, "run")
    else:
        assert folders(project, "run")[-1] == "step_00000010.part"
    project.run(*words)
    assert project.lines("run") == project.lines("undisturbed")
    last = "checkpoints/step_00000021.dcp"
    first, second = (state_of(project.directory(one) / last) for one in ("run", "undisturbed"))
    assert_equal(first, second)
    assert not list(part.parent.glob("*.part"))


@needs_mounts
def test_full_disk_ends_the_run_in_one_line(project: Project) -> None:
    words = ["checkpoint.every_steps=1", "checkpoint.keep_last=null", "training.epochs=9"]
    output = project.run(*SHARDED, *words, command=mounted("size=400k"), code=1)
    assert "No space left on device" in output
    assert "The last checkpoint is whole" in output and "Traceback" not in output
    kept = project.folder / "kept" / "run" / "checkpoints"
    whole = sorted(kept.glob("step_*.dcp"))
    assert whole
    for path in whole:
        assert state_of(path)["step"] == int(path.stem[5:])


def test_disk_that_another_node_does_not_see_is_told_before_the_first_step(
    project: Project, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={29000 + time.time_ns() % 900}"]
    folders = tmp_path / "one", tmp_path / "two"
    words = [*FSDP, "device_ids=cpu", "checkpoint.sharded=true"]
    nodes = [
        project.start(*words, command=[*torchrun, f"--node-rank={rank}"], DDP_RUNS_FOLDER=str(path))
        for rank, path in enumerate(folders)
    ]
    output = "".join("".join(node.communicate(timeout=200)) for node in nodes)
    assert "checkpoint.sharded=true: 1 ranks do not see what rank 0 writes" in output
    assert not list(tmp_path.glob("*/run/metrics.jsonl"))


def test_another_strategy_is_refused(project: Project) -> None:
    output = project.run("checkpoint.sharded=true", "device_ids=cpu,cpu", code=2)
    assert "checkpoint.sharded=true: needs strategy=fsdp" in output

"""Tests of checkpoint files (written whole or not at all, rotated, safe to load) and of initial weights from a file."""

from __future__ import annotations

import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from template_package.core.checkpoint import CheckpointFolder, export_weights, load_checkpoint
from template_package.core.config import CheckpointConfig
from template_package.errors import ConfigError
from template_package.files import write_whole
from template_package.training.checkpoint import load_weights

from conftest import Project
from test_resuming import assert_equal

NUMPY_STATE = """
def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    import numpy

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["own"] = VALUE
    return optimizer
"""


def state(step: int) -> dict[str, Any]:
    return {
        "format_version": 1,
        "step": step,
        "model": {"weight": torch.full((2,), float(step))},
    }


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, CheckpointConfig(keep_last=2))
    for step in (1, 2, 3, 120):
        folder.save(state(step))
        if step == 2:
            folder.save(state(step), is_best=True)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "step_00000003.pt", "step_00000120.pt"]
    assert load_checkpoint(folder.best)["step"] == 2
    assert [path.name for path in folder.newest_first()] == [
        "step_00000120.pt",
        "step_00000003.pt",
        "best.pt",
    ]
    everything = CheckpointFolder(tmp_path / "all", CheckpointConfig(keep_last=None))
    for step in range(5):
        everything.save(state(step))
    assert len(everything.newest_first()) == 5


def test_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    CheckpointFolder(tmp_path, CheckpointConfig()).save(state(1), is_best=True)

    def fail(beside: Path) -> None:
        beside.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fail)
    assert load_checkpoint(path)["step"] == 1
    assert CheckpointFolder(tmp_path, CheckpointConfig()).newest_first() == [path]


def test_disk_that_does_not_answer_is_no_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.pt").mkdir()  # reading it is an error of the disk's
    with pytest.raises(IsADirectoryError):
        load_checkpoint(tmp_path / "step_00000001.pt")


def test_damaged_file_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    folder, choose = CheckpointFolder(tmp_path, CheckpointConfig()), random.Random(5)
    folder.save(
        {
            **state(7),
            "best": {"loss": 0.25},
            "random_states": [(1, torch.arange(64, dtype=torch.uint8))],
        }
    )
    path = tmp_path / "step_00000007.pt"
    whole = path.read_bytes()
    expected = load_checkpoint(path)
    damaged = [whole[: len(whole) * percent // 100] for percent in range(0, 100, 5)]
    for _ in range(300):
        bits = bytearray(whole)
        bits[choose.randrange(len(bits))] ^= 1 << choose.randrange(8)
        damaged.append(bytes(bits))
    num_refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            found = load_checkpoint(path)
        except ConfigError:
            num_refused += 1
        else:  # half of so small a file is padding between its entries
            assert_equal(found, expected)
    assert num_refused > 20 + 100, "all that are cut short, and each flipped bit that matters"


def test_numbers_of_numpy_in_an_optimizer_are_saved_as_pythons(project: Project) -> None:
    project.append("model.py", NUMPY_STATE.replace("VALUE", "numpy.float64(0.1)"))
    project.run("checkpoint.every_steps=1")
    project.rewind("run", 10, "resumed")
    project.run("checkpoint.every_steps=1", "name=resumed")
    assert project.lines("resumed") == project.lines("run")
    for group in project.checkpoint("run", 21)["optimizer"]["param_groups"]:
        assert (group["own"], type(group["own"])) == (0.1, float)


def test_containers_in_an_optimizer_are_saved_as_plain_ones(project: Project) -> None:
    code = "collections.defaultdict(list, a=[1]), collections.OrderedDict(b=(2, 3))"
    project.append("model.py", "import collections\n" + NUMPY_STATE.replace("VALUE", code))
    project.run("device_ids=cpu,cpu", "training.max_steps=2", "checkpoint.every_steps=1")
    group = project.checkpoint("run", 2)["optimizer"]["param_groups"][0]
    assert group["own"] == ({"a": [1]}, {"b": (2, 3)}) and type(group["own"][0]) is dict
    project.run("device_ids=cpu,cpu", "training.max_steps=3")


def test_state_that_could_not_be_read_again_is_told_at_the_first_save(
    project: Project, tmp_path: Path
) -> None:
    project.append("model.py", NUMPY_STATE.replace("VALUE", "numpy.zeros(2)"))
    output = project.run("device_ids=cpu,cpu", "checkpoint.every_steps=1", code=2)
    assert "step_00000001.pt cannot be used (Weights only load failed" in output
    assert len(project.lines("run")) == 1
    with pytest.raises(ConfigError, match=r"step_00000001\.pt cannot be used"):
        CheckpointFolder(tmp_path, CheckpointConfig()).save({**state(1), "best": numpy.zeros(2)})


class Payload:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"format_version": 1, "step": Payload(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match=r"evil\.pt cannot be "):
        load_checkpoint(tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match=r"evil\.pt: no state dict"):
        load_weights(nn.Linear(2, 1), tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists(), "the payload works"


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    torch.save({"format_version": 99}, tmp_path / "newer.pt")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "half.pt").write_bytes(b"half a file")
    for name in ("newer", "tensor", "empty", "half", "none"):
        with pytest.raises(ConfigError, match=f"{name}.pt (cannot be|does not exist)") as caught:
            load_checkpoint(tmp_path / f"{name}.pt")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["bare.pt", "wrapped.pth", "ours.bin", "prefixed.pt", "weights.safetensors"]
)
def test_initial_weights_of_anyone(tmp_path: Path, name: str) -> None:
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    weights = source.state_dict()
    contents: dict[str, Any] = {
        "bare.pt": weights,
        "wrapped.pth": {"epoch": 3, "state_dict": weights},
        "ours.bin": {"model": weights, "optimizer": {}},
        "prefixed.pt": {f"module._orig_mod.{key}": value for key, value in weights.items()},
    }
    if name in contents:
        torch.save(contents[name], tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    load_weights(model, tmp_path / name)
    assert torch.equal(model.weight, source.weight) and torch.equal(model.bias, source.bias)


def test_initial_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2, 4), "extra": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ConfigError) as caught:
        load_weights(nn.Linear(3, 2), tmp_path / "other.pt")
    for words in (
        'Missing key(s) in state_dict: "bias"',
        'Unexpected key(s) in state_dict: "extra"',
        "size mismatch for weight",
    ):
        assert words in str(caught.value)
    torch.save({"weight": 3}, tmp_path / "none.pt")
    for name in ("none.pt", "x" * 300):
        with pytest.raises(
            ConfigError, match=r"^checkpoint\.initial_weights=\S+: (does not fit|no state dict)"
        ):
            load_weights(nn.Linear(3, 2), tmp_path / name, "checkpoint.initial_weights=")


def test_exported_weights_have_plain_names_and_tied_weights_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    export_weights(model.state_dict(), model, tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "1.bias"}
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other[1].weight = other[0].weight
    load_weights(other, tmp_path / "model.safetensors")
    assert torch.equal(other.state_dict()["1.weight"], model.state_dict()["0.weight"])


MEASURED = """
def _measured(former) -> object:
    def resume(self: Trainer) -> None:
        former(self)
        held = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        print(f"held for a moment: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held}", flush=True)

    return resume


import os, resource
Trainer.resume = _measured(Trainer.resume)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_resuming_holds_one_checkpoint_on_rank_0_and_little_elsewhere(project: Project) -> None:
    project.edit("model.py", "nn.Linear(6, 16), nn.Tanh()", "nn.Linear(6, 16), Wide(), nn.Tanh()")
    project.append("model.py", WIDE)
    words = ("device_ids=cpu,cpu", "training.max_steps=1", "evaluation.every_epochs=null")
    project.run(*words)
    size = (project.directory("run") / "checkpoints" / "step_00000001.pt").stat().st_size
    assert size > 2e8
    project.append("trainer.py", MEASURED)
    project.run(words[0], "training.max_steps=2", words[2])
    for rank, limit in enumerate((1.2, 0.3)):
        log = (project.directory("run") / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
        held = int(log.rpartition("held for a moment: ")[2].split()[0])
        assert held < limit * size, f"rank {rank}: {held / size:.2f} x the checkpoint"
        print(f"rank {rank}: {held / size:.2f} x the checkpoint")


WIDE = """
class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(20)])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + sum(layer.weight[0, 0] for layer in self.layers)
"""


def test_copies_that_the_user_made_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", CheckpointConfig(keep_last=1))
    folder.folder.mkdir()
    (folder.folder / "step_00000001_good.pt").touch()
    folder._is_verified = True
    for step in (1, 2, 3):
        folder.save({"step": step})
    assert sorted(path.name for path in folder.folder.iterdir()) == [
        "step_00000001_good.pt",
        "step_00000003.pt",
    ]


def anonymous_memory() -> int:
    """Return the bytes that this process holds itself, without the pages of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_file_that_is_read_takes_no_memory_until_its_tensors_are_used(tmp_path: Path) -> None:
    """The first save of 252 M parameters, which is read back, took rank 0 to 7.6 times the weights' size."""
    path, size = tmp_path / "step_00000001.pt", 2**26
    torch.save(state(1) | {"model": {"weight": torch.ones(size // 4)}}, path)
    before = anonymous_memory()
    read = load_checkpoint(path)
    assert anonymous_memory() - before < size / 4
    assert read["model"]["weight"].sum() == size // 4
    path.unlink()  # as a later checkpoint does with it
    assert read["model"]["weight"].sum() == size // 4


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_run_that_goes_on_keeps_no_checkpoint_mapped(project: Project, devices: str) -> None:
    """A deleted file that is mapped takes up disk until the run ends."""
    code = "def after_step(model, step, log):\n    maps = open('/proc/self/maps').read()\n"
    project.append("model.py", code + "    print(step, 'maps a checkpoint:', '.pt' in maps)")
    words = (f"device_ids={devices}", "training.max_steps=3")
    project.run(*words)
    project.run(words[0], "training.max_steps=5")
    logs = [
        path.read_text(encoding="utf-8") for path in project.directory("run").glob("logs/*.log")
    ]
    told = [line for log in logs for line in log.splitlines() if "maps a checkpoint" in line]
    assert len(told) == 5 * len(logs) and all(line.endswith("False") for line in told), told


def test_weights_that_are_parts_of_one_memory_are_exported(tmp_path: Path) -> None:
    module, memory = nn.Linear(2, 1), torch.arange(6.0)
    module.register_buffer("first", memory[:2])
    module.register_buffer("rest", memory[2:].view(2, 2).t())
    export_weights(module.state_dict(), module, tmp_path / "model.safetensors")
    assert_equal(load_file(tmp_path / "model.safetensors"), dict(module.state_dict()))

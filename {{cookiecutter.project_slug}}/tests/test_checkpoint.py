"""Checkpoint files: whole or not there, rotated but for the best, safe to load; and anyone's weights to start from."""

from __future__ import annotations

import errno
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from template_package.training.checkpoint import (
    KEYS,
    CheckpointFolder,
    load_checkpoint,
    write_whole,
)
from template_package.training.checksum import checksum
from template_package.training.random_state import (
    get_random_states,
    seed_generators,
    set_random_states,
)
from template_package.training.weights import _save_model, export_weights, load_initial_weights
from template_package.validation import ConfigError


def state(step: int) -> dict[str, Any]:
    others = dict.fromkeys(KEYS, None)
    return {**others, "format_version": 1, "step": step, "model": {"weight": torch.full((2,), float(step))}}


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2)
    for step in (1, 2, 3, 120):
        folder.save(state(step))
        if step == 2:
            folder.save(state(step), is_best=True)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "step_00000003.pt", "step_00000120.pt"]
    assert load_checkpoint(folder.best)["step"] == 2
    latest = folder.latest()
    assert latest is not None and load_checkpoint(latest)["step"] == 120
    everything = CheckpointFolder(tmp_path / "all", keep_last=None)
    for step in range(5):
        everything.save(state(step))
    assert len(everything.steps()) == 5


def test_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    CheckpointFolder(tmp_path, None).save(state(1), is_best=True)

    def fail(beside: Path) -> None:
        beside.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, fail)
    assert load_checkpoint(path)["step"] == 1
    assert CheckpointFolder(tmp_path, None).steps() == []


def test_disk_that_stumbles_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)

    def write(beside: Path) -> None:
        if len(pauses) < 2:
            raise OSError(errno.EIO, "the disk stumbles")
        beside.write_bytes(b"whole")

    write_whole(tmp_path / "file", write)
    assert pauses == [1.0, 2.0] and (tmp_path / "file").read_bytes() == b"whole"
    with pytest.raises(FileNotFoundError):  # safetensors' own error is none of the system's, by which a disk is told
        _save_model(nn.Linear(1, 1), tmp_path / "gone" / "model.safetensors")


def test_disk_that_does_not_answer_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointFolder(tmp_path, None).save(state(1))
    path, read, pauses = tmp_path / "step_00000001.pt", torch.load, list[float]()
    monkeypatch.setattr("time.sleep", pauses.append)

    def stumble(*args: Any, **options: Any) -> Any:
        if len(pauses) < num_stumbles:
            raise OSError(errno.ESTALE, "the disk stumbles")
        return read(*args, **options)

    monkeypatch.setattr(torch, "load", stumble)
    num_stumbles = 2
    assert load_checkpoint(path)["step"] == 1 and pauses == [1.0, 2.0]
    pauses.clear()
    num_stumbles = 3
    with pytest.raises(OSError, match="stumbles") as caught:
        load_checkpoint(path)
    assert caught.value.filename == str(path)


def test_damaged_file_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    folder, choose = CheckpointFolder(tmp_path, keep_last=None), random.Random(5)
    folder.save({**state(7), "best": {"loss": 0.25}, "random_states": [(1, torch.arange(64, dtype=torch.uint8))]})
    path = tmp_path / "step_00000007.pt"
    whole = path.read_bytes()
    expected = load_checkpoint(path)
    damaged = [whole[: len(whole) * percent // 100] for percent in range(0, 100, 5)]
    for _ in range(200):
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
            assert checksum(found) == checksum(expected)
    assert num_refused > 20 + 50, "all that are cut short, and each flipped bit that matters"


def test_numpys_numbers_are_saved_as_pythons_and_what_could_not_be_read_is_refused(tmp_path: Path) -> None:
    folder, rate = CheckpointFolder(tmp_path, keep_last=None), numpy.float64(0.1)
    folder.save({**state(1), "optimizer": {"param_groups": [{"lr": rate, numpy.int64(3): (numpy.bool_(True), None)}]}})
    (group,) = load_checkpoint(tmp_path / "step_00000001.pt")["optimizer"]["param_groups"]
    assert group == {"lr": 0.1, 3: (True, None)} and [type(group["lr"]), type(group[3][0])] == [float, bool]
    with pytest.raises(ConfigError, match=r"state\['optimizer'\]\['betas'\]\[0\] is a ndarray"):
        folder.save({**state(2), "optimizer": {"betas": [numpy.zeros(2)]}})
    with pytest.raises(
        ConfigError, match=r"state\['model'\]\['adjacency'\] is a Tensor \(torch.float32, torch.sparse_coo, cpu\)"
    ):
        folder.save({**state(2), "model": {"adjacency": torch.eye(2).to_sparse()}})
    assert len(folder.steps()) == 1


def test_checksum_sees_every_part() -> None:
    half = torch.zeros(1, dtype=torch.bfloat16)
    base: dict[str, Any] = {"model": {"a": torch.zeros(2, 3), "b": half}, "best": None, "seeds": [(1, 2)]}
    others = [
        base | {"model": {"a": torch.zeros(3, 2), "b": half}},
        base | {"model": {"a": torch.zeros(2, 3), "c": half}},
        base | {"model": {"a": torch.zeros(2, 3), "b": half + 1}},
        base | {"best": 0},
        base | {"seeds": [(1, 3)]},
    ]
    assert len({checksum(value) for value in [base, *others]}) == 6


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"format_version": 1, "step": Payload(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match=r"evil\.pt cannot be read"):
        load_checkpoint(tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match=r"evil\.pt cannot be read"):
        load_initial_weights(nn.Linear(2, 1), tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists(), "the payload works"


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    torch.save({"format_version": 99}, tmp_path / "newer.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "half.pt").write_bytes(b"half a file")
    (tmp_path / "folder.pt").mkdir()
    loop: list[Any] = []
    loop.append(loop)
    hostile = {"sparse": torch.eye(2).to_sparse(), "endless": loop, "huge": torch.zeros(1).expand(10**13)}
    for name, value in hostile.items():
        torch.save({**state(1), "best": value}, tmp_path / f"{name}.pt")
    torch.save({**state(1), "format_version": torch.ones(2)}, tmp_path / "tensor.pt")
    content = {"format_version": 1}
    torch.save({**content, "checksum": checksum(content)}, tmp_path / "bare.pt")
    problems = {
        "newer": "format_version 99", "empty": "cannot be read", "half": "cannot be read", "none": "not exist",
        "folder": "is no file", "tensor": "format_version", "bare": "holds no best, config, early_stopping",
        **dict.fromkeys(hostile, "cannot be read"),
    }  # fmt: skip
    for name, words in problems.items():
        with pytest.raises(ConfigError, match=words) as caught:
            load_checkpoint(tmp_path / f"{name}.pt")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bare.pt", "wrapped.pth", "ours.bin", "prefixed.pt", "weights.safetensors"])
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
    load_initial_weights(model, tmp_path / name)
    assert torch.equal(model.weight, source.weight) and torch.equal(model.bias, source.bias)


def test_initial_weights_that_are_none_are_refused_in_one_line(tmp_path: Path) -> None:
    model, weights = nn.Linear(3, 2), nn.Linear(3, 2).state_dict()
    contents: dict[str, Any] = {
        "number": {**weights, 0: torch.zeros(1)},
        "sparse": {**weights, "bias": torch.eye(2).to_sparse()},
        "nowhere": {**weights, "bias": torch.empty(2, device="meta")},
        "names": {**weights, "a\x1b[2J\nb": torch.zeros(1), **{f"x{i}": torch.zeros(1) for i in range(3000)}},
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pt")
        with pytest.raises(ConfigError) as caught:
            load_initial_weights(model, tmp_path / f"{name}.pt")
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600
    assert "and 2981 more" in str(caught.value)
    with pytest.raises(ConfigError, match="no such file"):
        load_initial_weights(model, tmp_path / ("x" * 300))


def test_initial_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2, 4), "extra": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ConfigError) as caught:
        load_initial_weights(nn.Linear(3, 2), tmp_path / "other.pt")
    for words in ("missing: bias", "unexpected: extra", "misshapen: weight (2, 4) instead of (2, 3)"):
        assert words in str(caught.value)


def test_exported_weights_have_plain_names_and_tied_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    export_weights(model, tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "1.bias"}


def test_random_states_come_back_through_a_safe_file(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), numpy.random.rand(), numpy.random.randn(), torch.rand(()).item()]

    seed_generators(3)
    first = draw()
    torch.save(get_random_states(torch.device("cpu")), tmp_path / "states.pt")
    expected = draw()
    seed_generators(3)
    assert draw() == first
    set_random_states(torch.load(tmp_path / "states.pt", weights_only=True), torch.device("cpu"))
    assert draw() == expected

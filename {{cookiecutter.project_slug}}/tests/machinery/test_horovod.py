"""Tests of strategy=horovod alone. The tests that every strategy must pass are in test_strategies.py."""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from template_package.core.settings import CommandLine
from template_package.errors import ConfigError
from template_package.launchers import adopt

from conftest import Project

is_needed = pytest.mark.skipif(
    not find_spec("horovod"),
    reason="Horovod is not installed: scripts/install_horovod.sh builds it",
)
WORDS = ["strategy=horovod", "device_ids=cpu,cpu", "training.micro_batch_size=4"]
HOROVODRUN = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "5000",
}  # fmt: skip
PLACE = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()


@is_needed
def test_horovodrun_trains_as_our_own_ranks(project: Project) -> None:
    words = [*WORDS, "training.epochs=10"]
    output = project.run("name=own", *words)
    output += project.run("name=own", *words)  # a complete run, which trains nothing
    assert "is complete" in output
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    output += project.run("name=launched", *words, command=[horovodrun, "-np", "2", sys.executable])
    assert "Horovod background loop" not in output, (
        "what it prints of a rank that left without a word"
    )
    for split in ("train", "validation"):
        assert project.lines("launched", split) == project.lines("own", split)
    losses = [line["loss"] for line in project.lines("own")]  # 7 in each of 10 epochs
    assert len(losses) == 70 and sum(losses[-7:]) < 0.9 * sum(losses[:7]), "it must learn"
    summary = project.json("launched", "summary.json")
    assert summary["strategy"] == "horovod" and summary["world_size"] == 2


@is_needed
def test_compression_rounds_what_is_shared(project: Project) -> None:
    # Steps of 0: each gradient norm is that of the same weights, in every run.
    common = [
        *WORDS,
        "training.max_gradient_norm=1000",
        "optimizer.learning_rate=0",
        "training.epochs=1",
    ]
    cases = {
        "ddp": [*common, "strategy=ddp"],
        "whole": common,
        "half": [*common, "ddp.gradient_compression=fp16"],
        "scaled": [*common, "ddp.gradient_compression=fp16", "training.precision=fp16"],
    }
    project.run_many(cases)
    norms = {name: [float(line["gradient_norm"]) for line in project.lines(name)] for name in cases}
    assert norms["whole"] == pytest.approx(norms["ddp"], rel=1e-6) and len(norms["whole"]) == 7
    assert norms["half"] == pytest.approx(norms["ddp"], rel=2**-11), "11 bits of mantissa, rounded"
    assert norms["half"] != pytest.approx(norms["ddp"], rel=1e-6)
    scaled = [
        (norm, other)
        for norm, other in zip(norms["scaled"], norms["ddp"], strict=True)
        if math.isfinite(norm)
    ]
    assert len(scaled) >= 5, "at most two steps are skipped until the loss scale suits"
    assert [norm for norm, _ in scaled] == pytest.approx([norm for _, norm in scaled], rel=1e-2)


@is_needed
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ddp.gradient_compression=bf16", "Horovod has none or fp16"),
        ("model.dtype=bfloat16", "the parameter 0.weight is of a type"),
        ("model.has_unused_parameter=true", "strategy=horovod: unused got no gradient"),
    ],
)
def test_what_it_cannot_do_is_refused(project: Project, word: str, message: str) -> None:
    output = project.run(
        *WORDS, word, f"data.dtype={word.partition('dtype=')[2] or 'float32'}", code=2
    )
    assert message in output and "Traceback" not in output


@is_needed
def test_gradient_that_a_later_step_lacks_is_named(project: Project) -> None:
    output = project.run(*WORDS, "model.fault=skip_later", "training.micro_batch_size=8", code=2)
    assert "0.weight, 0.bias, 3.weight, 3.bias, 5.weight got no gradient in this step" in output
    assert len(project.lines("run")) == 3 and "Traceback" not in output


@is_needed
def test_a_killed_rank_ends_the_run(project: Project) -> None:
    output = project.run(*WORDS, "model.fault=kill", code=1)
    assert "rank 1" in output and "SIGKILL" in output


def test_missing_library_is_one_line(project: Project) -> None:
    (project.folder / "horovod.py").write_text("", encoding="utf-8")
    output = project.run(*WORDS, code=2)
    assert output.count("\n") == 1 and "Type: scripts/install_horovod.sh" in output


def test_horovodrun_tells_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(*words: str, **variables: str) -> list[str] | None:
        """Return what torchrun would set, or None if no launcher has started this process."""
        environment = {"GLOO_SOCKET_IFNAME": "eth0", **HOROVODRUN, **variables}
        monkeypatch.setattr(os, "environ", environment)
        line = CommandLine(Path(os.devnull), words=words)
        return [environment[name] for name in PLACE] if adopt(line) else None

    own, other = place(), place(HOROVOD_GLOO_RENDEZVOUS_PORT="5001")
    assert own is not None and own[:-1] == ["3", "4", "1", "2", "1", "10.0.0.1"]
    assert other is not None and other[:-1] == own[:-1]
    assert 1024 < int(own[-1]) != int(other[-1]) > 1024, "two jobs on one host"
    assert place() == own, "each rank computes the same port"
    words = ["launch.master_addr=10.0.0.2", "launch.master_port=29500"]
    assert place(*words) == ["3", "4", "1", "2", "1", "10.0.0.2", "29500"]
    assert place(HOROVOD_SIZE="1") is None
    with pytest.raises(ConfigError, match=r"no number in HOROVOD_LOCAL_RANK\. Unset HOROVOD_RANK"):
        place(HOROVOD_LOCAL_RANK="")

"""Tests on one machine: two ranks reach the losses of one process, whether run.py or torchrun starts them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .conftest import SAME
from .hosts import Host

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
ONE_NODE = "--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1"


def test_ranks_started_by_run_py(image: Host, image_losses: list[float]) -> None:
    image.python("device_ids=cpu,cpu", "name=two", *SAME).ended()
    image.has_trained("two", 2, image_losses)


def test_script_for_torchrun(image: Host, image_losses: list[float]) -> None:
    image.start("scripts/torchrun.sh", "device_ids=cpu,cpu", "name=two", *SAME).ended()
    image.has_trained("two", 2, image_losses)


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        (
            "device_ids=cpu,cpu name=a",
            f"--nproc-per-node=2 {ONE_NODE}",
            "device_ids=cpu,cpu name=a",
        ),
        ("device_ids=[cpu,cpu,cpu]", f"--nproc-per-node=3 {ONE_NODE}", "device_ids=[cpu,cpu,cpu]"),
        ("device_ids=auto", f"--nproc-per-node=1 {ONE_NODE}", "device_ids=auto"),
        ("name=a", f"--nproc-per-node=1 {ONE_NODE}", "name=a"),  # config.yaml says auto
        ("--config three.yaml", f"--nproc-per-node=3 {ONE_NODE}", "--config three.yaml"),
        (
            "--config=three.yaml name=b",
            f"--nproc-per-node=3 {ONE_NODE}",
            "--config=three.yaml name=b",
        ),
        ("evaluate device_ids=cpu", f"--nproc-per-node=1 {ONE_NODE}", "evaluate device_ids=cpu"),
        (
            "--max-restarts=0 --nproc-per-node=2 device_ids=auto",
            f"--max-restarts=0 --nproc-per-node=2 {ONE_NODE}",  # the last one counts
            "device_ids=auto",
        ),
    ],
)
def test_script_for_torchrun_starts_a_rank_a_device(
    words: str, options: str, rest: str, image: Host
) -> None:
    config = (image.folder / "config.yaml").read_text(encoding="utf-8")
    three = config.replace("device_ids: auto ", "device_ids:\n  - cpu\n  - cpu\n  - cpu\n#", 1)
    (image.folder / "three.yaml").write_text(three, encoding="utf-8")
    stub = image.folder / "python"  # shows what would be started
    stub.write_text(
        f'#!/bin/sh\n[ "$2" = torch.distributed.run ] && echo "$@" || exec {sys.executable} "$@"\n'
    )
    stub.chmod(0o755)
    printed = image.start(
        "scripts/torchrun.sh", *words.split(), PYTHON=str(stub), **NO_GPUS
    ).ended()
    fixed = "--max-restarts=3 --shutdown-timeout=180 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    found = printed.split()
    assert found[:2] == ["-m", "torch.distributed.run"]
    assert found[2:] == [*fixed.split(), *options.split(), f"{image.folder}/run.py", *rest.split()]


def test_script_for_torchrun_leaves_out_what_an_older_torchrun_does_not_know(
    image: Host, tmp_path: Path
) -> None:
    old = tmp_path / "torch" / "distributed" / "run.py"
    old.parent.mkdir(parents=True)
    # what is looked for in torchrun's own file
    old.write_text('add_argument("--max-restarts")', encoding="utf-8")
    (tmp_path / "torch-2.8.0.dist-info").mkdir()
    (tmp_path / "torch-2.8.0.dist-info" / "METADATA").write_text(
        "Name: torch\nVersion: 2.8.0\n", encoding="utf-8"
    )
    stub = image.folder / "python"
    locate = f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"'
    stub.write_text(
        f'#!/bin/sh\n[ "$2" = torch.distributed.run ] && echo "$@" || {locate}\n', encoding="utf-8"
    )
    stub.chmod(0o755)
    printed = image.start(
        "scripts/torchrun.sh", "--nproc-per-node=2", PYTHON=str(stub), **NO_GPUS
    ).ended()
    assert "this torch's torchrun has no --shutdown-timeout" in printed
    options = printed.splitlines()[-1].split()[2:]
    assert options == [
        "--max-restarts=3",
        "--nproc-per-node=2",
        *ONE_NODE.split(),
        f"{image.folder}/run.py",
    ]


@pytest.mark.parametrize(
    ("word", "key"), [("training.epoch=3", "training.epoch"), ("device_ids=0,2", "device_ids")]
)
def test_script_for_torchrun_tells_a_mistake_in_one_line(word: str, key: str, image: Host) -> None:
    printed = image.start("scripts/torchrun.sh", word, **NO_GPUS).ended(code=2)
    assert printed.startswith(f"error: {key}")
    assert printed.count("\n") == 1

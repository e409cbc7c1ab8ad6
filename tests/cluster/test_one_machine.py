"""One machine: however two ranks are started, they reach the losses of one process."""

from __future__ import annotations

import shutil
import sys

import pytest

from .conftest import AS_ROOT, MPIRUN, SAME
from .running import Host

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def test_ranks_started_by_run_py(image: Host, image_losses: list[float]) -> None:
    image.python("device_ids=cpu,cpu", "name=two", *SAME).ended()
    image.has_trained("two", 2, image_losses)


def test_script_for_torchrun(image: Host, image_losses: list[float]) -> None:
    image.start("scripts/torchrun.sh", "device_ids=cpu,cpu", "name=two", *SAME).ended()
    image.has_trained("two", 2, image_losses)


def test_mpirun(image: Host, image_losses: list[float]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here (Debian: openmpi-bin)")
    image.start(*MPIRUN, "-np", "2", sys.executable, "run.py", "name=two", *SAME, **NO_GPUS, **AS_ROOT).ended()
    image.has_trained("two", 2, image_losses)


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ("device_ids=0,2 name=a", "--nproc-per-node=2 --standalone", "device_ids=0,2 name=a"),
        ("device_ids=[0,2,3]", "--nproc-per-node=3 --standalone", "device_ids=[0,2,3]"),
        ("device_ids=auto:4", "--nproc-per-node=4 --standalone", "device_ids=auto:4"),
        ("device_ids=auto", "--nproc-per-node=8 --standalone", "device_ids=auto"),
        ("name=a", "--nproc-per-node=8 --standalone", "name=a"),  # config.yaml says auto
        ("--config three.yaml", "--nproc-per-node=3 --standalone", "--config three.yaml"),
        ("--config=three.yaml a=b", "--nproc-per-node=3 --standalone", "--config=three.yaml a=b"),
        ("evaluate device_ids=cpu", "--nproc-per-node=1 --standalone", "evaluate device_ids=cpu"),
        (
            "--max-restarts=0 --nproc-per-node=2 device_ids=auto",
            "--max-restarts=0 --nproc-per-node=2 --standalone",  # the last one counts
            "device_ids=auto",
        ),
    ],
)
def test_script_for_torchrun_starts_a_rank_a_device(words: str, options: str, rest: str, image: Host) -> None:
    (image.folder / "three.yaml").write_text("device_ids: [cpu, cpu, cpu]  # more\n", encoding="utf-8")
    stub = image.folder / "python"  # shows what would be started, on a machine with 8 GPUs
    stub.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 8 || echo "$@"\n', encoding="utf-8")
    stub.chmod(0o755)
    printed = image.start("scripts/torchrun.sh", *words.split(), PYTHON=str(stub)).ended()
    fixed = "--max-restarts=3 --shutdown-timeout=180 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    found = printed.split()
    assert found[:2] == ["-m", "torch.distributed.run"]
    assert found[2:] == [*fixed.split(), *options.split(), f"{image.folder}/run.py", *rest.split()]

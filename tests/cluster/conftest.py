"""Fixtures of `make test-cluster`: generated projects, the losses that they must reach, and hosts to train on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from baking import bake

from . import namespaces, slurm
from .hosts import Host, all_ended, copy_project, own_cores

SAME = ("training.epochs=2", "model.dropout=0", "logging.tracker=none")
"""Arguments that train the image example quickly. Dropout is off, since its draws depend on the number of ranks. The
number of ranks then changes only the order in which gradients are summed."""

WORKLOAD_CONFIG = """
name: run
device_ids: cpu
data: {}
model: {seconds_per_step: 0.05}
training: {epochs: 10, global_batch_size: 16}
evaluation: {metric: loss, mode: min}
logging: {every_steps: 1, tracker: none}
"""
"""A config with 70 steps, 7 in each epoch, that are slow enough to be interrupted."""


@pytest.fixture(scope="session")
def image_project(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project generated with the default answers."""
    return bake(template, tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="session")
def slow_project(image_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project with the small model and data of its own tests, whose steps can be slowed down."""
    folder = copy_project(image_project, tmp_path_factory.mktemp("slow") / "project")
    for name in ("model.py", "dataset.py"):
        shutil.copy(folder / "tests" / "workload" / name, folder / "ddp_experiment" / name)
    (folder / "config.yaml").write_text(WORKLOAD_CONFIG, encoding="utf-8")
    return folder


def _losses(project: Path, folder: Path, *words: str) -> list[float]:
    host = Host(copy_project(project, folder / "project"), mark=str(folder))
    with all_ended(host.mark):
        host.python("device_ids=cpu", "name=one", *words).ended()
    return host.losses("one")


@pytest.fixture(scope="session")
def image_losses(image_project: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the last training and validation loss that one process reaches with SAME."""
    return _losses(image_project, tmp_path_factory.mktemp("one"), *SAME)


@pytest.fixture(scope="session")
def slow_losses(slow_project: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the last training and validation loss that one process reaches with the slow project."""
    return _losses(slow_project, tmp_path_factory.mktemp("one"), "model.seconds_per_step=0")


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Yield a mark for the environment of all processes of the test. When the test ends, kill the marked processes."""
    with all_ended(str(tmp_path)):
        yield str(tmp_path)


@pytest.fixture
def image(image_project: Path, tmp_path: Path, mark: str) -> Host:
    """Return this machine as a host, with a copy of the image example."""
    return Host(copy_project(image_project, tmp_path / "image"), mark)


@pytest.fixture(scope="session")
def network() -> Iterator[list[tuple[str, ...]]]:
    """Yield a command prefix for each of two hosts: in front of a command, the prefix runs the command on that host."""
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with namespaces.hosts(2) as prefixes:
        yield [(*prefix, *cores) for prefix, cores in zip(prefixes, own_cores(2), strict=True)]


def _hosts(network: list[tuple[str, ...]], project: Path, folder: Path, mark: str) -> list[Host]:
    return [
        Host(copy_project(project, folder / name), mark, prefix)
        for name, prefix in zip(("a", "b"), network, strict=True)
    ]


@pytest.fixture
def image_hosts(
    network: list[tuple[str, ...]], image_project: Path, tmp_path: Path, mark: str
) -> list[Host]:
    """Return two hosts, each with the image example in a folder of its own."""
    return _hosts(network, image_project, tmp_path, mark)


@pytest.fixture
def slow_hosts(
    network: list[tuple[str, ...]], slow_project: Path, tmp_path: Path, mark: str
) -> list[Host]:
    """Return two hosts, each with the slow project in a folder of its own."""
    return _hosts(network, slow_project, tmp_path, mark)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """Yield a running SLURM with two virtual nodes."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    with slurm.running_slurm(mark=str(tmp_path_factory.mktemp("slurm"))) as running:
        yield running

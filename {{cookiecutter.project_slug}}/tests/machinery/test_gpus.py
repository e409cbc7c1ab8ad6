"""Tests of finding GPUs, simulated ones and this machine's own, and of locks between real processes of two users."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from secrets import token_hex

import pynvml
import pytest
import torch
from shared_server import (
    IS_ROOT,
    NOBODY,
    OWN_USER,
    SimulatedNvml,
    child,
    driver,
    needs_linux,
    receive,
    someone_elses_process,
)

from template_package.core.launch import GIB, Gpu, find_gpus, lock


def find(nvml: SimulatedNvml, mask: str | None = None) -> list[Gpu]:
    with driver(nvml, mask):
        return find_gpus(os.environ)


# What NVML reports


def test_simulation_has_the_interface_of_pynvml() -> None:
    functions = [name for name in vars(SimulatedNvml) if name.startswith("nvml")]
    assert len(functions) == 6
    for name in functions:
        own = inspect.signature(getattr(SimulatedNvml(), name)).parameters
        real = inspect.signature(inspect.unwrap(getattr(pynvml, name))).parameters
        assert list(own) == list(real)[: len(own)], name


@pytest.mark.parametrize(
    ("mask", "visible"), [(None, [0, 1, 2, 3]), ("", []), (" 3 , 0", [3, 0]), ("2,", [2])]
)
def test_mask_chooses_and_orders_the_gpus(mask: str | None, visible: list[int]) -> None:
    assert [gpu.index for gpu in find(SimulatedNvml(9, 9, 9, 9), mask)] == visible


@pytest.mark.parametrize(
    ("mask", "visible"),
    [("-1", []), ("NoDevFiles", []), ("1,-1,2", [1]), ("1,9,2", [1]), ("2,nonsense,1", [2])],
)
def test_mask_ends_at_an_entry_that_is_no_gpu_as_cuda_reads_it(
    mask: str, visible: list[int]
) -> None:
    """-1 is how many people hide all GPUs, and NoDevFiles how SLURM does."""
    assert [gpu.index for gpu in find(SimulatedNvml(9, 9, 9, 9), mask)] == visible


def test_mask_of_whole_uuids_is_read() -> None:
    nvml = SimulatedNvml(9, 9, 9)
    mask = f"{nvml.nvmlDeviceGetUUID(2)},{nvml.nvmlDeviceGetUUID(0)}"
    assert find(nvml, mask) == [find(nvml)[2], find(nvml)[0]]


def test_mask_of_the_beginnings_of_uuids_is_read() -> None:
    nvml = SimulatedNvml(9, 9, 9)
    assert find(nvml, "GPU-c,GPU-a12") == [find(nvml)[2], find(nvml)[0]]


def test_slice_of_a_gpu_is_a_device_of_which_nothing_else_is_known() -> None:
    assert find(SimulatedNvml(9, 9), "MIG-1a2b") == [Gpu(0, "MIG-1a2b")]


def test_cuda_shows_one_slice_alone() -> None:
    assert find(SimulatedNvml(9, 9), "MIG-1a2b,MIG-3c4d") == [Gpu(0, "MIG-1a2b")]


@needs_linux
def test_processes_are_told_by_their_owners() -> None:
    nvml, own = SimulatedNvml(9, 9, 9, 9), str(os.geteuid())
    beyond_all_ids = 2**22 + 1
    with someone_elses_process() as (pid, other):
        nvml.processes = {0: [os.getpid(), os.getpid()], 1: [os.getpid(), pid], 2: [beyond_all_ids]}
        users = [gpu.users for gpu in find(nvml)]
    assert users == [{own}, {own, other}, {"a process that cannot be seen"}, set()]


def test_free_memory_is_read_where_it_can_be() -> None:
    found = find(SimulatedNvml(1.5, 30, -1))
    assert [gpu.free_memory / GIB for gpu in found] == [1.5, 30, math.inf]


def test_lost_gpu_costs_no_other() -> None:
    nvml = SimulatedNvml(9, 9, 9, broken=1)
    assert [(gpu.index, gpu.uuid) for gpu in find(nvml)] == [
        (index, nvml.nvmlDeviceGetUUID(index)) for index in (0, 2)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_i_is_the_gpu_that_nvml_names() -> None:
    visible = find_gpus(os.environ)
    assert len(visible) == torch.cuda.device_count() > 0
    for index, gpu in enumerate(visible):
        assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(index).uuid}"


# Locks


def hold(name: str) -> Callable[[Connection], None]:
    """Return a function for child(): it takes the lock `name`, sends whether that succeeded, and keeps the lock."""

    def work(pipe: Connection) -> None:
        held = lock(name)
        pipe.send(held is not None)
        time.sleep(60)

    return work


@needs_linux
@pytest.mark.parametrize(
    "uid",
    [
        OWN_USER,
        pytest.param(
            NOBODY, marks=pytest.mark.skipif(not IS_ROOT, reason="only root can be others")
        ),
    ],
)
def test_one_process_at_a_time_holds_a_lock_whoever_runs_it(uid: int) -> None:
    name = f"GPU-test-{token_hex(8)}"
    with child(hold(name), uid) as (_, pipe), child(hold(f"{name}0"), uid) as (_, other):
        assert receive(pipe) and receive(other), "two GPUs have two locks"
        assert lock(name) is None
    own = lock(name)  # the holder was killed
    assert own is not None
    with child(hold(name), uid) as (_, pipe):
        assert not receive(pipe)
    own.close()
    with child(hold(name), uid) as (_, pipe):
        assert receive(pipe)


def test_gpus_without_uuid_are_not_locked() -> None:
    first, second = lock(""), lock("")
    assert first is not None and second is not None
    first.close()
    second.close()

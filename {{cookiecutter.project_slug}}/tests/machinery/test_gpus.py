"""Tests of finding GPUs, simulated ones and this machine's own, and of locks between real processes of two users."""

from __future__ import annotations

import inspect
import os
import sys
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
    receive,
    someone_elses_process,
)

from template_package.launching.devices import Gpus, find_gpus, owner, take_lock

UNSEEN = "a process that cannot be seen"
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="locks, and /proc with processes' owners, are Linux's"
)


def find(nvml: SimulatedNvml | None, mask: str | None = None) -> Gpus:
    return find_gpus({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}, nvml)


# What NVML reports


def test_simulation_has_the_interface_of_pynvml() -> None:
    functions = [name for name in vars(SimulatedNvml) if name.startswith("nvml")]
    assert len(functions) == 9
    for name in functions:
        own = inspect.signature(getattr(SimulatedNvml(), name)).parameters
        real = inspect.signature(inspect.unwrap(getattr(pynvml, name))).parameters
        assert list(own) == list(real)[: len(own)], name


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("1,9,2", [1]),
        ("2,nonsense,1", [2]),
        (" 3 , 0", [3, 0]),
        ("GPU-c,GPU-a", [2, 0]),
        ("GPU-,GPU-a", []),  # ambiguous
        ("GPU-c1234567-89ab", [2]),
    ],
)
def test_mask_is_read_as_cuda_reads_it(mask: str | None, visible: list[int]) -> None:
    assert [gpu.index for gpu in find(SimulatedNvml(9, 9, 9, 9), mask).visible] == visible


@needs_linux
def test_processes_are_named_by_their_owners() -> None:
    nvml, own = SimulatedNvml(9, 9, 9, 9), owner(os.getpid())
    beyond_all_ids = 2**22 + 1
    with someone_elses_process() as (pid, other):
        nvml.processes = {0: [os.getpid(), os.getpid()], 1: [os.getpid(), pid], 2: [beyond_all_ids]}
        gpus = find(nvml).present
    assert [gpu.users for gpu in gpus] == [(own,), tuple(sorted((own, other))), (UNSEEN,), ()]


@pytest.mark.skipif(not IS_ROOT, reason="only root can be others")
def test_user_without_a_name_is_a_number() -> None:
    assert owner(1) == "root"
    with child(hold("any"), uid=3_999_999_999) as (pid, pipe):
        receive(pipe)
        assert owner(pid) == "uid 3999999999"


def test_lost_gpu_costs_no_other() -> None:
    gpus = find(SimulatedNvml(9, 9, 9, broken=1))
    assert [gpu.index for gpu in gpus.present] == [0, 2]
    assert gpus.problem == "GPU 1: GPU is lost"


def test_missing_gpus_have_a_reason() -> None:
    if not torch.cuda.is_available():  # torch is asked where NVML does not answer
        mismatch = SimulatedNvml(9, init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        assert "version mismatch" in find(mismatch).problem and not find(mismatch).present
    if torch.version.cuda is None and torch.version.hip is None:
        assert "is built without CUDA" in find(None).problem


@needs_linux
def test_memory_and_users_of_each_gpu_are_told() -> None:
    nvml = SimulatedNvml(1, 30, -1)
    nvml.processes = {1: [os.getpid()]}
    assert [str(gpu) for gpu in find(nvml, "0,1").present] == [
        "GPU 0  Simulated 0  1.0 of 40.0 GiB free  used by nobody",
        f"GPU 1  Simulated 1  30.0 of 40.0 GiB free  used by {owner(os.getpid())}",
        "GPU 2  Simulated 2  inf of inf GiB free  used by nobody",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_i_is_the_gpu_that_nvml_names() -> None:
    visible = find_gpus(os.environ).visible
    assert len(visible) == torch.cuda.device_count() > 0
    for index, gpu in enumerate(visible):
        assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(index).uuid}"


# Locks


def hold(name: str) -> Callable[[Connection], None]:
    """Return a function for child(): it takes the lock `name`, sends whether that succeeded, and keeps the lock."""

    def work(pipe: Connection) -> None:
        lock = take_lock(name)
        pipe.send(lock is not None)
        time.sleep(60)

    return work


@pytest.fixture
def name() -> str:
    return f"GPU-test-{token_hex(8)}"


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
def test_one_process_at_a_time_holds_a_lock_whoever_runs_it(uid: int, name: str) -> None:
    with child(hold(name), uid) as (_, pipe), child(hold(f"{name}0"), uid) as (_, other):
        assert receive(pipe) and receive(other), "two GPUs have two locks"
        assert take_lock(name) is None
    own = take_lock(name)  # the holder was killed
    assert own is not None
    with child(hold(name), uid) as (_, pipe):
        assert not receive(pipe)
    own.close()
    with child(hold(name), uid) as (_, pipe):
        assert receive(pipe)


def test_gpus_without_uuid_are_not_locked() -> None:
    first, second = take_lock(""), take_lock("")
    assert first is not None and second is not None
    first.close()
    second.close()

"""Tests of how device_ids become devices, on simulated GPUs. The runs that compete for them are real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
import torch.distributed as dist
from shared_server import (
    IS_ROOT,
    NOBODY,
    OWN_USER,
    SimulatedNvml,
    child,
    receive,
    someone_elses_process,
)

from template_package.config import LaunchConfig, load_config
from template_package.errors import ConfigError
from template_package.launching import devices as module
from template_package.launching import launcher
from template_package.launching.devices import Devices, find_gpus, owner, take_devices, take_lock
from template_package.launching.environment import Launched

ROOT = Path(__file__).parents[2]
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="locks, and processes' owners, are Linux's"
)
OWN = owner(os.getpid())


def take(
    device_ids: Any,
    nvml: SimulatedNvml | None,
    mask: str | None = None,
    num_ranks: int = 0,
    **launch: Any,
) -> Devices:
    environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return take_devices(device_ids, LaunchConfig(**launch), environment, num_ranks, nvml)


def names(
    device_ids: Any, nvml: SimulatedNvml | None, mask: str | None = None, **options: Any
) -> list[str]:
    """Return the names of the devices that a run would take, and release their locks."""
    devices = take(device_ids, nvml, mask, **options)
    for lock in devices.locks:
        lock.close()
    return devices.names


def refusal(
    device_ids: Any, nvml: SimulatedNvml | None, mask: str | None = None, **options: Any
) -> str:
    try:
        take(device_ids, nvml, mask, **options)
    # pytest.raises() would keep the caller's locks until the next garbage collection
    except ConfigError as error:
        return str(error)
    pytest.fail("not refused")


def states(lines: list[str]) -> list[str]:
    """Return the last column of the table of GPUs: the state of each GPU."""
    return [re.split("  +", line)[-1] for line in lines if line.startswith("GPU ")]


def is_locked(nvml: SimulatedNvml, index: int) -> bool:
    lock = take_lock(nvml.nvmlDeviceGetUUID(index))
    if lock is not None:
        lock.close()
    return lock is None


@contextmanager
def another_run(
    device_ids: Any, nvml: SimulatedNvml, uid: int = OWN_USER, **launch: Any
) -> Iterator[int]:
    """Start a run that takes its devices and keeps them during the `with` body. Yield its process id."""

    def work(pipe: Connection) -> None:
        kept = take(device_ids, nvml, **launch)
        pipe.send(kept.names)
        time.sleep(60)

    with child(work, uid) as (pid, pipe):
        receive(pipe)
        yield pid


@pytest.mark.parametrize(("device_ids", "num_ranks"), [("cpu", 1), (["cpu", "cpu"], 2)])
def test_cpu_ranks_ask_no_driver(device_ids: Any, num_ranks: int) -> None:
    no_nvml = object()
    assert take_devices(device_ids, LaunchConfig(), {}, nvml=no_nvml) == Devices(
        ["cpu"] * num_ranks, [], ()
    )


def test_the_gpu_of_a_mac_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert names("mps", None) == names("auto", None) == ["mps"]
    assert names("auto", None, num_ranks=2) == ["cpu", "cpu"]  # of torchrun


@pytest.mark.parametrize(
    ("mask", "device_ids", "devices"),
    [
        (None, [0, 2], ["cuda:0", "cuda:2"]),
        (None, [2, 0], ["cuda:2", "cuda:0"]),
        ("2,0", [0, 2], ["cuda:1", "cuda:0"]),
        ("0, 3 ,2", [2, 3], ["cuda:2", "cuda:1"]),
        ("GPU-d,GPU-b1234567-89ab", [1, 3], ["cuda:1", "cuda:0"]),
        ("3,-1,1", [3], ["cuda:0"]),
        (None, [1, 1], ["cuda:1", "cuda:1"]),
    ],
)
def test_physical_ids_become_places_in_the_mask(
    mask: str | None, device_ids: list[int], devices: list[str]
) -> None:
    assert names(device_ids, SimulatedNvml(9, 9, 9, 9), mask) == devices


def test_missing_gpu_is_refused_with_those_that_exist() -> None:
    assert refusal([0, 7], SimulatedNvml(9, 9)) == (
        "device_ids=[0, 7]: GPU 7 does not exist; driver and CUDA_VISIBLE_DEVICES show [0, 1]. "
        "Set device_ids=cpu,cpu or auto."
    )
    four = SimulatedNvml(9, 9, 9, 9)
    hidden = refusal([3, 1, 2], four, "3,2")
    assert (
        "GPU 1 does not exist; driver and CUDA_VISIBLE_DEVICES show [3, 2]. Set device_ids=cpu,cpu or auto"
        in hidden
    )
    assert "CUDA_VISIBLE_DEVICES show none. Set device_ids=cpu,cpu or auto" in refusal(
        [0], four, ""
    )


def test_auto_takes_every_visible_gpu_with_enough_free_memory() -> None:
    nvml = SimulatedNvml(1.9, 30, 2.0, 0)
    assert names("auto", nvml) == ["cuda:1", "cuda:2"]
    assert names("auto", nvml, "0,2,3") == ["cuda:1"]
    assert names("auto", nvml, min_free_memory_gib=20.0) == ["cuda:1"]
    assert names("auto", nvml, min_free_memory_gib=0.0) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    # memory that cannot be read is not short
    assert names("auto", SimulatedNvml(-1, -1)) == [
        "cuda:0",
        "cuda:1",
    ]


def test_auto_n_takes_those_with_the_most_free_memory() -> None:
    nvml = SimulatedNvml(10, 30, 5, 20)
    assert names("auto:2", nvml) == ["cuda:1", "cuda:3"]
    assert names("auto:3", nvml) == ["cuda:0", "cuda:1", "cuda:3"]
    assert names("auto:2", nvml, "3,2,0") == ["cuda:0", "cuda:2"]
    assert names("auto", nvml, num_ranks=2) == ["cuda:1", "cuda:3"], (
        "as many as a launcher has started ranks"
    )


def test_auto_goes_to_the_cpu_only_if_no_gpu_can_be_taken() -> None:
    full = SimulatedNvml(1, 1)
    devices = take("auto", full)
    assert devices.names == ["cpu"] and not devices.locks
    assert devices.notes[0] == "no GPU can be taken: computing on the CPU"
    assert states(devices.notes) == ["below launch.min_free_memory_gib=2"] * 2
    assert names("auto", SimulatedNvml()) == ["cpu"]
    assert names("auto", SimulatedNvml(9), "") == ["cpu"]
    assert names("auto", full, num_ranks=2) == ["cpu", "cpu"]
    assert "found 1 of 2" in refusal("auto", SimulatedNvml(1, 9), num_ranks=2)
    assert "found 0 of 2" in refusal("auto:1", full)
    if not torch.cuda.is_available():  # torch is asked where NVML does not answer
        mismatch = SimulatedNvml(9, init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        assert "version mismatch" in take("auto", mismatch).notes[1]
        assert "version mismatch" in refusal("auto:1", mismatch)


@needs_linux
def test_auto_leaves_other_users_gpus_alone_but_not_ones_own() -> None:
    nvml, theirs = SimulatedNvml(30, 10, 20, 5), "another user computes there"
    with someone_elses_process() as (pid, other):
        # the last cannot be seen
        nvml.processes = {
            0: [os.getpid(), pid],
            1: [os.getpid()],
            2: [2**22 + 1],
        }
        devices = take("auto", nvml)
        assert devices.names == ["cuda:1", "cuda:3"]
        assert states(devices.notes) == [theirs, "-> cuda:1", theirs, "-> cuda:3"]
        for note, users in zip(
            devices.notes,
            [", ".join(sorted([OWN, other])), OWN, "a process that cannot be seen"],
            strict=False,
        ):
            assert f"  used by {users}  " in note
        assert names("auto:2", nvml, share_gpus=True) == ["cuda:0", "cuda:2"]
        assert names([0, 2], nvml) == ["cuda:0", "cuda:2"]  # who names them means them


def test_lost_gpu_costs_no_other() -> None:
    nvml = SimulatedNvml(9, 9, 9, broken=1)
    assert "GPU 1 does not exist" in refusal([1], nvml)
    devices = take("auto", nvml)
    assert devices.names == ["cuda:0", "cuda:1"] and devices.notes[0] == "GPU 1: GPU is lost"
    assert states(devices.notes[1:]) == ["-> cuda:0", "-> cuda:1"]


def test_log_maps_physical_ids_to_cuda_and_says_why_others_are_left_out() -> None:
    nvml = SimulatedNvml(30, 1, 20, 10)
    hidden = "hidden by CUDA_VISIBLE_DEVICES"
    short = "below launch.min_free_memory_gib=2"
    assert states(take("auto", nvml, "3,1,2").notes) == [hidden, short, "-> cuda:2", "-> cuda:0"]
    assert states(take("auto:1", nvml, "3,1,2").notes) == [hidden, short, "-> cuda:2", "free"]
    assert states(take([3], nvml, "3,1,2").notes) == [hidden, short, "free", "-> cuda:0"]


@needs_linux
def test_too_few_gpus_are_refused_with_a_table_of_all_and_remedies() -> None:
    nvml = SimulatedNvml(1, 30, 5, 20, 10)
    with another_run([4], nvml), someone_elses_process() as (foreign_pid, _):
        nvml.processes = {3: [foreign_pid]}
        first, *table = refusal("auto:2", nvml, "0,1,3,4").splitlines()
        assert first == (
            "device_ids=auto:2: must find 2 GPUs that can be taken, and found 1 of 4. "
            "Ask for fewer, wait (launch.wait_minutes=30), share (launch.share_gpus=true), or set device_ids=cpu,cpu."
        )
        assert states(table) == [
            "below launch.min_free_memory_gib=2",
            "free",
            "hidden by CUDA_VISIBLE_DEVICES",
            "another user computes there",
            "another run uses it",
        ]
        assert names("auto:2", nvml, share_gpus=True) == ["cuda:1", "cuda:3"]
    assert names("auto:2", nvml) == ["cuda:1", "cuda:4"]
    assert "found 0 of 0. Ask for fewer, wait" in refusal("auto:2", SimulatedNvml())


@needs_linux
@pytest.mark.filterwarnings("error")  # a lock that is left to the garbage collector
def test_gpus_of_other_runs_are_left_alone_until_they_end() -> None:
    nvml = SimulatedNvml(9, 9, 9)
    with another_run([1, 1], nvml, share_gpus=True):  # whoever shares takes what locks there are
        assert [is_locked(nvml, index) for index in range(3)] == [False, True, False]
        assert names("auto", nvml) == ["cuda:0", "cuda:2"]
        assert "found 2 of 3" in refusal("auto:3", nvml)
        # a refusal keeps nothing
        assert [is_locked(nvml, index) for index in range(3)] == [
            False,
            True,
            False,
        ]
        assert names("auto:3", nvml, share_gpus=True) == ["cuda:0", "cuda:1", "cuda:2"]
    assert names("auto", nvml) == ["cuda:0", "cuda:1", "cuda:2"]


@needs_linux
def test_named_gpu_of_another_run_is_used_too_with_a_warning() -> None:
    nvml = SimulatedNvml(9, 9, 9)
    with another_run("auto:1", nvml):
        devices = take([0, 1, 1], nvml)
        assert devices.names == ["cuda:0", "cuda:1", "cuda:1"]
        assert states(devices.notes) == ["-> cuda:0, another run uses it too", "-> cuda:1", "free"]
        assert [is_locked(nvml, index) for index in range(3)] == [True, True, False]
    # The first run has ended, and the second one still computes on both.
    assert names("auto", nvml) == ["cuda:2"] and "found 1 of 3" in refusal("auto:2", nvml)
    for lock in devices.locks:
        lock.close()
    assert names("auto", nvml) == ["cuda:0", "cuda:1", "cuda:2"]


@needs_linux
@pytest.mark.parametrize(
    ("device_ids", "num_runs", "num_lucky"), [("auto:1", 8, 4), ("auto:3", 3, 1), ("auto", 3, 1)]
)
def test_runs_started_at_once_by_two_users_share_no_gpu(
    device_ids: str, num_runs: int, num_lucky: int
) -> None:
    nvml = SimulatedNvml(9, 9, 9, 9)

    def take_lock_slowly(name: str) -> socket.socket | None:
        time.sleep(0.002)
        return take_lock(name)

    def work(pipe: Connection) -> None:
        module.take_lock = take_lock_slowly  # so that the runs do meet
        pipe.recv()
        try:
            devices = take(device_ids, nvml)
        except ConfigError:
            devices = Devices([], [])
        pipe.send([name for name in devices.names if name != "cpu"])
        pipe.recv()  # keeps the locks

    uids = [NOBODY if IS_ROOT and run % 2 else OWN_USER for run in range(num_runs)]
    for _ in range(3):
        with ExitStack() as stack:
            pipes = [stack.enter_context(child(work, uid))[1] for uid in uids]
            for pipe in pipes:
                pipe.send("go")
            taken = [names for pipe in pipes if (names := receive(pipe))]
        together = [name for names in taken for name in names]
        assert len(taken) == num_lucky and len(set(together)) == len(together), taken


@needs_linux
def test_process_that_is_halted_while_it_chooses_does_not_hold_up_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(pipe: Connection) -> None:
        # tests of other processes take it for milliseconds
        while (chooser := take_lock("chooser")) is None:
            time.sleep(0.001)
        pipe.send("chooses")
        with chooser:
            os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(module, "CHOOSER_SECONDS", 0.3)
    nvml = SimulatedNvml(9)
    with child(work) as (pid, pipe):
        receive(pipe)
        assert refusal("auto", nvml).startswith(
            "device_ids: another run has been choosing for 0.3 s: is it suspended"
        )
        monkeypatch.setattr(module, "CHOOSER_SECONDS", 20.0)
        os.kill(pid, signal.SIGCONT)
        assert names("auto", nvml) == ["cuda:0"]


@needs_linux
def test_wait_goes_on_when_enough_gpus_are_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    nvml = SimulatedNvml(9, 1, 9)
    with ExitStack() as run:
        run.enter_context(another_run([2], nvml))

        def let_go() -> None:
            time.sleep(0.2)
            run.close()
            time.sleep(0.2)
            nvml.free_gib[1] = 9

        helper = threading.Thread(target=let_go)
        helper.start()
        begin = time.monotonic()
        devices = take("auto:3", nvml, wait_minutes=1)
        helper.join()
    assert 0.4 <= time.monotonic() - begin < 10
    assert devices.names == ["cuda:0", "cuda:1", "cuda:2"] and len(devices.locks) == 3
    first, *table = capsys.readouterr().err.splitlines()
    assert first == "device_ids=auto:3: must find 3 GPUs that can be taken: waiting"
    assert states(table)[:2] == ["free", "below launch.min_free_memory_gib=2"]
    assert len(table) == 3 and "another run uses it" in table[2]


def test_wait_in_vain_is_an_error_even_if_the_cpu_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    for num_ranks in (0, 2):
        nvml, begin = SimulatedNvml(1, 1), time.monotonic()
        text = refusal("auto", nvml, wait_minutes=0.003, num_ranks=num_ranks)
        assert "found 0 of 2." in text
        assert time.monotonic() - begin >= 0.18 and 2 <= nvml.num_reads <= 5


def test_no_wait_for_what_cannot_come(capsys: pytest.CaptureFixture[str]) -> None:
    refusal("auto:3", SimulatedNvml(9, 9), wait_minutes=30)
    assert names("auto", SimulatedNvml(), wait_minutes=30) == ["cpu"]
    assert names("auto", SimulatedNvml(9, 1), wait_minutes=30) == ["cuda:0"]
    assert capsys.readouterr().err == ""


# GPUs that this torch cannot use


def test_driver_that_is_too_old_for_torch_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvml = SimulatedNvml(9, 9)
    assert names("auto", nvml) == ["cuda:0", "cuda:1"]
    nvml.driver_version = 12_020
    for device_ids in ("auto", "auto:2", [0]):
        message = refusal(device_ids, nvml)
        assert (
            "is built for CUDA 13.0, and this driver ends at CUDA 12" in message
            and message.count("\n") == 0
        )
        same = torch.__version__.partition("+")[0]
        assert message.endswith(f"torch=={same} --index-url https://download.pytorch.org/whl/cu126")


def test_driver_that_does_not_tell_its_version_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = SimulatedNvml(9)

    def refuse() -> int:  # in a container that has the driver's tools, but not its CUDA library
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(nvml, "nvmlSystemGetCudaDriverVersion_v2", refuse)
    assert find_gpus({}, nvml).problem.startswith("NVML: ")


def test_old_card_beside_others_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch._C, "_cuda_getArchFlags", lambda: "sm_75 sm_80 sm_90 compute_90", raising=False
    )
    nvml, problem = (
        SimulatedNvml(9, 9, 9),
        "has compute capability 6.1, for which this torch has no kernels",
    )
    nvml.capabilities = {1: (6, 1), 2: (7, 5)}
    devices = take("auto", nvml)
    assert devices.names == ["cuda:0", "cuda:2"] and states(devices.notes)[1] == problem
    assert f"GPU 1 {problem}" in refusal([0, 1], nvml)


def test_one_slice_of_a_gpu_is_one_device() -> None:
    mask = "MIG-1a2b,MIG-3c4d"  # CUDA shows the first alone
    assert (
        names("auto", SimulatedNvml(9, 9), mask)
        == names([0], SimulatedNvml(9, 9), mask)
        == ["cuda:0"]
    )


def test_local_ranks_that_see_a_gpu_each_take_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test imitates `srun --gpus-per-task=1`, where local rank 0 does not see the GPUs of the other local ranks."""
    store, nvml, config = dist.HashStore(), SimulatedNvml(9, 9), load_config(ROOT / "config.yaml")
    monkeypatch.setattr(module, "find_gpus", lambda environment, _: find_gpus(environment, nvml))
    monkeypatch.setattr(launcher, "find_gpus", lambda environment: find_gpus(environment, nvml))
    monkeypatch.setattr(launcher.processes, "die_with_parent", lambda: None)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: store)
    nodes: dict[int, launcher.Node] = {}

    def join(rank: int) -> None:
        launched = Launched("srun", rank, 2, rank, 2, 0, "127.0.0.1", 29500)
        nodes[rank] = launcher._join(config, launched, {"CUDA_VISIBLE_DEVICES": str(rank)})

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [nodes[rank].devices.names[rank] for rank in range(2)] == ["cuda:0", "cuda:0"]
    locks = [lock.getsockname() for rank in range(2) for lock in nodes[rank].devices.locks]
    assert len(set(locks)) == 2, "of two GPUs"
    for rank in range(2):
        for lock in nodes[rank].devices.locks:
            lock.close()

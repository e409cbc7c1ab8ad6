"""Tests of how device_ids become devices, on simulated GPUs. The runs that compete for them are real processes."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from shared_server import (
    IS_ROOT,
    NOBODY,
    OWN_USER,
    SimulatedNvml,
    child,
    choice,
    driver,
    needs_linux,
    receive,
    someone_elses_process,
)

from template_package.core import launch
from template_package.core.launch import Devices
from template_package.core.settings import CommandLine
from template_package.errors import ConfigError
from template_package.launchers import adopt

from conftest import ROOT


def places(devices: Devices, nvml: SimulatedNvml) -> list[Any]:
    """Return the index of the GPU that each rank computes on, as nvidia-smi shows it, or "cpu"."""
    uuids = [nvml.nvmlDeviceGetUUID(index) for index in range(len(nvml.free_gib))]
    visible = [uuids.index(uuid) for uuid in filter(None, devices.visible.split(","))]
    return [name if name == "cpu" else visible[int(name[5:])] for name in devices.names]


def chosen(
    device_ids: Any, nvml: SimulatedNvml, mask: str | None = None, **options: Any
) -> list[Any]:
    """Return the places of a run that would start now, and release its locks."""
    with choice(device_ids, nvml, mask, **options) as devices:
        return places(devices, nvml)


def refusal(device_ids: Any, nvml: SimulatedNvml, mask: str | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as error, choice(device_ids, nvml, mask, **options):
        pass
    return str(error.value)


def locked(nvml: SimulatedNvml) -> list[int]:
    """Return the indexes of the GPUs that some run has locked."""
    locks = [launch.lock(nvml.nvmlDeviceGetUUID(index)) for index in range(len(nvml.free_gib))]
    for lock in filter(None, locks):
        lock.close()
    return [index for index, lock in enumerate(locks) if lock is None]


@contextmanager
def another_run(device_ids: Any, nvml: SimulatedNvml, **options: Any) -> Iterator[None]:
    """Start a run that chooses its devices and keeps them during the `with` body."""

    def work(pipe: Connection) -> None:
        with choice(device_ids, nvml, **options) as devices:
            pipe.send(devices)
            time.sleep(60)

    with child(work) as (_, pipe):
        receive(pipe)
        yield


@pytest.mark.parametrize(
    ("device_ids", "names"), [("cpu", ["cpu"]), (["cpu", "cpu"], ["cpu"] * 2), ("mps", ["mps"])]
)
def test_other_devices_ask_no_driver(device_ids: Any, names: list[str]) -> None:
    nvml = SimulatedNvml(9)
    with choice(device_ids, nvml) as devices:
        assert devices == Devices(names, "") and nvml.num_reads == 0


@pytest.mark.parametrize(
    ("mask", "device_ids", "names", "visible"),
    [
        (None, [0, 2], ["cuda:0", "cuda:1"], [0, 2]),
        (None, [2, 0], ["cuda:0", "cuda:1"], [2, 0]),
        ("2,0", [0, 2], ["cuda:0", "cuda:1"], [0, 2]),
        ("0, 3 ,2", [3], ["cuda:0"], [3]),
    ],
)
def test_named_gpus_alone_are_visible_in_the_order_of_the_ranks(
    mask: str | None, device_ids: list[int], names: list[str], visible: list[int]
) -> None:
    nvml = SimulatedNvml(9, 9, 9, 9)
    uuids = ",".join(map(nvml.nvmlDeviceGetUUID, visible))
    with choice(device_ids, nvml, mask) as devices:
        assert devices == Devices(names, uuids)
        # what a process that sees them alone chooses anew, as a run of a sweep does
        assert chosen("auto", nvml, uuids, share_gpus=True) == sorted(visible)


def test_two_ranks_share_a_gpu_only_with_gloo() -> None:
    nvml = SimulatedNvml(9, 9)
    assert chosen([1, 1], nvml, backend="gloo") == [1, 1]
    assert refusal("1,1", nvml) == (
        "device_ids=[1, 1]: only gloo runs two ranks on one GPU. "
        "Name each once or set launch.backend=gloo."
    )


def test_missing_gpu_is_refused_with_those_that_exist() -> None:
    assert refusal([0, 7], SimulatedNvml(9, 9)) == (
        "device_ids=[0, 7]: GPU 7 does not exist; driver and CUDA_VISIBLE_DEVICES show [0, 1]. "
        "Set device_ids=cpu,cpu or auto."
    )
    four, show = SimulatedNvml(9, 9, 9, 9), "does not exist; driver and CUDA_VISIBLE_DEVICES show"
    assert f"GPU 1 {show} [3, 2]. Set" in refusal([3, 1, 2], four, "3,2")
    assert f"GPU 0 {show} none. Set" in refusal([0], four, "")


def test_auto_takes_every_visible_gpu_with_enough_free_memory() -> None:
    nvml = SimulatedNvml(1.9, 30, 2.0, 0)
    assert chosen("auto", nvml) == [1, 2]
    assert chosen("auto", nvml, "0,2,3") == [2]
    assert chosen("auto", nvml, min_free_memory_gib=20.0) == [1]
    assert chosen("auto", nvml, min_free_memory_gib=0.0) == [0, 1, 2, 3]
    assert chosen("auto", SimulatedNvml(-1, -1)) == [0, 1], "memory that cannot be read"


def test_auto_n_takes_those_with_the_most_free_memory() -> None:
    nvml = SimulatedNvml(10, 30, 5, 20)
    assert chosen("auto:2", nvml) == [1, 3]
    assert chosen("auto:3", nvml) == [0, 1, 3]
    assert chosen("auto:2", nvml, "3,2,0") == [0, 3]
    assert chosen("auto", nvml, num_ranks=2) == [1, 3], "as many as a launcher has started ranks"


def test_auto_goes_to_the_cpu_only_if_no_gpu_can_be_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = SimulatedNvml(1, 1)
    assert chosen("auto", full) == ["cpu"]
    assert capsys.readouterr().out.startswith(
        "found 0 of 2 GPUs that others leave free: computing on the CPU. Wait, share (launch.share"
    )
    assert chosen("auto", SimulatedNvml()) == chosen("auto", SimulatedNvml(9), "") == ["cpu"]
    assert capsys.readouterr().out == "", "no GPU is missed where none is"
    assert chosen("auto", full, num_ranks=2) == ["cpu", "cpu"]
    assert "2 are needed, and found 1 of 2 GPUs" in refusal(
        "auto", SimulatedNvml(1, 9), num_ranks=2
    )
    assert "1 are needed, and found 0 of 2 GPUs" in refusal("auto:1", full)


def test_gpus_without_nvml_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimulatedNvml(9, init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert chosen("auto", nvml) == ["cpu"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with choice("auto", nvml) as devices, choice([1], nvml) as named:
        assert devices == Devices(["cuda:0", "cuda:1"], "0,1") and named == Devices(
            ["cuda:1"], "0,1"
        )


def test_mask_stays_where_torch_alone_counts_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimulatedNvml(9, init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # of those that the mask shows
    with choice("auto", nvml, "2,3") as devices:
        assert devices == Devices(["cuda:0", "cuda:1"], "2,3")


@needs_linux
def test_auto_leaves_other_users_gpus_alone_but_not_ones_own() -> None:
    nvml = SimulatedNvml(30, 10, 20, 5)
    with someone_elses_process() as (pid, _):
        # the last cannot be seen
        nvml.processes = {0: [os.getpid(), pid], 1: [os.getpid()], 2: [2**22 + 1]}
        assert chosen("auto", nvml) == [1, 3]
        assert chosen("auto:2", nvml, share_gpus=True) == [0, 2]
        assert chosen("auto:2", nvml, share_gpus="yes") == [0, 2]
        assert chosen([0, 2], nvml) == [0, 2]  # who names them means them
        assert "found 2 of 4" in refusal("auto:3", nvml)


def test_lost_gpu_costs_no_other() -> None:
    nvml = SimulatedNvml(9, 1, 9, 9, broken=3)
    assert "GPU 3 does not exist" in refusal([3], nvml)
    assert chosen("auto", nvml) == [0, 2]


def test_log_maps_physical_ids_to_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    chosen([3, 1], SimulatedNvml(9, 9, 9, 9), "1,2,3")
    chosen([2, 2], SimulatedNvml(9, 9, 9), backend="gloo")
    assert capsys.readouterr().out == "GPU 3 -> cuda:0\nGPU 1 -> cuda:1\nGPU 2 -> cuda:0\n"


@needs_linux
def test_too_few_gpus_are_refused_with_remedies() -> None:
    nvml = SimulatedNvml(1, 30, 5, 20, 10)
    with another_run([4], nvml), someone_elses_process() as (foreign_pid, _):
        nvml.processes = {3: [foreign_pid]}
        assert refusal("auto:2", nvml, "0,1,3,4") == (
            "device_ids=auto:2: 2 are needed, and found 1 of 4 GPUs that others leave free. Wait, share "
            "(launch.share_gpus=true), lower launch.min_free_memory_gib, or set device_ids=cpu,cpu."
        )
        assert chosen("auto:2", nvml, share_gpus=True) == [1, 3]
    assert chosen("auto:2", nvml) == [1, 4]
    assert "found 0 of 0 GPUs" in refusal("auto:2", SimulatedNvml())


@needs_linux
@pytest.mark.filterwarnings("error")  # a lock that is left to the garbage collector
def test_gpus_of_other_runs_are_left_alone_until_they_end() -> None:
    nvml = SimulatedNvml(9, 9, 9)
    with another_run("auto:1", nvml, share_gpus=True):  # whoever shares takes what locks there are
        assert locked(nvml) == [0] and chosen("auto", nvml) == [1, 2]
        assert "found 2 of 3" in refusal("auto:3", nvml)
        assert locked(nvml) == [0], "a refusal keeps nothing"
        with choice("auto:3", nvml, share_gpus=True) as devices:
            assert places(devices, nvml) == locked(nvml) == [0, 1, 2]
    with choice("auto:2", nvml) as devices:
        assert places(devices, nvml) == locked(nvml) == [0, 1], "those that are not taken stay free"


@needs_linux
def test_named_gpu_of_another_run_is_used_too() -> None:
    nvml = SimulatedNvml(9, 9, 9)
    with another_run("auto:1", nvml), choice([0, 1], nvml) as devices:
        assert places(devices, nvml) == locked(nvml) == [0, 1]
        assert chosen("auto", nvml) == [2] and "found 1 of 3" in refusal("auto:2", nvml)
    assert chosen("auto", nvml) == [0, 1, 2]


@needs_linux
@pytest.mark.parametrize(
    ("device_ids", "num_runs", "num_lucky"), [("auto:1", 8, 4), ("auto:3", 3, 1), ("auto", 3, 1)]
)
def test_runs_started_at_once_by_two_users_share_no_gpu(
    device_ids: str, num_runs: int, num_lucky: int
) -> None:
    nvml, take_lock = SimulatedNvml(9, 9, 9, 9), launch.lock

    def take_lock_slowly(name: str) -> Any:
        time.sleep(secrets.randbelow(10) / 500)  # now one run is ahead, now another
        return take_lock(name)

    def work(pipe: Connection) -> None:
        launch.lock = take_lock_slowly  # so that the runs do meet
        pipe.recv()
        with suppress(ConfigError), choice(device_ids, nvml) as devices:
            pipe.send([place for place in places(devices, nvml) if place != "cpu"])
            pipe.recv()  # keeps the locks
        pipe.send([])
        pipe.recv()

    uids = [NOBODY if IS_ROOT and run % 2 else OWN_USER for run in range(num_runs)]
    for _ in range(3):
        with ExitStack() as stack:
            pipes = [stack.enter_context(child(work, uid))[1] for uid in uids]
            for pipe in pipes:
                pipe.send("go")
            taken = [found for pipe in pipes if (found := receive(pipe))]
        together = [*itertools.chain(*taken)]
        assert len(taken) == num_lucky and len(set(together)) == len(together), taken


@needs_linux
def test_run_that_is_halted_while_it_chooses_does_not_hold_up_others_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_lock, clock, pauses = launch.lock, itertools.count(), list[float]()
    monkeypatch.setattr(launch, "lock", lambda name: None if name == "chooser" else take_lock(name))
    monkeypatch.setattr(
        launch, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=pauses.append)
    )
    assert chosen("auto", SimulatedNvml(9, 1)) == [0]
    assert len(pauses) >= 5, "it does wait for a run that is only slow"


# launch.wait_minutes


def pass_time(monkeypatch: pytest.MonkeyPatch, *events: Any) -> list[float]:
    """Make time pass at once: each pause is put into the list, moves the clock, and calls the next of `events`."""
    pauses, coming = list[float](), iter(events)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        next(coming, lambda: None)()

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=sleep))
    return pauses


@needs_linux
def test_wait_goes_on_when_enough_gpus_are_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = SimulatedNvml(9, 1, 9)

    def free_memory() -> None:
        assert locked(nvml) == [], "while a run waits, others may take what it found"
        nvml.free_gib[1] = 9

    with ExitStack() as run:
        run.enter_context(another_run([2], nvml))
        pauses = pass_time(monkeypatch, run.close, free_memory)
        with choice("auto:3", nvml, wait_minutes=30) as devices:
            assert places(devices, nvml) == locked(nvml) == [0, 1, 2]
    assert pauses == [5, 5]
    told = "device_ids=auto:3: waiting for 3 of 3 GPUs\n"
    assert capsys.readouterr().out.startswith(told + "GPU 0 -> cuda:0\n")


@pytest.mark.parametrize(("minutes", "num_pauses"), [(0.003, 1), (0.25, 3)])
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_wait_in_vain_is_an_error_even_if_the_cpu_would_do(
    monkeypatch: pytest.MonkeyPatch, minutes: float, num_pauses: int, num_ranks: int
) -> None:
    pauses, nvml = pass_time(monkeypatch), SimulatedNvml(1, 1)
    text = refusal("auto", nvml, wait_minutes=minutes, num_ranks=num_ranks)
    assert "found 0 of 2 GPUs" in text and nvml.num_reads == 1 + num_pauses
    assert len(pauses) == num_pauses and sum(pauses) == pytest.approx(60 * minutes)


def test_no_wait_for_what_cannot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = pass_time(monkeypatch)
    assert "found 2 of 2" in refusal("auto:3", SimulatedNvml(9, 9), wait_minutes=30)
    assert chosen("auto", SimulatedNvml(9, 1), wait_minutes=30) == [0]
    assert pauses == []


def test_machine_without_gpus_computes_on_the_cpu_whatever_it_would_wait() -> None:
    assert chosen("auto", SimulatedNvml(), wait_minutes=30) == ["cpu"]


# Under SLURM


def test_local_ranks_that_see_a_gpu_each_take_their_own() -> None:
    """The test imitates `srun --gpus-per-task=1`, where local rank 0 does not see the GPUs of the other local ranks."""
    task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    line, found = CommandLine(ROOT / "config.yaml", words=["device_ids=auto"]), []
    for rank, mask in (("0", "0"), ("1", "1"), ("0", None)):
        with driver(SimulatedNvml(9, 9), mask) as patch:
            own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            patch.setattr(os, "environ", {**os.environ, **task, **own})
            assert adopt(line) and os.environ["LOCAL_RANK"] == rank
            found.append(json.loads(os.environ.get(launch.DEVICES, "null")))
            assert os.environ.get("CUDA_VISIBLE_DEVICES") == mask
    assert found == [["cuda:0", "cuda:0"]] * 2 + [None], (
        "with a mask each has one, at the same place"
    )

"""What is read of the GPUs, from a simulated NVML and, where there is one, the machine's own."""

from __future__ import annotations

import inspect
import os
import sys

import pynvml
import pytest
import torch
from shared_server import OWN_USER, SimulatedNvml, someone_elses_process

from template_package.launching.gpus import UNSEEN, Gpus, find_gpus, gpu_table, user_name

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes' owners are read from /proc")


def find(nvml: SimulatedNvml | None, mask: str | None = None) -> Gpus:
    return find_gpus({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}, nvml)


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
        ("1,2,1", []),
        ("1x, 2", [1, 2]),
        (" 3 , 0", [3, 0]),
        ("GPU-c,GPU-a", [2, 0]),
        ("GPU-,GPU-a", []),  # ambiguous
        ("GPU-c,GPU-c1", []),
        ("GPU-c,1", [2]),
        ("1,GPU-c", [1]),
    ],
)
def test_mask_is_read_as_cuda_reads_it(mask: str | None, visible: list[int]) -> None:
    assert [gpu.index for gpu in find(SimulatedNvml(9, 9, 9, 9), mask).visible] == visible


@needs_linux
def test_processes_are_named_by_their_owners() -> None:
    nvml, own = SimulatedNvml(9, 9, 9, 9), user_name(OWN_USER)
    beyond_all_ids = 2**22 + 1
    with someone_elses_process() as (pid, other):
        nvml.processes = {0: [os.getpid(), os.getpid()], 1: [os.getpid(), pid], 2: [beyond_all_ids]}
        gpus = find(nvml).present
    assert [gpu.users for gpu in gpus] == [(own,), tuple(sorted((own, other))), (UNSEEN,), ()]
    assert [gpu.other_users for gpu in gpus] == [(), (other,), (UNSEEN,), ()]


def test_user_without_a_name_is_a_number() -> None:
    assert user_name(0) == "root"
    assert user_name(3_999_999_999) == "uid 3999999999"


def test_gpu_that_answers_nothing_costs_no_other() -> None:
    gpus = find(SimulatedNvml(9, 9, 9, broken=1))
    assert [gpu.index for gpu in gpus.present] == [0, 2]
    assert gpus.problem == "GPU 1: GPU is lost"


def test_missing_gpus_have_a_reason() -> None:
    assert find(SimulatedNvml(9, 9), "").problem == "CUDA_VISIBLE_DEVICES= hides every GPU"
    if not torch.cuda.is_available():  # torch is asked where NVML does not answer
        mismatch = SimulatedNvml(9, init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        assert "version mismatch" in find(mismatch).problem and not find(mismatch).present
    if torch.version.cuda is None and torch.version.hip is None:
        assert "is built without CUDA" in find(None).problem


@needs_linux
def test_table_is_aligned_and_tells_all_of_each_gpu() -> None:
    nvml = SimulatedNvml(1, 30, -1)
    nvml.processes = {1: [os.getpid()]}
    gpus = find(nvml, "0,1")
    own = user_name(OWN_USER)
    no_user = " " * len(f"used by {own}")
    assert gpu_table(gpus, {gpus.present[0]: "free", gpus.present[1]: "-> cuda:1"}) == [
        f"GPU 0  Simulated 0    1.0 of 40.0 GiB free    0 % busy  {no_user}  free",
        f"GPU 1  Simulated 1   30.0 of 40.0 GiB free   10 % busy  used by {own}  -> cuda:1",
        f"GPU 2  Simulated 2                           20 % busy  {no_user}  hidden by CUDA_VISIBLE_DEVICES=0,1",
    ]
    assert gpu_table(find(SimulatedNvml()), {}) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_i_is_the_gpu_that_nvml_names() -> None:
    visible = find_gpus(os.environ).visible
    assert len(visible) == torch.cuda.device_count() > 0
    for place, gpu in enumerate(visible):
        assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(place).uuid}"

"""device_ids -> devices, with a simulated NVML: an object with pynvml's functions, in the place of the module."""
# ruff: noqa: N802 - the functions' names are pynvml's

import inspect
import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from template_package.config import LaunchConfig
from template_package.launching.devices import GIB, choose_devices, describe_devices, find_gpus
from template_package.validation import ConfigError


class SimulatedNvml:
    """GPUs with these GiB free of 40; `broken` maps an index to the error that NVML gives for it."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *free_gib: float, init_error: int = 0, mig: tuple[int, ...] = (), broken: int = -1) -> None:
        self.free_gib, self.init_error, self.mig, self.broken = free_gib, init_error, mig, broken

    def nvmlInit(self) -> None:
        if self.init_error:
            raise pynvml.NVMLError(self.init_error)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.free_gib)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abcdef'[handle]}1234567-89ab"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"Simulated {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.free_gib[handle] < 0:  # as on machines where GPU and CPU share their memory
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(free=int(self.free_gib[handle] * GIB), total=40 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=10 * handle, memory=0)

    def nvmlDeviceGetMigMode(self, device: int) -> list[int]:
        if not self.mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(device in self.mig)] * 2


def choose(device_ids: Any, nvml: SimulatedNvml | None, mask: str | None = None, **launch: Any) -> list[str]:
    environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return choose_devices(device_ids, LaunchConfig(**launch), environment, nvml)


def refusal(device_ids: Any, nvml: SimulatedNvml | None, mask: str | None = None, **launch: Any) -> str:
    with pytest.raises(ConfigError) as error:
        choose(device_ids, nvml, mask, **launch)
    return str(error.value)


def test_simulation_has_the_interface_of_pynvml() -> None:
    functions = [name for name in vars(SimulatedNvml) if name.startswith("nvml")]
    assert len(functions) == 8
    for name in functions:
        own = inspect.signature(getattr(SimulatedNvml(), name)).parameters
        real = inspect.signature(inspect.unwrap(getattr(pynvml, name))).parameters
        assert list(own) == list(real)[: len(own)], name


@pytest.mark.parametrize(("device_ids", "num_ranks"), [("cpu", 1), (["cpu", "cpu"], 2)])
def test_cpu_ranks_ask_no_driver(device_ids: Any, num_ranks: int) -> None:
    assert choose(device_ids, None) == ["cpu"] * num_ranks
    assert describe_devices(device_ids, ["cpu"] * num_ranks, LaunchConfig(), {}) == []


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
def test_physical_ids_become_places_in_the_mask(mask: str | None, device_ids: list[int], devices: list[str]) -> None:
    assert choose(device_ids, SimulatedNvml(9, 9, 9, 9), mask) == devices


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
        ("GPU-c,GPU-a", [2, 0]),
        ("GPU-,GPU-a", []),  # ambiguous
        ("GPU-c,GPU-c1", []),
        ("GPU-c,1", [2]),
        ("1,GPU-c", [1]),
    ],
)
def test_mask_is_read_as_cuda_reads_it(mask: str | None, visible: list[int]) -> None:
    environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    gpus = find_gpus(environment, SimulatedNvml(9, 9, 9, 9))
    assert [gpu.index for gpu in gpus.visible] == visible


def test_missing_gpu_is_refused_with_those_that_exist() -> None:
    assert refusal([0, 7], SimulatedNvml(9, 9)) == (
        "device_ids=[0, 7]: GPU 7 does not exist; this machine has [0, 1]. Use device_ids=auto or some of those."
    )
    assert "GPU 1 is hidden by CUDA_VISIBLE_DEVICES=3,2, which leaves [3, 2]" in refusal(
        [3, 1, 2], SimulatedNvml(9, 9, 9, 9), "3,2"
    )
    assert "Use device_ids=3,2." in refusal([0, 1], SimulatedNvml(9, 9, 9, 9), "3,2")  # counted as torch counts them


def test_no_gpu_is_refused_with_the_reason() -> None:
    assert "CUDA_VISIBLE_DEVICES= hides every GPU" in refusal([0], SimulatedNvml(9, 9), "")
    mismatch = SimulatedNvml(9, init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    if not torch.cuda.is_available():  # torch is asked where NVML does not answer
        assert "version mismatch" in refusal("auto:1", mismatch)
        assert "version mismatch" in refusal([0], mismatch)
        assert choose("auto", mismatch) == ["cpu"]
    if torch.version.cuda is None and torch.version.hip is None:
        assert "is built without CUDA" in refusal([0], None)


def test_auto_takes_every_visible_gpu_with_enough_free_memory() -> None:
    nvml = SimulatedNvml(1.9, 30, 2.0, 0)
    assert choose("auto", nvml) == ["cuda:1", "cuda:2"]
    assert choose("auto", nvml, "0,2,3") == ["cuda:1"]
    assert choose("auto", nvml, min_free_memory_gib=20.0) == ["cuda:1"]
    assert choose("auto", nvml, min_free_memory_gib=0.0) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert choose("auto", nvml, "0,3") == ["cpu"]
    assert choose("auto", SimulatedNvml()) == ["cpu"]
    assert choose("auto", SimulatedNvml(-1, -1)) == ["cuda:0", "cuda:1"]  # memory that cannot be read is not short


def test_auto_n_takes_those_with_the_most_free_memory() -> None:
    nvml = SimulatedNvml(10, 30, 5, 20)
    assert choose("auto:2", nvml) == ["cuda:1", "cuda:3"]
    assert choose("auto:3", nvml) == ["cuda:0", "cuda:1", "cuda:3"]
    assert choose("auto:2", nvml, "3,2,0") == ["cuda:0", "cuda:2"]


def test_too_few_gpus_are_refused_with_a_table_of_all_and_what_would_work() -> None:
    first, *table = refusal("auto:2", SimulatedNvml(1, 30, 5, 1.5), "0,1,3").splitlines()
    assert "Use device_ids=auto:1." in first
    assert table == [
        "GPU 0 below launch.min_free_memory_gib=2: Simulated 0, 1.0 of 40.0 GiB free, 0 % busy",
        "GPU 1 not taken: Simulated 1, 30.0 of 40.0 GiB free, 10 % busy",
        "GPU 2 hidden by CUDA_VISIBLE_DEVICES=0,1,3: Simulated 2, 5.0 of 40.0 GiB free, 20 % busy",
        "GPU 3 below launch.min_free_memory_gib=2: Simulated 3, 1.5 of 40.0 GiB free, 30 % busy",
    ]
    assert "Use device_ids=cpu." in refusal("auto:1", SimulatedNvml(1, 1))


def test_partitioned_gpu_is_refused_unless_the_mask_hides_it() -> None:
    nvml = SimulatedNvml(9, 9, 9, mig=(1,))
    assert "Set CUDA_VISIBLE_DEVICES=0,2" in refusal([0], nvml)
    assert "MIG" in refusal("auto", nvml)
    assert "MIG" in refusal("auto", nvml, "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f")
    assert choose("auto", nvml, "0,2") == ["cuda:0", "cuda:1"]


def test_lost_gpu_costs_no_other() -> None:
    nvml = SimulatedNvml(9, 9, 9, broken=1)
    assert "GPU 1 does not exist" in refusal([1], nvml)
    assert "GPU 1: GPU is lost" in describe_devices("auto", choose("auto", nvml), LaunchConfig(), {}, nvml)


def test_log_maps_physical_ids_to_cuda_and_says_why_others_are_left_out() -> None:
    nvml, environment = SimulatedNvml(30, 1, 20, 10), {"CUDA_VISIBLE_DEVICES": "3,1,2"}
    lines = describe_devices("auto", choose("auto", nvml, "3,1,2"), LaunchConfig(), environment, nvml)
    assert [line.partition(": Sim")[0] for line in lines] == [
        "GPU 0 hidden by CUDA_VISIBLE_DEVICES=3,1,2",
        "GPU 1 below launch.min_free_memory_gib=2",
        "GPU 2 -> cuda:2",
        "GPU 3 -> cuda:0",
    ]
    lines = describe_devices([2], ["cuda:2"], LaunchConfig(), environment, nvml)
    assert [line.partition(": Sim")[0] for line in lines[2:]] == ["GPU 2 -> cuda:2", "GPU 3 not taken"]
    lines = describe_devices("auto", ["cpu"], LaunchConfig(), {}, SimulatedNvml(1))
    assert lines[0] == "device_ids=auto: no GPU can be taken, one rank on the CPU" and "GPU 0 below" in lines[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_i_is_the_gpu_that_nvml_names() -> None:
    visible = find_gpus(os.environ).visible
    assert len(visible) == torch.cuda.device_count() > 0
    for place, gpu in enumerate(visible):
        assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(place).uuid}"

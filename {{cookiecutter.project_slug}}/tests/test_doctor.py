"""`run.py doctor` on a sound machine, and on machines with planted faults: each is named, with its remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from shared_server import SimulatedNvml

from template_package.commands import parse_command_line
from template_package.config import Config, load_config
from template_package.doctor.findings import Finding, Surroundings
from template_package.doctor.gpus import check_driver, check_memory
from template_package.doctor.links import measure_pairs

from conftest import ROOT, Project

UNSHARED = "unshare --map-root-user --uts --mount".split()


def consult(
    project: Project, *words: str, command: Sequence[str] = (sys.executable,), **variables: str
) -> tuple[int, str]:
    """Exit code and stdout. It, and all that it has started, must have ended: those would hold stderr open."""
    process = project.start("doctor", *words, command=command, **variables)
    try:
        output, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    print(output, errors)
    return process.returncode, output


def in_a_shell(lines: str) -> list[str]:
    """A command that does `lines` and then becomes Python."""
    return ["sh", "-ec", f'{lines}\nexec "$0" "$@"', sys.executable]


def line_of(check: str, output: str) -> str:
    (line,) = (line for line in output.splitlines() if line.partition(" ")[2].strip().startswith(f"{check}: "))
    return line


def test_sound_machine_passes_in_json_and_nothing_is_left(project: Project) -> None:
    project.edit("model.py", "import torch\n", "import torch\n\nprint('said by model.py')\n")
    shutil.copy(ROOT / "pyproject.toml", project.folder)
    before = sorted(project.folder.iterdir())
    code, output = consult(project, "--json")
    found = [Finding(**finding) for finding in json.loads(output)["checks"]]
    assert code == 0 and "broken" not in [finding.status for finding in found]
    assert [finding.check for finding in found if "GPU" not in finding.check] == (
        "python|libraries|hostname|disk|shared memory|open files|clock|torch|config|driver|devices|gloo".split("|")
    )
    details = {finding.check: finding.detail for finding in found}
    assert details["devices"] == "cpu" and "GiB/s" in details["gloo"] and "MiB/s" in details["disk"]
    assert details["torch"].endswith(", 2.13 or newer wanted")
    assert all(finding.remedy for finding in found if finding.status != "ok")
    assert sorted(path for path in project.folder.iterdir() if path.name != "__pycache__") == before


def test_faults_of_environment_and_limits_are_named(project: Project) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace('"torch>=', '"torch>=99.')
    (project.folder / "pyproject.toml").write_text(text, encoding="utf-8")
    (project.folder / "runs").write_text("a file", encoding="utf-8")
    variables = {"GLOO_SOCKET_IFNAME": "nosuch0", "CUDA_VISIBLE_DEVICES": ""}
    code, output = consult(project, "device_ids=0", command=in_a_shell("ulimit -Sn 200"), **variables)
    assert code == 1
    assert "99.2.13 or newer wanted. Type: python -m pip install -c constraints.txt torch" in line_of("torch", output)
    assert "runs cannot be written to: Not a directory. Make room, or let runs be" in line_of("disk", output)
    assert "GLOO_SOCKET_IFNAME=nosuch0" in line_of("gloo", output)
    assert line_of("gloo", output).endswith("Unable to find address for: nosuch0. Unset GLOO_SOCKET_IFNAME.")
    assert "device_ids=[0]: there is no GPU to use" in line_of("devices", output)
    assert line_of("devices", output).endswith(". Use device_ids=cpu.")
    assert line_of("open files", output) == "broken   open files: at most 200. Type: ulimit -n 4096"
    assert output.count("\nbroken  ") == 5 and output.endswith(", 5 broken\n")


@pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode != 0,
    reason="namespaces are not allowed here",
)
def test_faults_of_host_and_config_are_named(project: Project) -> None:
    (project.folder / "runs").mkdir()
    planted = """
        hostname no-such-host
        mount --bind /dev/null /etc/resolv.conf
        mount -t tmpfs -o size=1m none runs
        head -c 1048576 /dev/zero > runs/full
        mount -t tmpfs -o size=1m none /dev/shm"""
    command = [*UNSHARED, *in_a_shell(planted)]
    code, output = consult(project, "training.epoch=3", "seed=-1", command=command)
    assert code == 1
    assert line_of("config", output) == (
        "broken   config: training.epoch=3: there is no such key in training. Did you mean training.epochs=3?"
    )
    assert line_of("hostname", output).startswith("warning  hostname: no-such-host has no address")
    assert 'Add the line "127.0.1.1 no-such-host"' in line_of("hostname", output)
    assert "runs cannot be written to: No space left on device. Make room" in line_of("disk", output)
    assert line_of("shared memory", output).startswith("broken   shared memory: /dev/shm has 0.00 of 0.00 GiB free.")
    assert "--shm-size" in line_of("shared memory", output)
    assert line_of("gloo", output).startswith("ok")  # it does not need the host's name
    assert output.endswith(", 3 broken\n")


def test_what_hangs_is_named_in_time_and_keeps_no_check_of_the_machine_from_answering(project: Project) -> None:
    # In torch's place. PyDLL keeps Python's lock: no thread of that process runs any more.
    (project.folder / "torch.py").write_text("import ctypes\nctypes.PyDLL(None).sleep(1000)\n", encoding="utf-8")
    project.edit("commands/doctor.py", "SECONDS = 25.0", "SECONDS = 4.0")
    started_at = time.monotonic()
    code, output = consult(project)
    assert time.monotonic() - started_at < 4 + 4  # Python's start and end; 25 + 4 is below the promised 30
    assert code == 1
    remedy = "Is the environment on a slow file system?"
    assert line_of("torch", output) == f"broken   torch: no answer within 4 s. {remedy}"
    assert not line_of("hostname", output).startswith("broken")
    assert not line_of("open files", output).startswith("broken")


def surroundings(cuda: str | None) -> Surroundings:
    """With a torch that is built for this version of CUDA."""
    torch, config = Future[ModuleType](), Future[Config]()
    described = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=cuda))
    torch.set_result(cast(ModuleType, described))
    config.set_result(load_config(ROOT / "config.yaml"))
    return Surroundings({}, time.monotonic() + 10, torch, config)


def test_torch_without_cuda_and_gpus_without_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = SimulatedNvml(39.0, 1.0)
    nvml.nvmlSystemGetDriverVersion = lambda: "560.1"
    nvml.processes[1] = [os.getpid()]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (driver,) = check_driver(surroundings(cuda=None))
    assert driver.status == "broken"
    assert driver.detail == "NVIDIA driver 560.1, GPUs: 0, 1, but torch 2.13.0 has no CUDA"
    assert "python -m pip install --force-reinstall torch" in driver.remedy
    first, second = check_memory(surroundings(cuda=None))
    assert first.status == "ok" and first.detail == "Simulated 0, 39.0 of 40.0 GiB free"
    assert second.check == "memory of GPU 1" and second.status == "warning" and ", used by " in second.detail
    assert "launch.min_free_memory_gib" in second.remedy


def test_lost_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = SimulatedNvml(39.0, 39.0, broken=1)
    nvml.nvmlSystemGetDriverVersion = lambda: "560.1"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (driver,) = check_driver(surroundings(cuda="12.6"))
    assert driver.status == "broken" and "GPU 1: GPU is lost" in driver.detail and "nvidia-smi" in driver.remedy


def test_each_pair_is_tried_and_a_device_that_fails_keeps_no_other_pair_waiting() -> None:
    started_at = time.monotonic()
    results = measure_pairs(["cpu", "cpu", "cuda:99"], "gloo", "lo", "127.0.0.1", deadline=started_at + 25)
    assert results.keys() == {(0, 1), (0, 2), (1, 2)}
    assert isinstance(results[0, 1], float) and results[0, 1] > 0
    assert str(results[0, 2]).startswith("cuda:99: ") and results[0, 2] == results[1, 2]
    assert time.monotonic() - started_at < 20


def test_json_is_the_doctors_alone() -> None:
    line = parse_command_line(["doctor", "--json", "seed=1"], ROOT / "config.yaml")
    assert line.command == "doctor" and line.is_json and line.overrides == ["seed=1"]
    assert parse_command_line(["evaluate", "--json"], ROOT / "config.yaml").overrides == ["--json"]  # refused later

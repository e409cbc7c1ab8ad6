"""Tests of `run.py doctor` on a sound machine and with planted faults: it names each fault and gives a remedy."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from shared_server import SimulatedNvml, driver

from template_package.commands.doctor import CHECKS, Finding, Machine, main
from template_package.core.settings import CommandLine
from template_package.errors import ConfigError

from conftest import ROOT, Project

UNSHARED = "unshare --map-root-user --uts --mount".split()
NAMES = [name for name, *_ in CHECKS]


@pytest.fixture
def project(project: Project) -> Project:
    shutil.copy(ROOT / "pyproject.toml", project.folder)
    return project


def consult(
    project: Project, *words: str, command: Sequence[str] = (sys.executable,), **variables: str
) -> tuple[int, str, str]:
    """Run `run.py doctor` and return its exit code, stdout and stderr.

    The call fails unless all processes that the doctor has started end within 30 seconds: they hold stderr open.
    """
    process = project.start("doctor", *words, command=command, **variables)
    try:
        output, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    print(output, errors)
    return process.returncode, output, errors


def in_a_shell(lines: str) -> list[str]:
    """Return a command that executes `lines` in a shell, which then becomes Python."""
    return ["sh", "-ec", f'{lines}\nexec "$0" "$@"', sys.executable]


def line_of(check: str, output: str) -> str:
    (line,) = (
        line
        for line in output.splitlines()
        if line.partition(" ")[2].strip().startswith(f"{check}: ")
    )
    return line


def test_sound_machine_passes_in_json_and_nothing_is_left(project: Project) -> None:
    project.edit("model.py", "import torch\n", "import torch\n\nprint('said by model.py')\n")
    before = sorted(project.folder.iterdir())
    code, output, _ = consult(project, "--json", "seed=1")
    told = json.loads(output)
    found = [Finding(**finding) for finding in told["checks"]]
    assert told["host"] == platform.node() and told["project"] == str(project.folder)
    assert told["template"] is None, "this copy does not say how it was made"
    assert code == 0 and "broken" not in [finding.status for finding in found]
    assert [finding.check for finding in found if "GPU" not in finding.check] == NAMES[:-1]
    details = {finding.check: finding.detail for finding in found}
    assert (
        details["devices"] == "cpu"
        and details["gloo"].endswith("cpu, cpu works")
        and "GiB free" in details["disk"]
    )
    assert all(bool(finding.remedy) == (finding.status != "ok") for finding in found)
    assert sorted(path for path in project.folder.iterdir() if path.name != "__pycache__") == before


def test_faults_of_environment_and_limits_are_named(project: Project) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace('"torch>=', '"torch>=99.')
    (project.folder / "pyproject.toml").write_text(text, encoding="utf-8")
    (project.folder / "runs").write_text("a file", encoding="utf-8")
    variables = {"GLOO_SOCKET_IFNAME": "nosuch0", "CUDA_VISIBLE_DEVICES": ""}
    code, output, errors = consult(
        project, "device_ids=0", command=in_a_shell("ulimit -Sn 200"), **variables
    )
    assert code == 1
    versions = line_of("versions", output)
    assert ", >=99.2.8 wanted" in versions and versions.endswith(
        ". Type: python -m pip install -c constraints.txt -e ."
    )
    assert "Not a directory" in line_of("disk", output) and "Make room, or let runs be" in line_of(
        "disk", output
    )
    assert (
        "failed, see the traceback. A firewall?" in line_of("gloo", output)
        and "GLOO_SOCKET_IFNAME" in output
    )
    assert " failed:\nTraceback" in errors and "Unable to find address for: nosuch0" in errors
    assert line_of("devices", output).startswith(
        "broken   devices: device_ids=[0]: GPU 0 does not exist; "
    )
    assert "Set device_ids=cpu" in line_of("devices", output)
    assert line_of("open files", output).startswith(
        "broken   open files: at most 200. Type: ulimit -n 4096"
    )
    assert output.count("\nbroken  ") + output.startswith("broken") == 5 and output.endswith(
        ", 5 broken\n"
    )


@pytest.mark.skipif(
    sys.platform != "linux"
    or subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode != 0,
    reason="namespaces are not allowed here",
)
def test_faults_of_host_and_config_are_named(project: Project) -> None:
    (project.folder / "runs").mkdir()
    planted = """
        mount -t tmpfs -o size=1m none runs
        head -c 1048576 /dev/zero > runs/full
        mount -t tmpfs -o size=1m none /dev/shm"""
    code, output, _ = consult(
        project, "training.epoch=3", command=[*UNSHARED, *in_a_shell(planted)]
    )
    assert code == 1
    assert line_of("config", output).startswith(
        "broken   config: training.epoch=3: there is no such key"
    )
    assert line_of("config", output).endswith(". Did you mean training.epochs=3?")
    assert "No space left on device. Make room" in line_of("disk", output)
    assert line_of("shared memory", output).startswith(
        "broken   shared memory: /dev/shm has 0.00 of 0.00 GiB free."
    )
    assert "--shm-size" in line_of("shared memory", output)
    assert line_of("driver", output)  # a broken config does not hide the machine
    assert output.endswith(", 3 broken\n")


def test_hanging_check_is_named_in_time_and_the_checks_before_it_have_answered(
    project: Project,
) -> None:
    # In torch's place. PyDLL keeps Python's lock: no thread of that process runs any more.
    (project.folder / "torch.py").write_text(
        "import ctypes\nctypes.PyDLL(None).sleep(1000)\n", encoding="utf-8"
    )
    project.edit("commands/doctor/__init__.py", "SECONDS = 26.0", "SECONDS = 4.0")
    started_at = time.monotonic()
    code, output, _ = consult(project)
    # Python's start and end; 26 + 4 is the promised 30
    assert time.monotonic() - started_at < 4 + 4
    assert code == 1
    assert line_of("torch", output).startswith("broken   torch: no answer within 4 s")
    assert all(line_of(name, output) for name in NAMES[: NAMES.index("torch")])


def test_torch_that_cannot_be_imported_is_one_line_and_a_dead_check_is_told(
    project: Project,
) -> None:
    (project.folder / "torch.py").write_text(
        "raise ImportError('libcudart.so.13: no such file')", encoding="utf-8"
    )
    code, output, _ = consult(project)
    assert code == 1
    assert "ImportError: libcudart.so.13: no such file. " in line_of("torch", output)
    (project.folder / "torch.py").write_text("import os\nos._exit(139)", encoding="utf-8")
    code, output, _ = consult(project)
    assert code == 1 and "has died" in line_of("torch", output)


def find(
    check: str, nvml: SimulatedNvml, *words: str, mask: str | None = None
) -> list[tuple[str, str, str, str]]:
    """Return the findings of the check named `check`, with `nvml` in place of the driver."""
    line = CommandLine(ROOT / "config.yaml", words=words)
    _, find_all, _ = CHECKS[NAMES.index(check)]
    with driver(nvml, mask):
        return [*find_all(Machine(line, line.load_config()))]


def test_torch_without_cuda_is_named_and_the_memory_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    nvml = SimulatedNvml(39.0, 1.0)
    nvml.processes = {1: [os.getpid()]}
    (_, status, detail, remedy), first, second = find("driver", nvml)
    assert status == "broken" and detail == "2 of 2 GPUs can be used (torch sees 0)"
    assert "python -m pip install --force-reinstall torch" in remedy
    assert first == ("GPU 0", "ok", "39.0 GiB free  used by nobody", "")
    assert second[:2] == ("GPU 1", "ok") and second[2].startswith("1.0 GiB free  used by ")


def test_hidden_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    for mask, num_seen, status, remedy in (
        (None, 2, "ok", ""),
        ("1", 1, "ok", ""),
        ("", 0, "warning", "Unset CUDA_VISIBLE_DEVICES to use them."),
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda seen=num_seen: seen)
        summary, *gpus = find("driver", SimulatedNvml(39.0, 39.0), mask=mask)
        assert summary == ("driver", status, f"{num_seen} of 2 GPUs can be used", remedy)
        assert len(gpus) == 2, "hidden ones too"


def test_lost_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    (_, status, *_), *_ = find("driver", SimulatedNvml(39.0, 39.0, broken=1))
    assert status == "broken"


def test_devices_of_a_run_are_those_that_it_would_take() -> None:
    assert find("devices", SimulatedNvml(1, 39, 39)) == [("devices", "ok", "cuda:0, cuda:1", "")]
    full = SimulatedNvml(1.0, 1.0)
    assert find("devices", full, "launch.wait_minutes=30") == [("devices", "warning", "cpu", "")]
    for nvml, word in ((full, "cpu"), (full, "mps"), (SimulatedNvml(), "auto")):
        (found,) = find("devices", nvml, f"device_ids={word}")
        assert found[1:3] == ("ok", word.replace("auto", "cpu"))


@pytest.mark.parametrize("gpus", [["cuda:98"], ["cuda:98", "cuda:99"]])
def test_gpu_that_fails_is_named(project: Project, gpus: list[str]) -> None:
    code = f"def choose_devices(line, num_ranks=0):\n    return Devices({gpus}, '98,99')"
    project.append("core/launch.py", code)
    code_returned, output, errors = consult(project)
    assert code_returned == 1 and line_of("devices", output).endswith(f": {', '.join(gpus)}")
    link = line_of("GPU link", output)
    assert f"an all-reduce over {', '.join(gpus)} failed, see the traceback. If NCCL" in link
    assert "device_ids: torch" in errors or "CUDA" in errors


def test_ranks_that_hang_are_told_at_the_deadline_and_ended(project: Project) -> None:
    file = "commands/doctor/__init__.py"
    project.edit(file, "SECONDS = 26.0", "SECONDS = 15.0")
    project.edit(file, "    ones = torch", "    time.sleep(1000 * rank.rank)\n    ones = torch")
    code, output, _ = consult(project)
    assert code == 1 and line_of("gloo", output).startswith("broken   gloo: no answer within 15 s")


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="doctor takes --json"):
        main(CommandLine(ROOT / "config.yaml", command="doctor", rest=["me"]))

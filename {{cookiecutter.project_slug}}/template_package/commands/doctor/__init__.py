"""`python run.py doctor [--json]`: finds what would make runs fail on this machine, and how to fix it.

The checks run in a child process, because a check may hang: the parent process waits no longer than SECONDS. Only
the check functions import torch, model.py and dataset.py, because these imports may fail.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.launch import MASK, Devices, choose_devices, find_gpus, start_ranks
from ...core.processes import die_with_parent
from ...core.settings import CommandLine
from ...errors import ConfigError, one_line
from ...files import run_directory, template_facts

if TYPE_CHECKING:
    from ...core.ranks import Rank

GIB = 2**30
STARTED_AT = time.time()
SECONDS = 26.0  # from the start of the process to the end of all checks
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


class Finding(NamedTuple):
    """One result of a check. Status "warning" means that runs might still work; "broken" means that runs will fail."""

    check: str
    status: str
    detail: str
    remedy: str = ""


@dataclass
class Machine:
    """Keeps what each check found for later checks. `gpus` names the GPUs a run would use, such as `cuda:0`."""

    line: CommandLine
    config: Any = None  # None until it is read, and if it has a mistake
    gpus: Devices = field(default_factory=lambda: Devices([]))


def main(line: CommandLine) -> int:
    """Run the checks and print their findings. Return 1 if any finding has the status `broken`, otherwise 0."""
    if line.rest not in ([], ["--json"]):
        raise ConfigError(
            f"{one_line(' '.join(line.rest))}: doctor takes --json, and settings of the form key=value."
        )
    findings = []
    for finding in _consult(line):
        findings.append(finding)
        if not line.rest:
            remedy = f". {finding.remedy}" if finding.remedy else ""
            print(f"{finding.status:8} {finding.check}: {finding.detail}{remedy}", flush=True)
    counts = Counter(finding.status for finding in findings)
    if line.rest:
        facts: dict[str, Any] = {"host": platform.node(), "project": str(PYPROJECT.parent)}
        facts |= {"template": template_facts(), "checks": [f._asdict() for f in findings]}
        print(json.dumps(facts, indent=2))
    else:
        print(
            f"doctor: {counts['ok']} ok, {counts['warning']} to look at, {counts['broken']} broken"
        )
    return int(counts["broken"] > 0)


def _consult(line: CommandLine) -> Iterator[Finding]:
    """Run the checks in a child process, and yield each finding when it arrives. Stop if a check takes too long."""
    os.environ["RES_OPTIONS"] = (
        "timeout:2 attempts:1"  # otherwise a name service that is away takes all the time
    )
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_checks, args=(line, sender))
    process.start()
    sender.close()  # this copy would keep the pipe open, and hide that the process has died
    for name, _, remedy in CHECKS:
        try:
            if not receiver.poll(max(0.0, STARTED_AT + SECONDS - time.time())):
                raise EOFError
            yield from receiver.recv()
        except EOFError:
            reason = f"no answer within {SECONDS:g} s, or the process that checks it has died"
            yield Finding(name, "broken", reason, remedy)
            break
    process.kill()  # no wait: a process that waits for a dead disk does not even die


def run_checks(line: CommandLine, answers: Connection) -> None:
    os.setsid()  # Ctrl-C ends the process that waits, and with it this one
    os.dup2(2, 1)  # what model.py and libraries print goes to stderr
    die_with_parent()
    machine = Machine(line)
    for name, find, remedy in CHECKS:
        try:
            findings = list(find(machine))
        except ConfigError as error:
            detail, _, own_remedy = str(error).splitlines()[0].partition(". ")
            findings = [Finding(name, "broken", detail, own_remedy)]
        except (Exception, SystemExit) as error:
            findings = [Finding(name, "broken", one_line(f"{type(error).__name__}: {error}"))]
            traceback.print_exc()
        answers.send(
            [f._replace(remedy="" if f.status == "ok" else f.remedy or remedy) for f in findings]
        )


def check_versions(_: Machine) -> Iterator[Finding]:
    from packaging.requirements import Requirement

    project, problems = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"], {}
    wanted = [f"python{project['requires-python']}", *project["dependencies"]]
    for name, specifier in ((entry.name, entry.specifier) for entry in map(Requirement, wanted)):
        try:
            found = platform.python_version() if name == "python" else version(name)
            if not specifier.contains(found, prereleases=True):
                problems[name] = f"{name} is {found}, {specifier} wanted"
        except PackageNotFoundError:
            problems[name] = f"{name} is missing"
    status = "broken" if problems.keys() & {"python", "torch"} else "warning" if problems else "ok"
    yield Finding(
        "versions",
        status,
        "; ".join(problems.values()) or f"{len(wanted)} as {PYPROJECT.name} wants them",
    )


def check_shared_memory(_: Machine) -> Iterator[Finding]:
    """Check the free space in /dev/shm. Loader workers put batches there, and NCCL uses it for some transfers."""
    if sys.platform != "linux":  # macOS has another kind
        return
    size = shutil.disk_usage("/dev/shm")
    detail = f"/dev/shm has {size.free / GIB:.2f} of {size.total / GIB:.2f} GiB free"
    yield Finding("shared memory", _grade(size.free, fine=GIB, enough=GIB // 64), detail)


def check_open_files(_: Machine) -> Iterator[Finding]:
    """Check the limit on open files per process. A rank keeps a file open for each tensor it got from a worker."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding("open files", _grade(limit, fine=1024, enough=256), f"at most {limit}")


def check_disk(_: Machine) -> Iterator[Finding]:
    """Check that the disk that holds runs/ is writable and has free space."""
    runs = run_directory("any").parent
    folder = next(path for path in (runs, *runs.absolute().parents) if os.path.lexists(path))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(2**20))
    free = shutil.disk_usage(folder).free
    yield Finding(
        "disk", _grade(free, fine=5 * GIB, enough=0), f"{folder} has {free / GIB:.1f} GiB free"
    )


def check_torch(_: Machine) -> Iterator[Finding]:
    import torch

    yield Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")


def check_config(machine: Machine) -> Iterator[Finding]:
    machine.config = machine.line.load_config()
    yield Finding("config", "ok", f"name={machine.config.name}, strategy={machine.config.strategy}")


def check_gpus(_: Machine) -> Iterator[Finding]:
    """Check that the GPU driver answers and that torch sees the same GPUs. Report the free memory of each GPU."""
    import pynvml
    import torch

    visible, num_seen = find_gpus(os.environ), torch.cuda.device_count()
    present = find_gpus({}) if MASK in os.environ else visible
    problem = f" (torch sees {num_seen})" if num_seen != len(visible) else ""
    with suppress(pynvml.NVMLError):
        if (number := pynvml.nvmlDeviceGetCount()) > len(present):
            problem = f" ({number - len(present)} of {number} do not answer)"
    status, remedy = "broken" if problem else "ok", ""
    if not present and Path("/proc/driver/nvidia/version").exists():
        status = "broken"  # the driver does not answer
    if not (torch.version.cuda or torch.version.hip):
        remedy = "Type: python -m pip install --force-reinstall torch --index-url URL, URL from pytorch.org/get-started"
    if present and not visible:
        status, remedy = "warning", "Unset CUDA_VISIBLE_DEVICES to use them."
    yield Finding(
        "driver", status, f"{len(visible)} of {len(present)} GPUs can be used{problem}", remedy
    )
    for gpu in present:
        users = ", ".join(sorted(gpu.users)) or "nobody"
        detail = f"{gpu.free_memory / GIB:.1f} GiB free  used by {users}"
        yield Finding(f"GPU {gpu.index}", "ok", detail)


def check_devices(machine: Machine) -> Iterator[Finding]:
    """Report the devices that a run would use if it started now."""
    if machine.config is None:
        return
    words = [*machine.line.words, "launch.wait_minutes=0"]
    devices = choose_devices(replace(machine.line, words=words))
    is_cpu_instead = machine.config.device_ids == "auto" and devices.names[0] == "cpu"
    machine.gpus = Devices([]) if "cpu" in devices.names else devices
    status = "warning" if is_cpu_instead and find_gpus(os.environ) else "ok"
    yield Finding("devices", status, ", ".join(devices.names))


def check_gloo(machine: Machine) -> Iterator[Finding]:
    """Run an all-reduce between two CPU ranks over gloo. GPU ranks also need gloo, to exchange Python objects."""
    if machine.config is not None:
        words = [*machine.line.words, "launch.backend=gloo"]
        yield _all_reduce("gloo", Devices(["cpu", "cpu"]), replace(machine.line, words=words))


def check_gpu_link(machine: Machine) -> Iterator[Finding]:
    """Run an all-reduce over every GPU that training would use. Even with one GPU, this tests that kernels work."""
    if machine.gpus.names:
        yield _all_reduce("GPU link", machine.gpus, machine.line)


def _all_reduce(name: str, devices: Devices, line: CommandLine) -> Finding:
    """Start one rank per device, as in training, and try an all-reduce. If a rank fails, print its traceback."""
    code = start_ranks(devices, line)
    names, result = ", ".join(devices.names), "failed, see the traceback" if code else "works"
    return Finding(name, "broken" if code else "ok", f"an all-reduce over {names} {result}")


def on_rank(rank: Rank) -> None:
    """Sum a 1 from each rank, and raise ArithmeticError if the total is wrong, which an IOMMU can cause."""
    import torch

    from ...core.ranks import all_reduce

    ones = torch.ones(2**22, device=rank.device)  # 16 MiB
    if not bool((all_reduce(ones) == rank.world_size).all()):
        raise ArithmeticError(f"the sum of {rank.world_size} ones is wrong")


# Name, function, and the remedy for a finding that has none of its own, or if the check itself fails or hangs.
CHECKS: tuple[tuple[str, Callable[[Machine], Iterator[Finding]], str], ...] = (
    ("versions", check_versions, "Type: python -m pip install -c constraints.txt -e ."),
    (
        "shared memory",
        check_shared_memory,
        "Remove old files there; in a container: docker run --shm-size=8g.",
    ),
    (
        "open files",
        check_open_files,
        "Type: ulimit -n 4096, or ask for a higher hard limit (limits.conf(5)).",
    ),
    (
        "disk",
        check_disk,
        "Make room, or let runs be a link to another disk: ln -s /PATH/WITH/ROOM runs",
    ),
    (
        "torch",
        check_torch,
        "Slow disk? Or type: python -m pip install --force-reinstall -c constraints.txt torch",
    ),
    (
        "config",
        check_config,
        "Mend model.py and dataset.py: their import and complete_config() must raise nothing.",
    ),
    ("driver", check_gpus, "Does nvidia-smi answer? If not, reboot, or install the driver again."),
    (
        "devices",
        check_devices,
        "Wait, or see device_ids, launch.share_gpus and launch.min_free_memory_gib.",
    ),
    (
        "gloo",
        check_gloo,
        "A firewall? Set launch.network_interface, or unset GLOO_SOCKET_IFNAME if it is set.",
    ),
    (
        "GPU link",
        check_gpu_link,
        "If NCCL_P2P_DISABLE=1 helps, switch off ACS or IOMMU in the BIOS, or always set it.",
    ),
)


def _grade(value: float, *, fine: float, enough: float) -> str:
    return "ok" if value >= fine else "warning" if value >= enough else "broken"

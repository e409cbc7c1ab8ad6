"""Tests of what the environment does to a run: consoles, launchers' variables, folders, threads. In both sizes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cookiecutter.main import cookiecutter

from baking import bake, plain_environment

SHORT = (
    "training.epochs=null training.max_steps=2 evaluation.every_epochs=null logging.tracker=none "
    "logging.every_steps=1"
).split()
TWO = "device_ids=cpu,cpu"


@pytest.fixture(scope="module")
def projects(template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("environment")
    answers = {"example": "stub"}  # it needs no library that takes seconds to import
    return {size: bake(template, folder / size, size=size, **answers) for size in ("small", "full")}


@pytest.fixture(params=["small", "full"])
def project(request: pytest.FixtureRequest, projects: dict[str, Path]) -> Path:
    return projects[request.param]


def run(project: Path, *command: str, **environment: str) -> tuple[int, str]:
    """Run a command of the project in its folder. Return its exit code and output."""
    result = subprocess.run(
        command,
        cwd=project,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=120,
        env=plain_environment(environment),
    )
    return result.returncode, result.stdout


def copy_of(project: Path, folder: Path) -> Path:
    return Path(shutil.copytree(project, folder / "project"))


@pytest.mark.parametrize(("device_ids", "closed"), [("cpu", "<&- >&- 2>&-"), ("cpu,cpu", ">&-")])
def test_closed_console_does_not_stop_a_run(
    project: Path, tmp_path: Path, device_ids: str, closed: str
) -> None:
    words = f"device_ids={device_ids} {' '.join(SHORT)}"
    line = f"exec {sys.executable} run.py {words} {closed}"
    code, printed = run(project, "sh", "-c", line, DDP_RUNS_FOLDER=str(tmp_path))
    assert code == 0, printed
    lines = (tmp_path / "baseline" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [line.count('"loss"') for line in lines] == [1, 1]


@pytest.mark.slow
def test_smoke_test_fails_without_asserts_and_on_a_latin_console(
    projects: dict[str, Path], tmp_path: Path
) -> None:
    project = copy_of(projects["small"], tmp_path)
    model = next(project.glob("*/model.py"))
    with model.open("a", encoding="utf-8") as file:  # a state that no checkpoint holds
        file.write(
            "\n_plain_loss, _calls = compute_loss, []\n"
            "def compute_loss(model, batch):\n"
            "    _calls.append(1)\n"
            "    loss, outputs = _plain_loss(model, batch)\n"
            "    return loss * len(_calls), outputs\n"
        )
    variables = {"PYTHONOPTIMIZE": "1", "PYTHONIOENCODING": "latin-1"}
    code, printed = run(project, sys.executable, "run.py", "smoke", **variables)
    assert code == 1 and "smoke test: FAILED" in printed, printed
    assert "resume" in printed and "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["link to a disk that is away", "file"])
def test_folder_that_cannot_be_made_is_told_in_one_line(
    project: Path, tmp_path: Path, kind: str
) -> None:
    runs = tmp_path / "runs"
    if kind == "file":
        runs.touch()
    else:
        runs.symlink_to("/not-mounted/runs")
    devices = "device_ids=cpu" if kind == "file" else TWO
    words = (sys.executable, "run.py", devices, *SHORT)
    code, printed = run(project, *words, DDP_RUNS_FOLDER=str(runs))
    assert code == 1 and "Traceback" not in printed, printed
    assert printed.count("Set the variable DDP_RUNS_FOLDER=PATH to write elsewhere") == 1


@pytest.mark.slow
def test_shell_of_an_allocation_with_several_tasks_is_no_launcher(
    project: Path, tmp_path: Path
) -> None:
    """`srun --ntasks=4 --pty bash`: SLURM's variables tell of four tasks, and only this one is there."""
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    task |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "40000"}
    words = (sys.executable, "run.py", TWO, *SHORT)
    code, printed = run(project, *words, **task, DDP_RUNS_FOLDER=str(tmp_path))
    assert code == 0 and "complete: 2 steps" in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "expected"), [(None, 1), ("2", 2)])
def test_own_number_of_threads_stays(
    project: Path, tmp_path: Path, typed: str | None, expected: int
) -> None:
    """Two ranks share the cores; a number that the user has set is not overridden."""
    if expected == 1 and len(os.sched_getaffinity(0)) > 3:
        pytest.skip("two ranks have more than one core each")
    project = copy_of(project, tmp_path)
    with next(project.glob("*/dataset.py")).open("a", encoding="utf-8") as file:
        file.write(
            "\n_plain = build_datasets\n"
            "def build_datasets(config):\n"
            "    import torch\n"
            "    print('threads', torch.get_num_threads())\n"
            "    return _plain(config)\n"
        )
    variables = {} if typed is None else {"OMP_NUM_THREADS": typed}
    code, printed = run(project, sys.executable, "run.py", TWO, *SHORT, **variables)
    assert code == 0 and f"threads {expected}" in printed, printed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
@pytest.mark.parametrize("command", [(), ("-m", "torch.distributed.run", "--nproc-per-node=2")])
def test_threads_that_wait_do_not_spin(
    project: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Beside other work on the same cores, a run on the CPU took four times as long. OpenMP prints what it has read."""
    hidden = ("env", "-u", "OMP_WAIT_POLICY", sys.executable, *command, "run.py")
    words = (TWO if command else "device_ids=cpu", *SHORT)
    variables = {"DDP_RUNS_FOLDER": str(tmp_path), "OMP_DISPLAY_ENV": "verbose"}
    code, printed = run(project, *hidden, *words, **variables)
    assert code == 0 and "GOMP_SPINCOUNT = '0'" in printed, printed
    assert command or "GOMP_SPINCOUNT = '300000'" not in printed, printed  # torchrun itself spins


@pytest.mark.slow
def test_set_of_names_has_the_same_order_in_every_process(project: Path, tmp_path: Path) -> None:
    project = copy_of(project, tmp_path)
    # one write a line, or an unbuffered Python mixes the words of two ranks
    words = "'ORDER ' + ' '.join({f'class {k}' for k in range(9)}) + '\\n'"
    with next(project.glob("*/dataset.py")).open("a", encoding="utf-8") as file:
        file.write(f"\nprint({words}, end='')\n")
    orders = []
    for devices in ("device_ids=cpu", TWO):
        command = (sys.executable, "run.py", devices, *SHORT, f"name=run{len(devices)}")
        code, printed = run(project, *command)
        assert code == 0, printed
        orders += [line for line in printed.splitlines() if line.startswith("ORDER")]
    assert len(orders) == 3 and len({*orders}) == 1


def test_import_of_run_changes_no_backend(project: Path) -> None:
    """A notebook imports run_fn: matplotlib would show no more pictures there."""
    text = "import os; from run import run_fn; print(os.environ.get('MPLBACKEND'))"
    assert run(project, sys.executable, "-c", text) == (0, "None\n")


@pytest.mark.parametrize("device_ids", ["cpu", pytest.param("cpu,cpu", marks=pytest.mark.slow)])
def test_command_returns_to_the_tool_that_runs_it(
    project: Path, tmp_path: Path, device_ids: str
) -> None:
    """A profiler writes its file."""
    command = (sys.executable, "-m", "cProfile", "-o", str(tmp_path / "profile"), "run.py")
    words = (*command, f"device_ids={device_ids}", *SHORT)
    code, printed = run(project, *words, DDP_RUNS_FOLDER=str(tmp_path))
    assert code == 0 and (tmp_path / "profile").stat().st_size > 10_000, printed


@pytest.mark.slow
@pytest.mark.parametrize("is_kernel", [False, True])
def test_command_that_runs_in_a_process_of_another_program(
    project: Path, tmp_path: Path, is_kernel: bool
) -> None:
    """What %run does. The process lives on; IPython's would keep the package's code, so there it is refused."""
    text = f"""
import builtins, runpy, sys
if {is_kernel}:
    builtins.__IPYTHON__ = True
sys.argv = ["run.py", "device_ids=cpu", *{SHORT}]
try:
    runpy.run_path("run.py", run_name="__main__")
except SystemExit as end:
    print("alive", end.code)
"""
    code, printed = run(project, sys.executable, "-c", text, DDP_RUNS_FOLDER=str(tmp_path))
    assert code == 0 and f"alive {2 * is_kernel}\n" in printed, printed
    assert is_kernel == ("Type in the cell: !python run.py" in printed)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("size", ["small", "full"])
def test_full_shared_memory_is_told_with_its_remedy(
    template: Path, tmp_path: Path, size: str
) -> None:
    """A container has 64 MB there, unless it was started with more."""
    project = bake(template, tmp_path, size=size)
    words = "device_ids=cpu loader.num_workers=1 training.global_batch_size=1024"
    line = "mount -t tmpfs -o size=100k none /dev/shm && "
    line += f"exec {sys.executable} run.py {words} {' '.join(SHORT)}"
    code, printed = run(project, "unshare", "--mount", "sh", "-c", line)
    assert code == 1 and "set loader.num_workers=0" in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize("words", [TWO, "device_ids=cpu loader.num_workers=1"])
def test_long_name_of_the_folder_for_temporary_files(
    project: Path, tmp_path: Path, words: str
) -> None:
    """A socket's path ends at 107 bytes, and loader workers have theirs in TMPDIR."""
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    variables = {"TMPDIR": str(folder), "DDP_RUNS_FOLDER": str(tmp_path)}
    command = (sys.executable, "run.py", *words.split(), *SHORT, "launch.timeout_minutes=0.5")
    code, printed = run(project, *command, **variables)
    assert code == 0 and "complete: 2 steps" in printed, printed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a user with fewer rights")
@pytest.mark.slow
def test_run_of_another_user_is_evaluated_in_ones_own_folder(project: Path, tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    words = (sys.executable, "run.py", "device_ids=cpu", *SHORT, "evaluation.every_steps=1")
    assert run(project, *words, DDP_RUNS_FOLDER=str(theirs))[0] == 0
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, 65534, 65534)
    user = ("setpriv", "--bounding-set=-dac_override", sys.executable, "run.py")
    code, printed = run(project, *user, "evaluate", DDP_RUNS_FOLDER=str(theirs))
    assert code == 1 and "Traceback" not in printed, printed
    assert "DDP_RUNS_FOLDER=PATH" in printed and "evaluation.checkpoint=PATH" in printed
    words = ("evaluate", f"evaluation.checkpoint={theirs}/baseline/checkpoints/best.pt")
    code, printed = run(project, *user, *words, DDP_RUNS_FOLDER=str(mine))
    assert code == 0 and (mine / "baseline" / "evaluation.json").exists(), printed


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
def test_two_nodes_meet_over_ipv6(project: Path, tmp_path: Path) -> None:
    """Without an IPv4 route, and an address of IPv6 alone."""
    node = f"NODE_RANK=%d scripts/multi_node.sh device_ids=cpu {' '.join(SHORT)}"
    line = "ip link set lo up && ip -6 address add fd00::1/128 dev lo && sleep 2; "
    line += f"{node % 1} > {tmp_path}/node_1.txt 2>&1 & {node % 0}"
    variables = {"NNODES": "2", "MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"}
    variables |= {"PYTHON": sys.executable, "DDP_RUNS_FOLDER": str(tmp_path)}
    code, printed = run(project, "unshare", "--net", "sh", "-c", line, **variables)
    assert code == 0 and "complete: 2 steps" in printed, printed


def test_project_that_was_made_without_hooks_says_so(template: Path, tmp_path: Path) -> None:
    project = Path(
        cookiecutter(str(template), no_input=True, output_dir=str(tmp_path), accept_hooks=False)
    )
    code, printed = run(project, sys.executable, "run.py", "no-command")
    assert code == 2 and "warning: cookiecutter has run no hooks here" in printed, printed


def test_folder_that_was_copied_out_of_the_template_says_so(template: Path, tmp_path: Path) -> None:
    """Row 24, a further form: no cookiecutter had a part in it."""
    copy = shutil.copytree(template / "{{cookiecutter.project_slug}}", tmp_path / "experiment")
    code, printed = run(copy, sys.executable, "run.py", "no-command")
    assert code == 2 and "warning: cookiecutter has run no hooks here" in printed, printed


@contextmanager
def silent_server() -> Iterator[str]:
    """Yield the address of a server that accepts connections, by the kernel, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "tracker"), [("small", "mlflow"), ("full", "wandb")])
def test_tracker_whose_server_is_silent_costs_a_warning(
    template: Path, tmp_path: Path, size: str, tracker: str
) -> None:
    project = bake(template, tmp_path, size=size, tracker=tracker, example="stub")
    if tracker == "mlflow":  # W&B takes an earlier limit for a lost connection, and tries again
        logs = project / "ddp_experiment" / "core" / "logs.py"
        text = logs.read_text(encoding="utf-8")
        assert "TRACKER_SECONDS = 60" in text
        logs.write_text(text.replace("SECONDS = 60", "SECONDS = 8"), encoding="utf-8")
    with silent_server() as address:
        variables = {"MLFLOW_TRACKING_URI": address, "WANDB_BASE_URL": address}
        variables |= {"WANDB_API_KEY": "0" * 40, "DDP_RUNS_FOLDER": str(tmp_path)}
        words = [word for word in SHORT if "tracker" not in word]
        started_at = time.monotonic()
        command = (sys.executable, "run.py", "device_ids=cpu", *words, "launch.timeout_minutes=1.5")
        code, printed = run(project, *command, **variables)
        seconds = time.monotonic() - started_at
    assert code == 0 and "complete: 2 steps" in printed, printed
    assert f"warning: logging.tracker={tracker} has failed" in printed
    assert seconds < 300


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(("limit", "expected"), [("100000 100000", 1), ("max 100000", 0)])
def test_quota_of_a_container_counts(
    project: Path, tmp_path: Path, limit: str, expected: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n", encoding="ascii")
    package = next(project.glob("*/core/ranks.py")).parents[1].name
    count = f"from {package}.core.ranks import num_usable_cores as count; print(count())"
    # In a mount namespace of its own, the folder stands where a container's limits are read.
    line = f'mount --bind {tmp_path} /sys/fs/cgroup && exec {sys.executable} -c "{count}"'
    code, printed = run(project, "unshare", "--mount", "sh", "-c", line)
    assert (code, printed) == (0, f"{expected or len(os.sched_getaffinity(0))}\n")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the host's name")
def test_torchrun_trains_on_a_host_whose_name_leads_nowhere(project: Path, tmp_path: Path) -> None:
    words = f"scripts/torchrun.sh {TWO} {' '.join(SHORT)}"
    line = f"hostname no-such-host.invalid && exec {words}"
    variables = {"PYTHON": sys.executable, "DDP_RUNS_FOLDER": str(tmp_path)}
    code, printed = run(project, "unshare", "--uts", "sh", "-c", line, **variables)
    assert code == 0 and "complete: 2 steps" in printed, printed

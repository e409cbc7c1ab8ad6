"""Tests of starting ranks: by run.py itself, by torchrun with restarts, on several nodes, and under other launchers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.run

from template_package.core.launch import DEVICES
from template_package.core.ranks import num_usable_cores
from template_package.core.settings import read_command_line
from template_package.launchers import adopt, choose_interface

from conftest import ROOT, Project

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "host", "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
}  # fmt: skip
PLACE = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()


def place_under(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *words: str
) -> list[str]:
    """Return torchrun's variables after adopt(), in a process that a launcher has given these variables."""
    hidden = (*PLACE, *TORCHRUN, *SRUN, "LOCAL_SIZE", DEVICES, "GLOO_SOCKET_IFNAME")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    # a copy, so that what adopt() sets goes when the test ends
    monkeypatch.setattr(os, "environ", environment | {"GLOO_SOCKET_IFNAME": "lo"} | variables)
    assert adopt(read_command_line(words, ROOT / "config.yaml"))
    return [os.environ.get(name, "") for name in PLACE]


def test_ranks_share_the_cores(project: Project) -> None:
    words = "print('threads', torch.get_num_threads(), flush=True)"
    project.edit(
        "model.py",
        "    model: Any = nn",
        f"    {words}\n    model: Any = nn",
    )
    line = f"threads {max(1, num_usable_cores() // 2)}\n"
    output = project.run("device_ids=cpu,cpu", "training.max_steps=1")
    log = (project.directory("run") / "logs" / "rank_1.log").read_text(encoding="utf-8")
    assert output.count(line) == log.count(line) == 1, "each rank builds one model"


def test_a_run_leaves_nothing_in_the_temporary_folder(project: Project, tmp_path: Path) -> None:
    (folder := tmp_path / "temporary").mkdir()
    words = ["device_ids=cpu,cpu", "loader.num_workers=1", "training.max_steps=2"]
    process = project.start(*words, TMPDIR=str(folder), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    assert not [*folder.iterdir()]


def test_debug_trains(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "launch.debug=true", "training.max_steps=2")
    assert len(project.lines("run")) == 2


@pytest.mark.parametrize("words", [["device_ids=cpu,cpu"], ["evaluate"]])
def test_python_without_torch_is_told_in_one_line(project: Project, words: list[str]) -> None:
    output = project.run(*words, command=[sys.executable, "-S"], code=2)
    assert "Activate this project's environment" in output and len(output.splitlines()) == 1


def test_place_of_a_rank_is_read_from_every_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ["3", "4", "1", "2", "1", "host", "1234"]
    assert place_under(monkeypatch, TORCHRUN) == place
    under_deepspeed = {
        name: value
        for name, value in TORCHRUN.items()
        if not name.startswith(("LOCAL_WORLD", "TORCH", "GROUP"))
    }
    found = place_under(monkeypatch, under_deepspeed | {"LOCAL_SIZE": "2", "CROSS_RANK": "1"})
    assert found == place
    meeting = "launch.master_addr=10.0.0.1", "launch.master_port=29500", "device_ids=cpu"
    found = place_under(monkeypatch, SRUN, *meeting)
    assert found == ["3", "4", "0", "2", "2", "10.0.0.1", "29500"]


@pytest.mark.parametrize(
    "variables",
    [
        # A shell on a node (srun --pty) is one task: there the ranks are started here.
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},  # in the batch script
        {},
    ],
)
def test_where_no_launcher_is_ranks_are_started_here(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    with pytest.raises(AssertionError):
        place_under(monkeypatch, variables)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, "the environment is half set. Unset them and type"),
        (TORCHRUN | {"RANK": "one"}, "the environment is half set. Unset them and type"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "no number in SLURM_PROCID"),
    ],
)
def test_half_set_environment_is_refused(
    project: Project, environment: dict[str, str], words: str
) -> None:
    process = project.start(**environment)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and words in errors and "Traceback" not in errors


def test_several_nodes_need_a_place_to_meet(project: Project) -> None:
    needed = "launch.nodes=2: needs an address and a port"
    remedy = "Add launch.master_addr=ADDRESS launch.master_port=29500"
    for words in (
        ["launch.nodes=2"],
        ["launch.nodes=+2"],
        ["launch.nodes=2", "launch.master_addr=10.0.0.1"],
    ):
        output = project.run(*words, code=2).replace("+2", "2")
        assert needed in output and remedy in output


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net/route is Linux's")
@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.1.0.7", "ib0"), ("192.0.2.1", "eth0"), ("127.0.1.1", "eth0"), ("172.17.0.9", "docker0")],
)
def test_interface_is_that_of_the_narrowest_route(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str
) -> None:
    """127.0.1.1 is the address that Debian's /etc/hosts gives for the machine's own name."""
    routes = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0
eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0
ib0 0000010A 00000000 0001 0 0 0 0000FFFF 0 0 0
"""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: routes)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: address)
    # so that what the test leaves there goes when it ends
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    choose_interface("node-0")
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface


def rank(number: int, port: int, **variables: str) -> dict[str, str]:
    """Return the environment that torchrun gives to rank `number` of two ranks."""
    rank_variables = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    return rank_variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | variables


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_list_that_is_not_the_launchers_number_of_ranks_is_refused(project: Project) -> None:
    process = project.start("device_ids=cpu,cpu,cpu", **rank(0, free_port()))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "names 3 devices, but torchrun started 2 ranks" in errors
    assert "Make both numbers equal" in errors and "Traceback" not in errors


def test_rank_whose_neighbour_never_starts_fails_in_time(project: Project) -> None:
    process = project.start(
        "device_ids=cpu,cpu", "launch.timeout_minutes=0.02", **rank(0, free_port())
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "this process failed:" in errors


def test_signals_end_a_rank_of_a_launcher_before_it_trains(project: Project) -> None:
    """A handler in Python would not run while the rank waits for the others: slurm.sbatch sends SIGHUP."""
    code = "import signal\nfor name in ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR1'):\n"
    code += "    handler = signal.getsignal(getattr(signal, name))\n"
    code += "    assert handler in (signal.SIG_DFL, signal.SIG_IGN)  # nohup"
    project.append("dataset.py", code)
    alone = rank(0, free_port(), WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    process = project.start("training.max_steps=1", **alone)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_ranks_with_other_versions_of_torch_are_refused_before_they_join(project: Project) -> None:
    code = "import os\nif os.environ['RANK'] == '1':\n    torch.__version__ = '9.9'"
    project.append("model.py", code)
    port = free_port()
    ranks = [project.start("device_ids=cpu,cpu", **rank(number, port)) for number in (0, 1)]
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert 2 in [process.returncode for process in ranks]
    assert "with torch 9.9. Make all alike." in "".join(errors), errors


def test_ranks_are_handed_the_settings_of_the_start(project: Project) -> None:
    """Memory runs out, and the ranks start again, after somebody has prepared config.yaml for another run."""
    code = """
def prepare_another_run(error):
    path = Path(__file__).parents[1] / "config.yaml"
    path.write_text(path.read_text().replace("name: run", "name: another"))
    raise torch.OutOfMemoryError("the fault that the test asked for")


run_out_of_memory = prepare_another_run
"""
    project.append("model.py", code)
    output = project.run("device_ids=cpu,cpu", "model.fault=memory_later")
    assert "starting again" in output and not project.directory("another").exists()
    assert project.json("run", "summary.json")["status"] == "complete"


def test_rank_of_srun_ends_soon_after_another_has_failed(project: Project) -> None:
    """srun does not end the others. One that computes meets no collective that would tell it."""
    code = """
def wait_or_fail(module):
    if rank() == 1:
        raise ArithmeticError
    time.sleep(100)


FAULTS["wait_or_fail"] = wait_or_fail
"""
    project.append("model.py", code)
    project.edit("model.py", "rank() == config.fault_rank", "True")
    task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    words = ("device_ids=cpu,cpu", f"launch.master_port={free_port()}", "model.fault=wait_or_fail")
    ranks = [
        project.start(*words, **task, SLURM_PROCID=number, SLURM_LOCALID=number) for number in "01"
    ]
    errors = [process.communicate(timeout=60)[1] for process in reversed(ranks)]
    assert [process.returncode for process in ranks] == [1, 1]
    assert "ArithmeticError" in errors[0]


def test_ranks_with_unequal_configs_are_refused(project: Project) -> None:
    port = free_port()
    ranks = [
        project.start("device_ids=cpu,cpu", f"training.epochs={3 + number}", **rank(number, port))
        for number in (0, 1)
    ]
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    words = (
        "error: rank 1 would not train what rank 0 does: training.epochs: 3 -> 4. Make both alike."
    )
    assert any(words in text for text in errors), errors


def test_torchrun_goes_on_after_a_killed_rank(project: Project) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    project.run("name=undisturbed", "device_ids=cpu,cpu")
    output = project.run(
        "device_ids=auto", "model.fault=kill_once", "checkpoint.every_steps=1", command=torchrun
    )
    assert "resuming after step" in output
    assert project.lines("run") == project.lines("undisturbed")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_goes_on_after_a_rank_that_was_killed_in_an_evaluation(project: Project) -> None:
    # 37 samples, one at a time
    (project.folder / "seconds_per_evaluation").write_text("0.3", encoding="utf-8")
    # The other rank waits for the killed one's answer to the agent's SIGTERM, until the agent kills it too: after 30
    # seconds, unless this version of torchrun can be told otherwise.
    options = "--standalone --nproc-per-node=2 --max-restarts=1"
    options += " --shutdown-timeout=5" * (
        "--shutdown-timeout" in Path(torch.distributed.run.__file__).read_text("utf-8")
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    words = (
        "device_ids=cpu,cpu",
        "training.epochs=1",
        "evaluation.micro_batch_size=1",
        "checkpoint.every_steps=2",
    )
    process = project.start(*words, command=torchrun)
    metrics, deadline = project.directory("run") / "metrics.jsonl", time.monotonic() + 120
    while (
        not (metrics.exists() and metrics.read_text("utf-8").count("\n") == 7)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    time.sleep(1.0)
    log = (project.directory("run") / "logs" / "rank_1.log").read_text(encoding="utf-8")
    os.kill(int(re.findall(r"pid=(\d+)", log)[-1]), signal.SIGKILL)
    output = "".join(process.communicate(timeout=150))
    assert process.returncode == 0 and "resuming after step" in output, output
    assert project.json("run", "summary.json")["status"] == "complete"


def own_address() -> str:
    """Return this host's address on its network, or 127.0.0.1 without a network. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


@pytest.mark.slow
@pytest.mark.skipif(own_address().startswith("127."), reason="this host has no network")
def test_two_nodes_with_different_numbers_of_ranks_train_as_one_process_does(
    project: Project,
) -> None:
    shutil.copytree(ROOT / "scripts", project.folder / "scripts")
    project.run("name=one")
    words = (
        "launch.nodes=2",
        f"launch.master_addr={own_address()}",
        f"launch.master_port={free_port()}",
    )
    nodes = [
        project.start(f"device_ids={devices}", f"launch.node_rank={number}", *words)
        for number, devices in enumerate(("cpu,cpu", "cpu"))
    ]
    output = "\n".join(text for node in nodes for text in node.communicate(timeout=100))
    assert [node.returncode for node in nodes] == [0, 0], output
    assert project.json("run", "summary.json")["world_size"] == 3
    # Sums of gradients in another order: rounding errors of float32, which 21 steps of AdamW enlarge.
    losses, expected = ([line["loss"] for line in project.lines(name)] for name in ("run", "one"))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("way", ["own", "torchrun"])
def test_order_of_gpus_is_set_before_the_users_files_are_imported(
    project: Project, way: str
) -> None:
    project.append(
        # one write: processes write at the same time
        "dataset.py",
        "import os\nos.write(1, f\"ORDER {os.environ.get('CUDA_DEVICE_ORDER')}\\n\".encode())",
    )
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        if way == "torchrun"
        else []
    )
    words = ["device_ids=cpu,cpu", "training.max_steps=1"]
    process = project.start(*words, command=[sys.executable, *torchrun])
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert output.count("ORDER") == output.count("ORDER PCI_BUS_ID") >= 2


def test_windows_is_refused_in_one_line(project: Project) -> None:
    code = "import signal, sys, runpy; del signal.SIGHUP; sys.argv = ['run.py']"
    code += "; runpy.run_path('run.py', run_name='__main__')"
    process = project.start(command=[sys.executable, "-c", code])
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors.count("\n")) == (2, "", 1) and "WSL 2" in errors


def test_pool_of_processes_in_the_users_data_set_ends(project: Project) -> None:
    code = """
from multiprocessing import Pool

former_datasets = build_datasets


def build_datasets(config):
    for _ in range(3):
        with Pool(8) as pool:
            pool.map(abs, range(100))
    return former_datasets(config)
"""
    project.append("dataset.py", code)
    project.run("device_ids=cpu,cpu", "training.max_steps=1")

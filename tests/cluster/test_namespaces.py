"""Tests on two hosts that share a network but no folder, and whose names resolve to no address."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from .conftest import SAME
from .hosts import Command, Host, left_after
from .namespaces import ADDRESSES, INTERFACE

PORT = "29650"
MEETING = ("launch.nodes=2", f"launch.master_addr={ADDRESSES[0]}", f"launch.master_port={PORT}")
NO_RESTART = "--max-restarts=0"
SECONDS_TO_END = 5
Start = Callable[..., list[Command]]


def start_run_py(
    hosts: Sequence[Host], *words: str, devices: Sequence[str] = ("cpu", "cpu")
) -> list[Command]:
    """Type `python run.py launch.nodes=2 …` on both hosts."""
    return [
        host.python(
            *MEETING,
            f"launch.node_rank={number}",
            f"device_ids={devices[number]}",
            "name=run",
            *words,
        )
        for number, host in enumerate(hosts)
    ]


def start_script(
    hosts: Sequence[Host], *words: str, devices: Sequence[str] = ("cpu", "cpu")
) -> list[Command]:
    """Type scripts/multi_node.sh on both hosts. Options for torchrun come first in `words`."""
    variables = {"NNODES": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
    own = [{"NODE_RANK": str(number)} for number in range(2)]
    return [
        host.start(
            "scripts/multi_node.sh",
            *words,
            f"device_ids={devices[number]}",
            "name=run",
            **variables,
            **own[number],
        )
        for number, host in enumerate(hosts)
    ]


def start_c10d(hosts: Sequence[Host], *words: str) -> list[Command]:
    """Type torchrun on both hosts, with its own rendezvous and with addresses, since the host names do not resolve."""
    options = (
        "--nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=test".split()
    )
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}",
    )
    return [
        host.start(
            *launcher,
            f"--local-addr={address}",
            f"--rdzv-conf=is_host={is_host}",
            "run.py",
            "name=run",
            *words,
        )
        for host, address, is_host in zip(hosts, ADDRESSES[:2], (1, 0), strict=True)
    ]


def all_end(commands: Sequence[Command], code: int | None = 0, timeout: float = 90) -> list[str]:
    """Wait until all commands end with this exit code (None: any code but 0), and return their outputs."""
    return [command.ended(code, timeout) for command in commands]


@pytest.mark.parametrize("start", [start_run_py, start_script])
@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu", "cpu,cpu")], ids=["1+1", "1+2"])
def test_two_hosts_train_as_one_process_does(
    start: Start, devices: tuple[str, str], image_hosts: list[Host], image_losses: list[float]
) -> None:
    all_end(start(image_hosts, *SAME, devices=devices))
    image_hosts[0].has_trained("run", 1 + len(devices[1].split(",")), image_losses)
    assert not image_hosts[1].lines("run", "train"), "only node 0 writes"


def test_fsdp_shards_the_weights_across_both_hosts(
    image_hosts: list[Host], image_losses: list[float]
) -> None:
    all_end(start_run_py(image_hosts, *SAME, "strategy=fsdp", devices=("cpu", "cpu,cpu")))
    image_hosts[0].has_trained("run", 3, image_losses)


def test_name_that_is_a_loopback_address_on_its_own_host(
    slow_hosts: list[Host], slow_losses: list[float], tmp_path: Path
) -> None:
    """Debian's installer maps a host's name to 127.0.1.1 in its /etc/hosts: the host reaches itself by the loopback."""
    for host, address in zip(slow_hosts, ("127.0.1.1", ADDRESSES[0]), strict=True):
        names = tmp_path / f"hosts_{address}"
        names.write_text(f"127.0.0.1 localhost\n{address} node0\n", encoding="utf-8")
        mount = f'mount --bind "{names}" /etc/hosts && exec "$@"'
        host.prefix = (*host.prefix, "unshare", "--mount", "sh", "-c", mount, "sh")
    meeting = (
        "launch.nodes=2",
        "launch.master_addr=node0",
        f"launch.master_port={PORT}",
        "device_ids=cpu",
        "name=run",
    )
    words = (*meeting, "model.seconds_per_step=0")
    code = "from ddp_experiment.launchers import choose_interface; choose_interface('node0')"
    code += "; import os; print(os.environ['GLOO_SOCKET_IFNAME'])"
    printed = slow_hosts[0].start(sys.executable, "-c", code).ended()
    assert printed == f"{INTERFACE}\n"
    all_end(
        [
            host.python(*words, f"launch.node_rank={number}")
            for number, host in enumerate(slow_hosts)
        ]
    )
    slow_hosts[0].has_trained("run", 2, slow_losses)


def test_torchrun_with_its_own_rendezvous(
    image_hosts: list[Host], image_losses: list[float]
) -> None:
    all_end(start_c10d(image_hosts, "device_ids=cpu", *SAME))
    image_hosts[0].has_trained("run", 2, image_losses)


def test_script_says_what_to_type_on_each_node(image_hosts: list[Host]) -> None:
    printed = (
        image_hosts[0]
        .start("scripts/multi_node.sh", "name=run", NNODES="3", MASTER_ADDR="node")
        .ended(2)
    )
    for number in range(3):
        assert (
            f"\n  NNODES=3 NODE_RANK={number} MASTER_ADDR=node scripts/multi_node.sh name=run\n"
            in printed
        )


@pytest.mark.parametrize("words", [["launch.master_addr=127.0.0.1"], ["launch.master_port=0"]])
def test_meeting_place_that_others_cannot_reach_is_refused(
    words: list[str], slow_hosts: list[Host]
) -> None:
    printed = slow_hosts[0].python(*MEETING, *words).ended(2, timeout=30)
    assert printed.startswith(
        "error: launch.nodes=2: needs an address and a port that all nodes reach. "
    )
    assert printed.count("\n") == 1
    assert "Add launch.master_addr=ADDRESS launch.master_port=29500" in printed


@pytest.mark.parametrize("differing", ["config", "source"])
def test_nodes_that_would_train_something_else_are_refused(
    differing: str, slow_hosts: list[Host]
) -> None:
    path = slow_hosts[1].folder / (
        "config.yaml" if differing == "config" else "ddp_experiment/model.py"
    )
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("epochs: 10", "epochs: 11") if differing == "config" else text + "\n", "utf-8"
    )
    printed = "\n".join(all_end(start_script(slow_hosts, NO_RESTART), code=1, timeout=30))
    assert "error: rank 1 would not train what rank 0 does: " in printed
    assert ("training.epochs: 10 -> 11" if differing == "config" else "model.py: ") in printed
    assert not (slow_hosts[0].folder / "runs").exists()


@pytest.mark.parametrize("start", [start_run_py, start_script])
@pytest.mark.parametrize("number", [0, 1], ids=["host of rank 0", "other host"])
def test_killed_rank_restarts_the_ranks_of_both_hosts(
    start: Start, number: int, slow_hosts: list[Host], slow_losses: list[float]
) -> None:
    commands = start(slow_hosts, "checkpoint.every_steps=5")
    slow_hosts[0].wait_for_step("run", 10, *commands)
    (rank,) = slow_hosts[number].ranks()
    rank.kill()
    all_end(commands)
    assert "resuming after step" in commands[0].text
    slow_hosts[0].has_trained("run", 2, slow_losses)


@pytest.mark.parametrize("number", [0, 1])
def test_restart_in_the_middle_of_a_long_step(number: int, slow_hosts: list[Host]) -> None:
    """When torchrun's agent restarts the killed rank, the other rank is still in its long step."""
    commands = start_script(
        slow_hosts, "training.max_steps=4", "checkpoint.every_steps=1", "model.seconds_per_step=2"
    )
    slow_hosts[0].wait_for_step("run", 2, *commands)
    time.sleep(0.3)
    (rank,) = slow_hosts[number].ranks()
    rank.kill()
    all_end(commands)
    assert "resuming after step 2 of 4" in commands[0].text


@pytest.mark.parametrize("number", [0, 1], ids=["host of rank 0", "other host"])
def test_lost_host_ends_the_other(number: int, slow_hosts: list[Host], mark: str) -> None:
    """When torchrun is killed on one host, its ranks die with it. The ranks of the other host must end too."""
    commands = start_script(slow_hosts, NO_RESTART)
    slow_hosts[0].wait_for_step("run", 5, *commands)
    commands[number].process.kill()
    commands[1 - number].ended(1, timeout=60)
    assert left_after(mark, SECONDS_TO_END) == []


@pytest.mark.parametrize("start", [start_run_py, start_script])
def test_request_to_stop_saves_and_the_same_commands_continue(
    start: Start, slow_hosts: list[Host], slow_losses: list[float], mark: str
) -> None:
    commands = start(slow_hosts)
    slow_hosts[0].wait_for_step("run", 5, *commands)
    # on both: to torchrun's agent, ranks that the other host has stopped are failures
    for command in commands:
        command.process.send_signal(signal.SIGTERM)
    all_end(commands, code=1, timeout=30)
    assert left_after(mark, SECONDS_TO_END) == []
    assert slow_hosts[0].summary("run")["status"] == "stopped"
    all_end(start(slow_hosts))
    slow_hosts[0].has_trained("run", 2, slow_losses)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_host_that_waits_for_a_stopped_one_ends_at_once(
    number: int, slow_hosts: list[Host], mark: str
) -> None:
    """After a stop on one host only, torchrun restarts the ranks of the other, which then wait for the stopped host.

    If the stopped host's torchrun is gone before that, so is the store, and the other torchrun ends by itself.
    """
    commands = start_script(slow_hosts)
    slow_hosts[0].wait_for_step("run", 5, *commands)
    torchrun = psutil.Process(commands[1].process.pid)
    former = torchrun.children(recursive=True)
    commands[0].process.send_signal(number)
    commands[0].ended(1, timeout=60)
    assert slow_hosts[0].summary("run")["status"] == "stopped"
    deadline = time.monotonic() + 60
    while (is_alive := commands[1].process.poll() is None) and not set(
        torchrun.children(recursive=True)
    ) - {*former}:
        assert time.monotonic() < deadline, commands[1].text
        time.sleep(0.2)
    if is_alive:
        time.sleep(5)  # until it waits
        assert commands[1].process.poll() is None, commands[1].text
        commands[1].process.send_signal(number)
    commands[1].ended(1, timeout=60)
    assert is_alive or re.search("(?s)_restart_workers.*DistNetworkError", commands[1].text), (
        commands[1].text
    )
    assert left_after(mark, SECONDS_TO_END) == []

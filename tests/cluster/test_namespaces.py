"""Two hosts with a network between them and no folder in common. Their names resolve to nothing."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .conftest import SAME
from .namespaces import ADDRESSES, cable_pulled
from .running import Command, Host, left_after

PORT = "29650"
BY_HAND = ("launch.nodes=2", f"launch.master_addr={ADDRESSES[0]}", f"launch.master_port={PORT}")
SOON = ("launch.timeout_minutes=0.1",)
SECONDS_TO_END = 5
Start = Callable[..., list[Command]]


def start_by_hand(hosts: Sequence[Host], *words: str, devices: Sequence[str] = ("cpu", "cpu")) -> list[Command]:
    """Type the same on both, but for each node's own."""
    return [
        host.python(*BY_HAND, f"launch.node_rank={number}", f"device_ids={devices[number]}", "name=run", *words)
        for number, host in enumerate(hosts)
    ]


def start_script(hosts: Sequence[Host], *words: str) -> list[Command]:
    """scripts/multi_node.sh on both."""
    variables = {"NNODES": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
    return [
        host.start("scripts/multi_node.sh", *words, "device_ids=cpu", "name=run", **variables, NODE_RANK=str(number))
        for number, host in enumerate(hosts)
    ]


def start_c10d(hosts: Sequence[Host], *words: str) -> list[Command]:
    """torchrun's own rendezvous, told what it cannot find out where host names do not resolve."""
    options = "--nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=test".split()
    launcher = sys.executable, "-m", "torch.distributed.run", *options, f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}"
    return [
        host.start(*launcher, f"--local-addr={address}", f"--rdzv-conf=is_host={is_host}", "run.py", "name=run", *words)
        for host, address, is_host in zip(hosts, ADDRESSES, (1, 0), strict=True)
    ]


def all_end(commands: Sequence[Command], code: int | None = 0, timeout: float = 90) -> list[str]:
    """What each has printed."""
    return [command.ended(code, timeout) for command in commands]


def said(printed: str) -> list[str]:
    """The lines that are ours: torch.distributed says that it cannot look up the hosts' names."""
    return [line for line in printed.splitlines() if not line.startswith("[W")]


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu", "cpu,cpu")], ids=["1+1", "1+2"])
def test_nodes_by_hand(
    devices: tuple[str, str],
    image_hosts: list[Host],
    image_losses: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    all_end(start_by_hand(image_hosts, *SAME, devices=devices))
    image_hosts[0].has_trained("run", 1 + len(devices[1].split(",")), image_losses)
    assert not image_hosts[1].lines("run", "train")
    assert not [*tmp_path.glob("pymp-*")]  # the fork servers'


def test_script_for_several_nodes(image_hosts: list[Host], image_losses: list[float]) -> None:
    all_end(start_script(image_hosts, *SAME))
    image_hosts[0].has_trained("run", 2, image_losses)


def test_torchrun_with_its_own_rendezvous(image_hosts: list[Host], image_losses: list[float]) -> None:
    all_end(start_c10d(image_hosts, "device_ids=cpu", *SAME))
    image_hosts[0].has_trained("run", 2, image_losses)


def test_script_says_what_to_type_on_each_node(image_hosts: list[Host]) -> None:
    printed = image_hosts[0].start("scripts/multi_node.sh", "name=run", NNODES="3", MASTER_ADDR="node").ended(2)
    for number in range(3):
        assert f"\n  NNODES=3 NODE_RANK={number} MASTER_ADDR=node scripts/multi_node.sh name=run\n" in printed


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["launch.master_addr=127.0.0.1"], "launch.master_addr"),
        (["launch.master_port=0"], "launch.master_port"),
    ],
)
def test_meeting_place_that_others_cannot_reach_is_refused(words: list[str], key: str, slow_hosts: list[Host]) -> None:
    (line,) = said(slow_hosts[0].python(*BY_HAND, *words).ended(2, timeout=30))
    assert line.startswith(f"error: {words[0]}: ")
    assert f" Add {key}=" in line


@pytest.mark.parametrize("differing", ["config", "source"])
def test_nodes_that_would_train_something_else_are_refused(differing: str, slow_hosts: list[Host]) -> None:
    path = slow_hosts[1].folder / ("config.yaml" if differing == "config" else "ddp_experiment/model.py")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("epochs: 10", "epochs: 11") if differing == "config" else text + "\n", "utf-8")
    for printed in all_end(start_by_hand(slow_hosts), code=2, timeout=30):
        (line,) = said(printed)
        assert line.startswith("error: node 1 would not train what node 0 does: ")
        assert ("training.epochs: 10 -> 11" if differing == "config" else "ddp_experiment/model.py") in line
    assert not (slow_hosts[0].folder / "runs").exists()


def test_two_hosts_with_the_same_number_are_refused(slow_hosts: list[Host]) -> None:
    commands = [host.python(*BY_HAND, "launch.node_rank=0", "launch.timeout_minutes=0.2") for host in slow_hosts]
    codes = [command.process.wait(30) for command in commands]
    assert sorted(codes) == [1, 2]
    (line,) = said(commands[codes.index(2)].text)
    assert line.startswith("error: launch.node_rank=0: another host has this rank already.")


def test_node_that_never_comes_is_named(slow_hosts: list[Host]) -> None:
    (line,) = said(slow_hosts[0].python(*BY_HAND, *SOON, "launch.node_rank=0").ended(1, timeout=30))
    assert "node 1 of 2 did not arrive within 0.1 minutes (launch.timeout_minutes" in line


def test_meeting_that_nobody_serves_is_said(slow_hosts: list[Host]) -> None:
    (line,) = said(slow_hosts[1].python(*BY_HAND, *SOON, "launch.node_rank=1").ended(None, timeout=30))
    assert line.startswith(f"error: launch.master_addr={ADDRESSES[0]} launch.master_port={PORT}: ")
    assert SOON[0] in line


@pytest.mark.parametrize("number", [0, 1], ids=["host of rank 0", "other host"])
def test_killed_rank_ends_the_ranks_of_the_other_host(number: int, slow_hosts: list[Host], mark: str) -> None:
    commands = start_by_hand(slow_hosts)
    slow_hosts[0].wait_for_step("run", 5, *commands)
    (rank,) = slow_hosts[number].ranks()
    rank.kill()
    printed = all_end(commands, code=1, timeout=SECONDS_TO_END)
    assert f"rank {number} (host-{'ab'[number]}, cpu) failed:\nkilled by SIGKILL" in printed[number]
    assert left_after(mark, SECONDS_TO_END) == []


@pytest.mark.parametrize("number", [0, 1], ids=["host of rank 0", "other host"])
def test_lost_host_ends_the_other(number: int, slow_hosts: list[Host], mark: str) -> None:
    """What starts the ranks of a host is killed there, and the ranks with it."""
    commands = start_by_hand(slow_hosts)
    slow_hosts[0].wait_for_step("run", 5, *commands)
    commands[number].process.kill()
    commands[1 - number].ended(1, timeout=2 * SECONDS_TO_END)
    assert left_after(mark, SECONDS_TO_END) == []


def test_lost_network_ends_both_hosts(slow_hosts: list[Host], mark: str) -> None:
    """No connection is closed then; nothing arrives any more."""
    commands = start_by_hand(slow_hosts, *SOON)
    slow_hosts[0].wait_for_step("run", 5, *commands)
    with cable_pulled(slow_hosts[0].prefix):
        all_end(commands, code=1, timeout=40)
        assert left_after(mark, SECONDS_TO_END) == []


def test_request_to_stop_on_one_host_stops_both(slow_hosts: list[Host], slow_losses: list[float], mark: str) -> None:
    commands = start_by_hand(slow_hosts)
    slow_hosts[0].wait_for_step("run", 5, *commands)
    commands[1].process.send_signal(signal.SIGTERM)
    all_end(commands, code=143, timeout=20)
    assert left_after(mark, SECONDS_TO_END) == []
    all_end(start_by_hand(slow_hosts))
    slow_hosts[0].has_trained("run", 2, slow_losses)


@pytest.mark.parametrize(("start", "number"), [(start_script, 0), (start_c10d, 1)])
def test_torchrun_restarts_on_both_hosts(start: Start, number: int, slow_hosts: list[Host]) -> None:
    """In the middle of a long step: the other rank is alive when torchrun's agents have agreed on the restart."""
    words = "training.max_steps=4", "checkpoint.every_steps=1", "model.seconds_per_step=2"
    commands = start(slow_hosts, *words)
    slow_hosts[0].wait_for_step("run", 2, *commands)
    time.sleep(0.3)
    (rank,) = slow_hosts[number].ranks()
    rank.kill()
    all_end(commands)
    assert "resuming after step 2 of 4" in commands[0].text

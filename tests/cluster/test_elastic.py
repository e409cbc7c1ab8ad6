"""Test that nodes come and go while a run trains, and that its result is that of a run which nobody disturbed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from . import namespaces
from .hosts import Command, Host, copy_project, marked, until

WORDS = (
    "device_ids=cpu", "name=run", "checkpoint.every_steps=3", "model.seconds_per_step=0.3",
    "training.global_batch_size=16", "training.epochs=20",
)  # fmt: skip
NUM_STEPS = 140


def start(host: Host, *words: str) -> Command:
    """Let a node take part."""
    # the words for torchrun come last and win: a test need not wait for slow networks
    fast = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    is_host = host is not None and f",is_host={int(words[0] == '0')}"
    return host.start(
        "scripts/multi_node.sh", f"{fast}{is_host}", "--monitor-interval=0.2", *WORDS,
        NNODES="1:3", MASTER_ADDR=namespaces.ADDRESSES[0], MASTER_PORT="29660",
    )  # fmt: skip


def kill(command: Command) -> None:
    """End a node as a power failure does: all of its processes in one moment."""
    family = [
        command.process.pid,
        *(p.pid for p in psutil.Process(command.process.pid).children(True)),
    ]
    for pid in family:
        psutil.Process(pid).suspend()
    for pid in family:
        psutil.Process(pid).send_signal(signal.SIGKILL)
    command.process.wait(30)


def world_sizes(host: Host) -> list[int]:
    """Return the number of ranks of each start that rank 0's log tells."""
    path = host.folder / "runs" / "run" / "logs" / "rank_0.log"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [
        int(line.partition("world_size ")[2][0])
        for line in text.splitlines()
        if ": world_size " in line
    ]


@pytest.mark.timeout(900)
def test_nodes_come_and_go_and_the_weights_are_those_of_an_undisturbed_run(
    slow_project: Path, tmp_path: Path, mark: str
) -> None:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    folder, choose = copy_project(slow_project, tmp_path / "shared"), random.Random(5)
    alone = Host(copy_project(slow_project, tmp_path / "alone"), mark)
    undisturbed = alone.python(*WORDS, "model.seconds_per_step=0.3")
    with namespaces.hosts(3) as prefixes:
        hosts = [Host(folder, mark, prefix) for prefix in prefixes]
        nodes = {0: start(hosts[0], "0")}

        def wait_for(num_ranks: int) -> None:
            former = len(world_sizes(hosts[0]))
            until(
                lambda: world_sizes(hosts[0])[former - 1 :][-1:] == [num_ranks],
                f"{num_ranks} ranks: {world_sizes(hosts[0])}",
                120,
            )
            step = max((line["step"] for line in hosts[0].lines("run", "train")), default=0)
            hosts[0].wait_for_step("run", step + 4, *nodes.values(), timeout=120)

        hosts[0].wait_for_step("run", 3, *nodes.values())
        for number in (1, 2):
            nodes[number] = start(hosts[number], str(number))
            wait_for(number + 1)
        for _ in range(2):
            time.sleep(choose.uniform(0, 2))
            victim = choose.choice((1, 2))
            kill(nodes.pop(victim))
            wait_for(2)
            nodes[victim] = start(hosts[victim], str(victim))
            wait_for(3)
        for node in nodes.values():
            node.ended(timeout=300)
        steps = [line["step"] for line in hosts[0].lines("run", "train")]
    undisturbed.ended(timeout=300)
    assert steps == list(range(1, NUM_STEPS + 1)), "each step is counted once"
    assert {1, 2, 3} <= set(world_sizes(hosts[0]))
    weights, expected = (
        load_file(host.folder / "runs" / "run" / "model.safetensors") for host in (hosts[0], alone)
    )
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)
    losses = [line["loss"] for line in hosts[0].lines("run", "train")]
    assert losses == pytest.approx([line["loss"] for line in alone.lines("run", "train")], rel=1e-5)
    assert not marked(mark)

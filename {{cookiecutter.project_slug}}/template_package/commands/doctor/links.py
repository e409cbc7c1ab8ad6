"""All-reduces between two ranks, in processes of their own: what hangs there is named, and ended."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from ...config import LaunchConfig
from ...launching.devices import GIB
from ...launching.distributed import RankContext, join_group, leave_group, set_context
from ...launching.environment import choose_interface
from ...launching.launcher import serve_local_store
from ...launching.processes import die_with_parent, end_process
from . import describe

NUM_FLOATS, NUM_TIMES = 2**22, 5  # 16 MiB
NO_ANSWER = "no answer in time (or one of the two hangs in another pair)"


def measure_pairs(devices: list[str], launch: LaunchConfig, deadline: float) -> dict[tuple[int, int], str]:
    """For each two GPUs and each two CPU ranks the speed, as `1.2 GiB/s`, or the problem.

    devices: one for each rank. It returns before `deadline`, a value of time.monotonic().
    """
    alike = [(i, j) for i, j in combinations(range(len(devices)), 2) if (devices[i] == "cpu") == (devices[j] == "cpu")]
    pairs = sorted(alike, key=lambda pair: sum(pair) % len(devices))  # in rounds, whose pairs have no rank in common
    store = serve_local_store()
    start: Any = start_processes
    ranks = start(_run_rank, (devices, pairs, launch, store.port), nprocs=len(devices), join=False, daemon=True)
    with suppress(dist.DistError):  # some do not answer in time
        patience = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        store.wait([f"{pair} {rank}" for pair in pairs for rank in pair], patience)
    results = dict[tuple[int, int], str]()
    for pair in alike:
        for key in (f"{pair} {rank}" for rank in pair):
            answer = store.get(key).decode() if store.check([key]) else NO_ANSWER
            if results.get(pair, "GiB/s").endswith("GiB/s"):  # a problem stands before a speed
                results[pair] = answer
    for process in ranks.processes:
        process.kill()
    return results


def _run_rank(rank: int, devices: list[str], pairs: list[tuple[int, int]], launch: LaunchConfig, port: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    store, device = dist.TCPStore("127.0.0.1", port, is_master=False), torch.device(devices[rank])
    for pair in (pair for pair in pairs if rank in pair):
        own = RankContext(pair.index(rank), 2, devices=(device,), store=dist.PrefixStore(f"group {pair}", store))
        try:
            set_context(own)
            choose_interface(launch.network_interface, "127.0.0.1", is_one_machine=True)
            backend = "gloo" if device.type == "cpu" else launch.backend
            join_group(own, backend, timedelta(minutes=1))  # it will be killed before
            values = torch.ones(NUM_FLOATS, device=device)
            dist.all_reduce(values)  # the first one makes the connections
            values[0].item()  # waits for the GPU
            started_at = time.perf_counter()
            for _ in range(NUM_TIMES):
                dist.all_reduce(values)
            is_right = bool((values == 2 ** (NUM_TIMES + 1)).all())
            speed = NUM_TIMES * values.nbytes / GIB / (time.perf_counter() - started_at)
            answer = f"{speed:.1f} GiB/s" if is_right else "the sum is wrong"
        except Exception as error:
            answer = f"{device}: {describe(error)}"
        store.set(f"{pair} {rank}", answer)
        leave_group()
    end_process(0)

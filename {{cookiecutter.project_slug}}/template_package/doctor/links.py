"""All-reduces between two ranks, in processes of their own: what hangs there is named, and ended."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from datetime import timedelta
from itertools import combinations
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from ..launching.network import choose_interface
from ..launching.starting import die_with_parent
from .findings import Finding, Surroundings, in_one_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

GIB = 2**30
NUM_FLOATS, NUM_TIMES = 2**22, 5  # 16 MiB
FAREWELL_SECONDS = 2.0
"""So long before the deadline of all checks these here give up, to say which pair it was."""
HANGS, NOT_TRIED = "no answer in time", "not tried, as one of the two hangs elsewhere"
Pair = tuple[int, int]


def check_gloo(around: Surroundings) -> list[Finding]:
    """Two CPU ranks over the interface that a run would use. GPU ranks meet through gloo as well."""
    around.torch.result()
    config = around.find_config()
    wanted, address = (config.launch.network_interface, config.launch.master_addr) if config else (None, "127.0.0.1")
    result = measure_pairs(["cpu"] * 2, "gloo", wanted, address, around.deadline - FAREWELL_SECONDS)[0, 1]
    key = "launch.network_interface" if wanted else "GLOO_SOCKET_IFNAME"
    name = wanted or around.environment.get(key)
    detail = f"two CPU ranks, {f'{key}={name}, ' if name else ''}all-reduce"
    if isinstance(result, float):
        return [Finding("gloo", "ok", f"{detail} at {result:.1f} GiB/s")]
    interfaces = ", ".join(interface for _, interface in socket.if_nameindex())
    remedy = f"Unset {key}." if name else f"Set launch.network_interface to one of {interfaces}."
    return [Finding("gloo", "broken", f"{detail}: {result}", remedy)]


def measure_pairs(
    devices: list[str], backend: str, interface: str | None, address: str, deadline: float
) -> dict[Pair, float | str]:
    """For each two of the devices GiB/s of an all-reduce, or what went wrong. It returns before `deadline`.

    interface, address: as choose_interface wants them.
    """
    from ..launching.meeting import serve_local_store  # here, since it imports torch

    store = serve_local_store()
    context = multiprocessing.get_context("spawn")
    processes, reports = [], list[Connection]()
    for rank in range(len(devices)):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (rank, devices, backend, interface, address, store.port, deadline, sender)
        processes.append(context.Process(target=_run_rank, args=arguments))
        processes[-1].start()
        sender.close()
        reports.append(receiver)
    results: dict[Pair, float | str] = dict.fromkeys(combinations(range(len(devices)), 2), NOT_TRIED)
    while reports and (patience := deadline - time.monotonic()) > 0:
        for report in wait(reports, timeout=patience):
            assert isinstance(report, Connection)
            try:
                pair, result = report.recv()
            except EOFError:
                reports.remove(report)
                continue
            if isinstance(results[pair], float) or results[pair] in (NOT_TRIED, HANGS):  # the first error is the cause
                results[pair] = result
    for process in processes:
        process.kill()
    return results


def _run_rank(
    rank: int,
    devices: list[str],
    backend: str,
    interface: str | None,
    address: str,
    port: int,
    deadline: float,
    report: Connection,
) -> None:
    """Sends (pair, result) for each pair that this rank belongs to; while that is tried, the result is HANGS."""
    import torch
    import torch.distributed as dist

    die_with_parent()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        choose_interface(interface, address)
        ones = torch.ones(NUM_FLOATS, device=devices[rank])
        store.set(f"problem/{rank}", "")
    except Exception as error:
        store.set(f"problem/{rank}", f"{devices[rank]}: {in_one_line(error)}")
    pairs = sorted(combinations(range(len(devices)), 2), key=lambda pair: sum(pair) % len(devices))
    for pair in (pair for pair in pairs if rank in pair):  # in rounds: the pairs of a round have no rank in common
        if rank == pair[0]:
            report.send((pair, HANGS))
        problem = "; ".join(filter(None, (store.get(f"problem/{other}").decode() for other in pair)))
        timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            group = dist.PrefixStore(f"pair/{pair}", store)
            report.send((pair, problem or _all_reduce(ones, backend, group, pair.index(rank), timeout)))
        except Exception as error:
            report.send((pair, in_one_line(error)))
    report.close()
    os._exit(0)  # gloo's threads abort about one interpreter exit in ten (torch 2.13)


def _all_reduce(ones: Tensor, backend: str, store: Store, rank: int, timeout: timedelta) -> float | str:
    """GiB/s between the two that meet in `store`, or that they do not add up."""
    import torch
    import torch.distributed as dist

    is_cuda = ones.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(ones.device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    values = ones.clone()
    dist.all_reduce(values)  # the first one makes the connections
    if is_cuda:
        torch.cuda.synchronize()
    started_at = time.perf_counter()
    for _ in range(NUM_TIMES):
        dist.all_reduce(values)
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started_at
    dist.destroy_process_group()
    is_right = bool((values == 2 ** (NUM_TIMES + 1)).all())
    return NUM_TIMES * values.nbytes / GIB / seconds if is_right else "the sum is wrong"

"""Where the ranks of a launcher, or nodes, meet: they find the store, agree on what they run, say who is missing."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import Config, LaunchConfig, differing_keys, to_dict
from ..validation import ConfigError, FailureError
from .environment import Launched
from .starting import RunEnds

Fingerprint = dict[str, Any]
FAREWELL_SECONDS = 30.0
UNHEARD = "stop/unheard"
"""Set by a rank that has stopped because another one of its node was asked to. torchrun's agent asks all ranks of its
node, also before it starts them again for a crash elsewhere: then they shall begin again.
"""


def arrival_timeout(launch: LaunchConfig) -> timedelta:
    """How long those who are there wait for the others, who may be waiting for devices."""
    return timedelta(minutes=launch.timeout_minutes + launch.wait_minutes)


def serve_local_store() -> dist.TCPStore:
    """Where the processes of one machine meet; no other machine reaches it. The system chooses the port, which is taken
    as long as the store lives: no two runs can collide.
    """
    # A socket of ours: torch would listen on every interface, and ask the name service for the name of each who comes.
    listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def open_store(launched: Launched, timeout: timedelta) -> tuple[dist.Store, Launched]:
    """Where the ranks of a launcher meet, and this one's place with the number of this attempt. ConfigError if rank 0
    cannot serve it, or does not; RunEnds if a rank of an attempt before was asked to stop.
    """
    is_served_here = launched.rank == 0 and not launched.is_store_served
    address, port = launched.master_addr, launched.master_port
    try:
        if not is_served_here:
            wait_for_server(address, port, timeout)
        store = dist.TCPStore(address, port, is_master=is_served_here, wait_for_workers=False, timeout=timeout)
    except (dist.DistError, OSError) as error:
        raise ConfigError(
            f"MASTER_ADDR={address} MASTER_PORT={port}: rank {launched.rank} finds no meeting there "
            f"({str(error).splitlines()[0]}). Start every rank, or set launch.master_addr and launch.master_port."
        ) from None
    if launched.is_store_served:
        launched = launched._replace(attempt=_number_of_attempt(store, launched.rank, launched.world_size, timeout))
        for attempt in range(launched.attempt):
            before = dist.PrefixStore(f"attempt_{attempt}", store)
            if before.check([UNHEARD]):
                if launched.local_rank == 0:
                    print("one rank was asked to stop, and all have: they do not begin again", file=sys.stderr)
                raise RunEnds(128 + int(before.get(UNHEARD)))
    # After a restart torchrun hands on the same store: without a prefix the new ranks read the dead ones' addresses.
    return dist.PrefixStore(f"attempt_{launched.attempt}", store), launched


def _number_of_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> int:
    """How often the ranks have been started before. torchrun's own count differs between nodes: with the c10d
    rendezvous a node counts only failures of its own. So rank 0 counts, and tells each rank that asks it under a name
    which no rank has had before: what the dead ones have asked and heard is still in the store.
    """
    if rank > 0:
        name = uuid.uuid4().hex
        store.set(f"asks/{rank}", name)
        try:
            attempt = int(store.get(f"answer/{name}"))
        except dist.DistError as error:
            raise missing("rank 0", world_size, timeout, error) from None
        store.set(f"heard/{name}/{attempt}", "1")
        return attempt
    attempt = store.add("attempts", 1) - 1
    waiting, deadline = set(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    while waiting:
        for other in [other for other in waiting if store.check([f"asks/{other}"])]:
            name = store.get(f"asks/{other}").decode()
            store.set(f"answer/{name}", str(attempt))
            if store.check([f"heard/{name}/{attempt}"]):
                waiting.remove(other)
        if waiting and time.monotonic() > deadline:
            raise missing(f"rank {', '.join(map(str, sorted(waiting)))}", world_size, timeout)
        time.sleep(0.02)
    return attempt


def agree(
    store: dist.Store, kind: str, number: int, count: int, own: Fingerprint, timeout: timedelta
) -> list[Fingerprint]:
    """What all `count` of a kind ("node", "rank") say of themselves, `own` from this one, whose number is given.

    ConfigError on all of them, which names who has not come, or in what they differ.
    """
    keys = [f"{kind}/{other}" for other in range(count)]
    try:
        store.set(keys[number], json.dumps(own))
        store.wait(keys, timeout)
        found: list[Fingerprint] = [json.loads(store.get(key)) for key in keys]
        num_read, deadline = store.add(f"{kind}/num_read", 1), time.monotonic() + FAREWELL_SECONDS
        while number == 0 and num_read < count and time.monotonic() < deadline:  # the store may be here: who serves it
            time.sleep(0.01)  # must not end before all have read
            num_read = store.add(f"{kind}/num_read", 0)
    except dist.DistError as error:
        raise missing(_absent(store, kind, keys), count, timeout, error) from None
    for other, theirs in enumerate(found):
        if lines := differing_keys(found[0] | {"num_devices": 0}, theirs | {"num_devices": 0}):
            raise ConfigError(
                f"{kind} {other} would not train what {kind} 0 does: {'; '.join(lines[:5])} "
                f"({kind} 0 -> {kind} {other}). Bring both to one state."
            )
    return found


def _absent(store: dist.Store, kind: str, keys: list[str]) -> str:
    try:
        return f"{kind} " + ", ".join(str(number) for number, key in enumerate(keys) if not store.check([key]))
    except dist.DistError:
        return f"{kind} 0, or another before it,"  # the store is gone, and number 0 held it


def missing(who: str, count: int, timeout: timedelta, error: Exception | None = None) -> FailureError:
    """To be raised when somebody has not come."""
    reason = f" ({str(error).splitlines()[0]})" if error else ""
    return FailureError(
        f"{who} of {count} did not arrive within {timeout.total_seconds() / 60:g} minutes (launch.timeout_minutes, and "
        f"launch.wait_minutes){reason}. See there what happened; a longer start needs a higher value."
    )


def wait_for_server(address: str, port: int, timeout: timedelta) -> None:
    """Until somebody listens there. OSError if nobody does in time: TCPStore would print pages of C++ then."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def fingerprint(config: Config) -> Fingerprint:
    """What must be the same on all nodes: the versions, the config but for what is each node's own, the sources."""
    own = ("launch", "device_ids")
    package = Path(__file__).parents[1]
    sources = [package.with_name("run.py"), *sorted(package.rglob("*.py"))]
    return {
        "torch": torch.__version__,
        "config": {key: value for key, value in to_dict(config).items() if key not in own},
        "source of": {
            path.relative_to(package.parent).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for path in sources
        },
    }

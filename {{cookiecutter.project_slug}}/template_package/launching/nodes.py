"""Several nodes by hand: `python run.py launch.nodes=2 launch.node_rank=…` is typed on each, and they meet at node 0.

One process a node speaks here, the one that starts its ranks. The nodes tell each other how many ranks they have and
what they run; when one of them ends, the others do.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..config import LaunchConfig
from ..validation import ConfigError
from .meeting import FAREWELL_SECONDS, Fingerprint, agree, arrival_timeout, wait_for_server

T = TypeVar("T")
FAREWELL_AFTER_FAILURE_SECONDS = 3.0  # those who live read who was first; a lost host will not come
SILENCE_SECONDS = 15.0  # beyond launch.timeout_minutes, by which ranks notice themselves, and write their stacks down


class Nodes:
    """This node among launch.nodes. ConfigError if they do not meet in launch.timeout_minutes or run different code."""

    def __init__(self, launch: LaunchConfig, num_devices: int, fingerprint: Fingerprint) -> None:
        self._launch, self.node_rank = launch, launch.node_rank
        self._timeout = timedelta(minutes=launch.timeout_minutes)
        self._base = self._open_store()
        if self._base.add(f"node/{self.node_rank}/taken", 1) > 1:
            raise ConfigError(
                f"launch.node_rank={self.node_rank}: another host has this rank already. Give each host its own, "
                f"from 0 to {launch.nodes - 1}."
            )
        own = {"num_devices": num_devices, **fingerprint}
        others = agree(self._base, "node", self.node_rank, launch.nodes, own, arrival_timeout(launch))
        self.num_devices = [int(node["num_devices"]) for node in others]
        """Of each node."""
        self._store: dist.Store = self._base
        self._attempt = 0
        self._first_to_end: tuple[int, int] | None = None  # node and exit code
        self._heard = time.monotonic()

    @property
    def first_rank(self) -> int:
        """The rank of this node's first process."""
        return sum(self.num_devices[: self.node_rank])

    def begin_attempt(self) -> tuple[dist.Store, str]:
        """A store of this attempt's own, and its prefix: the ranks before have left their addresses in theirs."""
        prefix, self._attempt = f"attempt_{self._attempt}", self._attempt + 1
        self._store = dist.PrefixStore(prefix, self._base)
        self._first_to_end, self._heard = None, time.monotonic()
        threading.Thread(target=self._listen, args=(self._store,), daemon=True).start()
        return self._store, prefix

    def announce(self, code: int) -> None:
        """Tell the others that ranks of this node have failed, unless one of them was first."""

        def tell() -> None:
            self._first_to_end = _parse(self._store.compare_set("ended", "", f"{self.node_rank} {code}"))

        ask(tell, FAREWELL_AFTER_FAILURE_SECONDS)

    def has_ended(self) -> bool:
        """Whether another node has told that, or node 0 is gone."""
        return self.ended_elsewhere() is not None

    def ended_elsewhere(self) -> tuple[int, int] | None:
        """The other node that was the first to end, and its exit code; None if none was."""
        ended = self._first_to_end
        if ended is None and time.monotonic() - self._heard > self._timeout.total_seconds() + SILENCE_SECONDS:
            ended = 0, 1
        return None if ended is None or ended[0] == self.node_rank else ended

    def leave(self, *, is_failure: bool) -> None:
        """Wait for the other nodes to be done with the store, if it is here."""

        def wait() -> None:
            self._base.add("left", 1)
            while self.node_rank == 0 and self._base.add("left", 0) < self._launch.nodes:
                time.sleep(0.05)

        ask(wait, FAREWELL_AFTER_FAILURE_SECONDS if is_failure else FAREWELL_SECONDS)

    def _listen(self, store: dist.Store) -> None:
        """Look whether another node has ended, in a thread of its own for the reason that `ask` has."""
        while self._store is store and self._first_to_end is None:
            try:
                if store.check(["ended"]):
                    self._first_to_end = _parse(store.get("ended"))
            except dist.DistError:  # node 0 is gone, and the store with it
                self._first_to_end = (0, 1) if self.node_rank > 0 else None
                return
            self._heard = time.monotonic()
            time.sleep(0.2)

    def _open_store(self) -> dist.TCPStore:
        address, port = self._launch.master_addr, self._launch.master_port
        try:
            if self.node_rank > 0:
                wait_for_server(address, port, arrival_timeout(self._launch))
            return dist.TCPStore(
                address, port, is_master=self.node_rank == 0, wait_for_workers=False, timeout=self._timeout
            )
        except (dist.DistError, OSError) as error:
            reason = str(error).splitlines()[0]
            if self.node_rank == 0:
                remedy = f"Is it this host's ({socket.gethostname()}) address, and the port free? Choose another."
            else:
                remedy = (
                    f"Type the same command with launch.node_rank=0 on the host with that address, within "
                    f"launch.timeout_minutes={self._launch.timeout_minutes:g}, and let its firewall pass the port."
                )
            raise ConfigError(
                f"launch.master_addr={address} launch.master_port={port}: no meeting there ({reason}). {remedy}"
            ) from None


def ask(call: Callable[[], T], seconds: float) -> T | None:
    """What a call returns; None if the store is gone, or no answer comes in time. A host that is lost without a word
    (no power, no network) closes no connection: calls to its store never return. Nor do those to a disk that hangs.
    """
    answers: list[T] = []

    def attempt() -> None:
        with suppress(dist.DistError):
            answers.append(call())

    (thread := threading.Thread(target=attempt, daemon=True)).start()
    thread.join(seconds)
    return answers[0] if answers else None


def _parse(ended: bytes) -> tuple[int, int]:
    node_rank, code = map(int, ended.split())
    return node_rank, code

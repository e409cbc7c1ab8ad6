"""Hosts on one machine: network namespaces with host names of their own, each joined to a switch by a virtual cable.

The namespaces have no names and belong to two sleeping processes that die with pytest, so nothing is left behind and
two test runs cannot collide. The host names resolve to no address, which is a harder condition than on a cluster.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .hosts import prepare_child

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
INTERFACE = "cable"


def why_not() -> str | None:
    """Return the reason why this machine cannot have two such hosts, or None if it can."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here (Debian: iproute2, util-linux)"
    try:
        with hosts(2):
            return None
    except (subprocess.CalledProcessError, AssertionError) as error:
        details = (getattr(error, "stderr", "") or str(error)).strip()
        return f"network namespaces are not allowed here ({details})"


@contextmanager
def hosts(number: int) -> Iterator[list[tuple[str, ...]]]:
    """Yield the prefixes that run a command on each of the hosts, whose addresses are the first of ADDRESSES."""
    with ExitStack() as stack:
        letters = ("switch", *"abc"[:number])
        holders = [stack.enter_context(_namespace(f"host-{letter}")) for letter in letters]
        switch, *pids = (str(holder.pid) for holder in holders)
        at_switch = ("nsenter", "-t", switch, "-n", "ip")
        _run(*at_switch, "link", "add", "bridge", "type", "bridge")
        _run(*at_switch, "link", "set", "bridge", "up")
        for index, pid in enumerate(pids):
            port = f"port{index}"
            _run(
                *("ip", "link", "add", INTERFACE, "netns", pid),
                *("type", "veth", "peer", "name", port, "netns", switch),
            )
            _run(*at_switch, "link", "set", port, "master", "bridge")
            _run(*at_switch, "link", "set", port, "up")
            inside = ("nsenter", "-t", pid, "-n", "ip")
            _run(*inside, "address", "add", f"{ADDRESSES[index]}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _run(*inside, "link", "set", device, "up")
        yield [("nsenter", "-t", pid, "-n", "-u") for pid in pids]


@contextmanager
def _namespace(host_name: str) -> Iterator[subprocess.Popen[str]]:
    holder = subprocess.Popen(
        [
            "unshare",
            "--net",
            "--uts",
            "sh",
            "-c",
            f"hostname {host_name} && echo ready && exec sleep infinity",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare_child,  # noqa: PLW1509 - the tests have no threads
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "ready\n":
            raise subprocess.CalledProcessError(
                holder.wait(), "unshare", stderr=holder.stderr.read()
            )
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)

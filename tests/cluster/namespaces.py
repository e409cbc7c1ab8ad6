"""Two hosts on one machine: two network namespaces, joined by a virtual cable (veth), each with its own host name.

The namespaces have no names and belong to two sleeping processes that die with pytest, so nothing is left behind and
two test runs cannot collide. The host names resolve to no address, which is a harder condition than on a cluster.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .hosts import prepare_child

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable"


def why_not() -> str | None:
    """Return the reason why this machine cannot have two such hosts, or None if it can."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here (Debian: iproute2, util-linux)"
    try:
        with two_hosts():
            return None
    except (subprocess.CalledProcessError, AssertionError) as error:
        details = (getattr(error, "stderr", "") or str(error)).strip()
        return f"network namespaces are not allowed here ({details})"


@contextmanager
def two_hosts() -> Iterator[list[tuple[str, ...]]]:
    """Yield the prefixes that run a command on the first and the second host, whose addresses are ADDRESSES."""
    with ExitStack() as stack:
        holders = [stack.enter_context(_namespace(f"host-{letter}")) for letter in "ab"]
        first, second = (str(holder.pid) for holder in holders)
        ends = (
            "name",
            INTERFACE,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            second,
        )
        _run("ip", "link", "add", *ends)
        for pid, address in zip((first, second), ADDRESSES, strict=True):
            inside = ("nsenter", "-t", pid, "-n", "ip")
            _run(*inside, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _run(*inside, "link", "set", device, "up")
        yield [("nsenter", "-t", pid, "-n", "-u") for pid in (first, second)]


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

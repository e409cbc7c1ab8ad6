"""Which network interface reaches the other nodes: gloo otherwise takes that of the host's name, often the loopback."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

from ..validation import ConfigError

SIOCGIFADDR = 0x8915  # Linux: an interface's address, see netdevice(7)


def choose_interface(wanted: str | None, address: str) -> None:
    """Let gloo, and NCCL if `wanted` is named, use that interface; else gloo the one that leads to `address`.

    ConfigError for an interface that this host does not have. What the environment says already stays.
    """
    names = [name for _, name in socket.if_nameindex()]
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(
                f"launch.network_interface={wanted}: this host ({socket.gethostname()}) has {', '.join(names)}. "
                "Name one of these, or null to take the one that leads to launch.master_addr."
            )
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = wanted
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (found := _interface_towards(address, names)):
        os.environ["GLOO_SOCKET_IFNAME"] = found


def _interface_towards(address: str, names: list[str]) -> str | None:
    if sys.platform != "linux":
        return "lo0" if address == "127.0.0.1" else None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: the system only chooses the way
            own: str = probe.getsockname()[0]
            return next((name for name in names if _address_of(name, probe) == own), None)
    except OSError:
        return None  # IPv6 alone, or no way there: gloo and the store will say so


def _address_of(name: str, probe: socket.socket) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:  # the interface has no address
        return None
    return socket.inet_ntoa(answer[20:24])

"""Reads the rank numbers that horovodrun gives to each process."""

import os

from .core.settings import CommandLine
from .launchers import LOOPBACK, is_loopback, read_numbers, set_place

NAMES = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)


def adopt(line: CommandLine) -> None:
    """Set torchrun's variables. The ranks meet at launch.master_addr or, if it is a loopback, on horovodrun's host."""
    *place, server = read_numbers(NAMES)
    address = line.get("launch.master_addr", LOOPBACK)
    if is_loopback(address):  # that host mostly runs rank 0
        address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", address)
    set_place(place, address, line, f"horovodrun {server}")

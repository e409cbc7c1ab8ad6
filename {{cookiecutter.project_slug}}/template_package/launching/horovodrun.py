"""Reads the rank numbers that horovodrun gives to each process."""

from collections.abc import Mapping

from ..config import LaunchConfig
from .environment import Launched, is_loopback, port_for, read_numbers

PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
NAMES = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    PORT,
)


def find(environment: Mapping[str, str], launch: LaunchConfig) -> Launched:
    """Read the rank numbers. The ranks meet at launch.master_addr or, if it is a loopback, on horovodrun's host."""
    rank, world_size, local_rank, local_world_size, node_rank, server = read_numbers(
        environment, NAMES
    )
    address = launch.master_addr
    if is_loopback(address):  # that host mostly runs rank 0
        address = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", address)
    port = launch.master_port or port_for(f"horovodrun {server}")
    return Launched(
        "horovodrun", rank, world_size, local_rank, local_world_size, node_rank, address, port
    )

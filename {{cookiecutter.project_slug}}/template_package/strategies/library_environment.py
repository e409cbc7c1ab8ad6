"""Sets environment variables that Accelerate, DeepSpeed and Horovod read when they start."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..core.ranks import Rank


def launch_variables(rank: Rank) -> dict[str, str]:
    """Return torchrun's variables for this rank. LOCAL_RANK is the index of the rank's GPU, if it has one."""
    return {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank if rank.device.index is None else rank.device.index),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "MASTER_ADDR": os.environ.get(
            "MASTER_ADDR", "127.0.0.1"
        ),  # must be set; nobody connects, the group exists
        "MASTER_PORT": os.environ.get("MASTER_PORT", "0"),
    }


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Inside this context, set these environment variables. A value of None unsets the variable."""
    former = {name: os.environ.get(name) for name in changes}

    def change(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    change(changes)
    try:
        yield
    finally:
        change(former)

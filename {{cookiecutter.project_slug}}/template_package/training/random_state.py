"""The random generators of a rank: seeding, reading and setting all of them together."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch

from ..launching.distributed import RankContext, gather_objects, pack, unpack


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy, torch and CUDA alike."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every CUDA device too


def seed_cpu_generators(value: int) -> None:
    """Seed Python, NumPy and torch on the CPU: torch.manual_seed would move the GPU's generator too."""
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


def mix(seed: int, epoch: int, index: int) -> int:
    """A 63-bit seed that differs for every (seed, epoch, index): neighbours share no bits, as sums of them would."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def cpu_generators_put_back() -> Iterator[None]:
    """What the body draws on the CPU, and how it seeds, leaves the run's own generators where they were."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def restore_random_states(state: dict[str, Any] | None, seed: int, step: int, context: RankContext) -> None:
    """Put back this rank's generators from a checkpoint; without one, or with one of other ranks, they begin anew."""
    # Each rank its own (dropout differs by rank), from `step` on; also a GPU's, which a checkpoint from CPUs lacks.
    seed_generators(mix(seed, -1 - context.rank, step))
    if state is not None and len(state["random_states"]) == context.world_size:
        set_random_states(state["random_states"][context.rank], *context.devices)


def gather_random_states(context: RankContext) -> list[dict[str, Any]] | None:
    """On rank 0 the states of all ranks, for a checkpoint; None on the others. All ranks call it."""
    states = gather_objects(pack(get_random_states(*context.devices)))
    return None if states is None else [unpack(packed) for packed in states]


def get_random_states(*devices: torch.device) -> dict[str, Any]:
    """The states of the generators of this rank and its devices, in types that torch.load(weights_only=True) takes."""
    name, keys, position, has_gauss, gauss = cast(tuple[Any, ...], numpy.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.copy()), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"],
    }


def set_random_states(states: dict[str, Any], *devices: torch.device) -> None:
    """Put back what get_random_states() gave; a CUDA state is used on CUDA only."""
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    numpy.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    gpus = [device for device in devices if device.type == "cuda"]
    for device, state in zip(gpus, states["cuda"], strict=False):  # a checkpoint may be of fewer
        torch.cuda.set_rng_state(state, device)

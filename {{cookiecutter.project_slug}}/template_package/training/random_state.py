"""The random generators of a rank: seeding, reading and setting all of them together."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import torch

from ..launching.distributed import RankContext
from .fetching import mix


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy, torch and CUDA alike."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every CUDA device too


def seed_rank(seed: int, rank: int, step: int) -> None:
    """Give this rank generators of its own (dropout differs by rank), from `step` on."""
    seed_generators(mix(seed, -1 - rank, step))


def restore_random_states(state: dict[str, Any] | None, seed: int, step: int, context: RankContext) -> None:
    """Put back this rank's generators from a checkpoint; without one, or with one of other ranks, they begin anew."""
    seed_rank(seed, context.rank, step)  # first, also for a GPU's generator that a checkpoint from CPUs lacks
    if state is not None and len(state["random_states"]) == context.world_size:
        set_random_states(state["random_states"][context.rank], *context.devices)


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

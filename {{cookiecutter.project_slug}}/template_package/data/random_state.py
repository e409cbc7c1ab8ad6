"""The random generators of a rank: seeding, reading and setting all of them together."""

import ctypes
import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch


def seed_generators(seed: int, *, is_cpu_only: bool = False) -> None:
    """Seed Python, NumPy and torch; the CUDA devices too, unless is_cpu_only."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    if is_cpu_only:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def derive_seed(seed: int, epoch: int, index: int) -> int:
    """A 63-bit seed that differs for every (seed, epoch, index): neighbours share no bits, as sums of them would."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
    """Set the states that get_random_states() gave. CUDA states of other devices than these are left out."""
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    numpy.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    gpus = [device for device in devices if device.type == "cuda"]
    for device, state in zip(gpus, states["cuda"], strict=False):  # the checkpoint may hold fewer
        torch.cuda.set_rng_state(state, device)


def python_and_numpy() -> bytes:
    """The memory of Python's and NumPy's generators, which every draw changes. Their states take 30 times as long."""
    python = id(vars(random)["_inst"]) + object.__basicsize__  # CPython's own struct: the position, then 624 words
    numpys = cast(Any, numpy.random).get_bit_generator().ctypes.state_address  # 624 words, then the position
    return ctypes.string_at(python, 4 * 625) + ctypes.string_at(numpys, 4 * 625)


@contextmanager
def generators_restored(*devices: torch.device) -> Iterator[None]:
    """Restore the CPU generators, and those of these devices, after the body has drawn from them or seeded them."""
    states = get_random_states(*devices)
    try:
        yield
    finally:
        set_random_states(states, *devices)

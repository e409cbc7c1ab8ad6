"""Seeds the random generators, and finds those that a data set owns."""

import gc
import hashlib
import random
import struct
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from ..errors import ConfigError

PLAIN = (str, int, float, bytes, type(None))  # these lead to no random generator


def seed_generators(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch, on all devices."""
    if (name := type(cast(Any, numpy.random).get_bit_generator()).__name__) != "MT19937":
        problem = f"{name} keeps half of a pair of normal numbers when it is seeded"
        raise ConfigError(f"numpy.random.set_bit_generator(): {problem}. Leave the call out.")
    torch.manual_seed(seed)
    seed_cpu(seed)


def seed_cpu(seed: int, others: Iterable[Any] = ()) -> None:
    """Seed the random generators of the CPU, and give each of the `others` a seed of its own."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() takes 80 microseconds
    for own_seed, other in enumerate(others, start=seed + 1):
        if isinstance(other, numpy.random.Generator):
            other.bit_generator.state = type(other.bit_generator)(own_seed).state
        else:
            (other.manual_seed if isinstance(other, torch.Generator) else other.seed)(
                own_seed % 2**32
            )


def generators_of(*roots: Any) -> list[Any]:
    """Return the random generators that the roots lead to, in the same order in every process. It calls no user code.

    Attributes, containers, closures, classes, and the globals of functions in this package lead on.
    """
    kinds = numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator
    global_ones: Any = random.seed, numpy.random.rand, torch.default_generator.seed
    found, reached, seen = list[Any](), [*roots], {id(method.__self__) for method in global_ones}
    package, libraries = __name__.partition(".")[0], {*sys.stdlib_module_names, "torch", "numpy"}
    for value in reached:  # it grows
        is_code = (
            isinstance(value, type | FunctionType)
            and str(value.__module__).partition(".")[0] in libraries
        )
        is_other = type(value) is dict and not str(value.get("__package__", package)).startswith(
            package
        )
        if isinstance(value, kinds):
            found.append(value)
        elif (
            not is_code
            and not is_other
            and not isinstance(value, Tensor | ModuleType)
            and len(reached) < 20_000
        ):
            parts = {
                id(x): x
                for x in gc.get_referents(value)[:500]
                if id(x) not in seen and not isinstance(x, PLAIN)
            }
            seen.update(parts)
            reached += parts.values()
    return found


def derive_seed(seed: int, epoch: int, index: int) -> int:
    """Hash (seed, epoch, index) to a 63-bit seed. Adding up the three would often give the same seed twice."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_alike(seed: int, number: int) -> None:
    """Seed, alike on all ranks, what model.py draws between micro-batches. Each number gives other draws."""
    seed_generators(derive_seed(seed, -(2**20), number))

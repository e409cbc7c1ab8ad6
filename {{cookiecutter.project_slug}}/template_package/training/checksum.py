"""What a checkpoint holds: only what torch.load(weights_only=True) reads back, and a checksum.

torch.load reads a file with flipped bits without a word, and torch.save writes what it will not read.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy
import torch
from torch import Tensor

from ..launching.distributed import pack, unpack
from ..validation import ConfigError

PLAIN = (bool, int, float, str, bytes, type(None))


def checksum(value: Any) -> int:
    """CRC-32 of nested dicts, lists and tuples of tensors and plain values: their keys, types, shapes and bits."""
    crc = 0
    for piece in _pieces(value):
        crc = zlib.crc32(piece, crc)
    return crc


def plain(value: Any, name: str = "state") -> Any:
    """`value` with Python's numbers in place of NumPy's; ConfigError that names what could not be read back."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, dict):
        return {plain(key, f"a key of {name}"): plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{name}[{place}]") for place, item in enumerate(value))
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_meta)
    if not is_dense and type(value) not in PLAIN:
        try:
            if isinstance(value, set | Tensor):  # a set is in another order in each process: no checksum would fit
                raise TypeError
            unpack(pack(value))
        except Exception:
            kind = type(value).__name__
            if isinstance(value, Tensor):
                kind = f"Tensor ({value.dtype}, {value.layout}, {value.device})"
            raise ConfigError(
                f"checkpoint: {name} is a {kind}, which would be saved and could never be read again. Let "
                "build_optimizer() or the model keep dense tensors, numbers, strings, lists and dicts; a buffer that "
                "need not be saved is registered with persistent=False."
            ) from None
    return value


def _pieces(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{key!r}:".encode()
            yield from _pieces(item)
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    else:
        yield repr(value).encode()

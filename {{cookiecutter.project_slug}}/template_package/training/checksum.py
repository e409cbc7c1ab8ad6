"""A checkpoint's checksum: torch.load reads a file with flipped bits without a word."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor


def checksum(value: Any) -> int:
    """CRC-32 of nested dicts, lists and tuples of tensors and plain values: their keys, types, shapes and bits."""
    crc = 0
    for piece in _pieces(value):
        crc = zlib.crc32(piece, crc)
    return crc


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

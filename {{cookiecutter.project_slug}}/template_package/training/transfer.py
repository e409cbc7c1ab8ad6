"""Moves micro-batches to the device: the next one's copy is under way while this one computes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from .fetching import MicroBatch


def to_device(micro_batches: Iterable[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Each micro-batch on the device, the next one's copy under way on a stream of its own while this one computes."""
    copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ready: tuple[MicroBatch, torch.cuda.Event] | None = None
    for micro_batch in micro_batches:
        # Memory of former batches is used again here: not before what reads them has run.
        copy_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copy_stream):
            upcoming = micro_batch._replace(batch=move(micro_batch.batch, device)), copy_stream.record_event()
        if ready is not None:
            yield _wait_for_copy(*ready)
        ready = upcoming
    if ready is not None:
        yield _wait_for_copy(*ready)


def _wait_for_copy(micro_batch: MicroBatch, copied: torch.cuda.Event) -> MicroBatch:
    torch.cuda.current_stream().wait_event(copied)
    return micro_batch


def move(value: Any, device: torch.device) -> Any:
    """A batch of the same type with its tensors on `device`: what has `.to()` by itself, the items of tuples, lists,
    mappings and dataclasses; anything else as it is.
    """
    if isinstance(value, Tensor | PackedSequence):
        return cast(Any, value).to(device, non_blocking=True)
    if hasattr(value, "to") and not isinstance(value, type):  # a graph, a tokenizer's output
        try:
            return value.to(device, non_blocking=True)
        except TypeError:  # its own takes a device alone, and may wait for it
            return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # NamedTuple
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move(item, device) for item in value)
    if isinstance(value, Mapping):
        moved: Any = copy.copy(value) if isinstance(value, MutableMapping) else {}
        for key, item in value.items():
            moved[key] = move(item, device)
        return moved
    if is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)  # not made anew: its __post_init__ has run
        for field in fields(value):
            object.__setattr__(moved, field.name, move(getattr(value, field.name), device))
        return moved
    return value

"""Undoes what trial passes and evaluations do to a model's buffers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def buffers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """On exit, give these modules the buffers that they have on entry: the same tensors with the same values.

    Caches live on: buffers that no checkpoint holds and that were made, replaced or resized meanwhile. Their modules
    may have noted the new length.
    """
    held = [(module, dict(module._buffers)) for module in modules]
    former = {
        id(buffer): buffer.clone()
        for _, own in held
        for buffer in own.values()
        if buffer is not None
    }
    try:
        yield
    finally:
        for module, own in held:
            for name, buffer in [*module._buffers.items()]:
                is_same = buffer is own.get(name) and (
                    buffer is None or buffer.shape == former[id(buffer)].shape
                )
                if name in module._non_persistent_buffers_set and not is_same:
                    own.pop(name, None)
                else:
                    del module._buffers[name]
            module._buffers.update(own)
            for buffer in (buffer for buffer in own.values() if buffer is not None):
                # copy_() would repeat a single value in an enlarged buffer
                value = former[id(buffer)]
                buffer.data = buffer.data.copy_(value) if buffer.shape == value.shape else value

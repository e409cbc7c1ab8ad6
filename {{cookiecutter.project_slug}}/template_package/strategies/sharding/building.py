"""Building a model on every rank, with weights on rank 0 alone: elsewhere they may not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from ...launching.distributed import RankContext, gather_objects


def build_once(build_model: Callable[[], nn.Module], context: RankContext) -> nn.Module:
    """The user's model: whole on rank 0, elsewhere with parameters that have a shape and no memory.

    Weights that are not there draw no random numbers, so a permutation, say, that the model draws and keeps beside them
    differs: a warning names it.
    """
    if context.is_main:
        model = build_model()
    else:
        with _parameters_without_memory():
            model = build_model()
    of_ranks = gather_objects(_plain_values(model)) or [{}]
    first = of_ranks[0]
    if unlike := {name for values in of_ranks for name in values.keys() & first if values[name] != first[name]}:
        names = ", ".join(sorted(unlike)[:3])
        warnings.warn(
            f"strategy=fsdp: {names} in model.py is not the same on every rank. If it was drawn at random, register it "
            "as a buffer, draw it from a torch.Generator with a seed of its own, or set strategy=ddp.",
            stacklevel=2,
        )
    return model


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """In the body, parameters lose their storage as soon as a module registers them; buffers keep theirs."""

    def lighten(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:  # registered again, under another name: still the same one
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    def fill(_: nn.Module, __: str, buffer: Tensor | None) -> Tensor | None:
        return torch.empty_like(buffer, device="cpu") if buffer is not None and buffer.is_meta else None

    of_parameters: Any = register_module_parameter_registration_hook
    of_buffers: Any = register_module_buffer_registration_hook
    hooks = [of_parameters(lighten), of_buffers(fill)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*which is a no-op.*")  # weights that are loaded into nothing
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _plain_values(model: nn.Module) -> dict[str, str]:
    """What modules hold beside parameters and buffers that may have been drawn: tensors, and collections of values."""
    internal, values = vars(nn.Module()).keys(), {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in internal and isinstance(value, Tensor | list | tuple | dict | set):
                with suppress(Exception):  # some tensors cannot be shown
                    text = repr(value)
                    if " at 0x" not in text and "meta" not in text:  # an object, or a tensor without memory
                        values[f"{path}.{name}".removeprefix(".")] = text
    return values

"""Building a model on every rank, with weights on rank 0 alone: elsewhere they may not fit.

What is random in a model beside its weights (a permutation, say) must be equal all the same.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...launching.distributed import RankContext, broadcast_object
from ...validation import ConfigError


def build_once(build_model: Callable[[], nn.Module], context: RankContext) -> nn.Module:
    """The user's model: whole on rank 0, elsewhere with parameters that have a shape and no memory.

    ConfigError if it is random in a way that makes it another model there.
    """
    if context.is_main:
        model = build_model()
    else:
        with _parameters_without_memory(), _DrawnAlike():  # type: ignore[no-untyped-call]
            model = build_model()
    _check_drawn_alike(model, context)
    return model


class _DrawnAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the body, numbers are drawn for tensors without memory too: those that are drawn next are then rank 0's.

    But for torch.nn.init's trunc_normal_, orthogonal_ and sparse_, which look whether there is memory.
    """

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
            if any(tensor.is_meta for tensor in tensors):
                given = tree_map_only(Tensor, _with_memory, (arguments, named))
                function(*given[0], **given[1])
        return function(*arguments, **named)


def _with_memory(tensor: Tensor) -> Tensor:
    # Of ones, which are a probability, a weight and a standard deviation.
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).fill_(1)


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


def _check_drawn_alike(model: nn.Module, context: RankContext) -> None:
    """ConfigError that names an attribute unlike rank 0's, if other random numbers were drawn there.

    If the same were drawn, what differs is meant to: a rank, a device, a time.
    """
    drawn, values = _digest(torch.get_rng_state()), _attributes(model, context)
    drawn_there, values_there = broadcast_object((drawn, values))
    unlike = [name for name, value in values.items() if values_there.get(name, value) != value]
    if drawn != drawn_there and unlike:
        raise ConfigError(
            f"strategy=fsdp: {unlike[0]} in model.py is not the same on every rank: build_model draws other random "
            "numbers where weights have no memory. Register it as a buffer, draw it from a torch.Generator with a "
            "seed of its own, or set strategy=ddp."
        )


def _attributes(model: nn.Module, context: RankContext) -> dict[str, str]:
    """Digests of the plain values that modules hold beside parameters and buffers, but for what may name a rank."""
    inherited = vars(nn.Module()).keys()
    places = (context.rank, context.local_rank)
    return {
        f"{path}.{name}".removeprefix("."): digest
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in inherited and not isinstance(value, bool | str)
        if not (isinstance(value, int) and value in places) and (digest := _digest(value))
    }


def _digest(value: Any) -> str:
    """Equal for equal numbers, strings, tensors and collections of these; empty if there is anything else in it."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided:
            return ""
        parts = [str(value.dtype), str(tuple(value.shape))]
        content: Any = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return hashlib.sha256("".join(parts).encode() + content.tobytes()).hexdigest()
    if isinstance(value, dict):
        digests = [_digest(part) for item in value.items() for part in item]
    elif isinstance(value, list | tuple | set | frozenset):
        digests = [_digest(part) for part in value]
        digests = sorted(digests) if isinstance(value, set | frozenset) else digests
    else:
        return ""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest() if all(digests) else ""

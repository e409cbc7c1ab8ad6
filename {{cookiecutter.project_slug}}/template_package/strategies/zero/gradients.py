"""Finds parameters that got no gradient on this rank. DeepSpeed would use zeros or another parameter's gradient.

The check runs before the backward pass ends, so a rank that lacks a gradient fails before it has shared all the others.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable

from ...errors import ConfigError


class GradientWatch:
    """Records which of the named parameters get a gradient, without waiting for the device."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._missing = set(self._names)
        for name, parameter in module.named_parameters():
            if name in self._names:
                parameter.register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]

    def check_after(self, loss: Tensor) -> None:
        """Make the backward pass of this loss raise ConfigError if a parameter got no gradient since the last check."""
        engine: Any = Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(self._check))  # type: ignore[no-untyped-call]

    def _note(self, name: str, _: Tensor) -> None:
        self._missing.discard(name)

    def _check(self) -> None:
        # This rank does not ask the others, which would cost a collective in each step.
        if self._missing:
            raise ConfigError(
                f"strategy=deepspeed: {', '.join(sorted(self._missing))} got no gradient in this step, and DeepSpeed "
                "takes that for zeros. Freeze them (requires_grad=False), use them in every loss, or set strategy=ddp "
                "and ddp.find_unused_parameters=true."
            )
        self._missing = set(self._names)

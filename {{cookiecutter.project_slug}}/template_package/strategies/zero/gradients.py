"""Which parameters get a gradient in a step: DeepSpeed takes each away at once, and zeros where there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable

from ...validation import ConfigError


class GradientWatch:
    """Of these parameters of the model; nothing here waits for the device."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._missing = set(self._names)
        for name, parameter in model.named_parameters():
            if name in self._names:
                parameter.register_hook(lambda _, name=name: self._missing.discard(name))  # type: ignore[no-untyped-call]

    def look_after(self, loss: Tensor) -> None:
        """Check when this loss's backward is through, before DeepSpeed shares what is left of its gradients: a rank
        with fewer of them than the others would be aborted there, or wait.
        """
        engine: Any = Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(self._check))  # type: ignore[no-untyped-call]

    def _check(self) -> None:
        """ConfigError that names those without a gradient since the last call: their weights would decay, and Adam
        would move them, where one process leaves them as they are.

        A rank without does not ask whether another has one, which would be a collective in each step.
        """
        if self._missing:
            raise ConfigError(
                f"strategy=deepspeed: {', '.join(sorted(self._missing))} got no gradient in this step, and DeepSpeed "
                "takes that for zeros. Freeze them (requires_grad=False), use them in every loss, or set strategy=ddp "
                "and ddp.find_unused_parameters=true."
            )
        self._missing = set(self._names)

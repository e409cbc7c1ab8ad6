"""Which parameters get a gradient in a step, on this rank: told before its backward pass is over, since a rank with
fewer of them than the others would leave these waiting, or share one parameter's gradient for another's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...validation import ConfigError


class GradientWatch:
    """Of the parameters of these names; nothing here waits for the device.

    strategy: its name; reason: what it makes of a gradient that is not there.
    """

    def __init__(self, names: Iterable[str], strategy: str, reason: str) -> None:
        self._names = frozenset(names)
        self._missing = set(self._names)
        self._strategy, self._reason = strategy, reason

    def listen(self, name: str, parameter: Tensor) -> None:
        """Note from now on each gradient that the parameter gets, if it is one of those."""
        if name in self._names:
            parameter.register_hook(lambda _: self._missing.discard(name))  # type: ignore[no-untyped-call]

    def look_after(self, loss: Tensor) -> None:
        """ConfigError when this loss's backward is through, if a parameter has had no gradient since the last call."""
        engine: Any = Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(self._check))  # type: ignore[no-untyped-call]

    def no_gradient(self, names: Iterable[str]) -> ConfigError:
        """The error that names these."""
        return ConfigError(
            f"strategy={self._strategy}: {', '.join(sorted(names))} got no gradient in this step, and {self._reason}. "
            "Freeze them (requires_grad=False), use them in every loss, or set strategy=ddp and "
            "ddp.find_unused_parameters=true."
        )

    def _check(self) -> None:
        # A rank without does not ask whether another has one, which would be a collective in each step.
        if self._missing:
            raise self.no_gradient(self._missing)
        self._missing = set(self._names)


class BlockWatch:
    """The same for a model that fully_shard() has cut, and whether each forward pass calls all of its blocks: ranks
    that call different ones would gather parts of different weights, and compute with the mixture.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._gradients = GradientWatch(trained, "fsdp", "FSDP needs one for each parameter, on every rank")
        self._names: dict[str, list[str]] = {}
        self._is_known: set[str] = set()
        self._called: set[str] = set()
        is_cut: Any = FSDPModule  # a module too, which torch's annotations do not say
        disable: Any = torch.compiler.disable
        for path, block in module.named_modules():
            if isinstance(block, is_cut):
                self._names[path] = [n for n, p in block.named_parameters(prefix=path) if p.requires_grad]
                block.register_forward_pre_hook(disable(partial(self._note, path)))

    def begin_micro_batch(self) -> None:
        """Its forward pass comes next."""
        self._called.clear()

    def look_after(self, loss: Tensor, *, is_last_micro_batch: bool) -> None:
        """ConfigError if a block with trained parameters was not called; after the step's last backward, as
        GradientWatch.
        """
        if left_out := [name for path, names in self._names.items() if path not in self._called for name in names]:
            raise self._gradients.no_gradient(left_out)
        if is_last_micro_batch:
            self._gradients.look_after(loss)

    def _note(self, path: str, block: nn.Module, _: Any) -> None:
        self._called.add(path)
        if path not in self._is_known:  # the first time that its whole weights are there, which get the gradients
            self._is_known.add(path)
            for name, parameter in block.named_parameters(prefix=path):
                if not isinstance(parameter, DTensor):  # of no inner block
                    self._gradients.listen(name, parameter)

"""Builds the optimizer, and averages the weights over the steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import model as user_model
from ..config import OptimizerConfig
from ..strategies.base import Strategy


def choose_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer with build_optimizer() of model.py, or of this file if model.py has none."""
    built: Any = getattr(user_model, "build_optimizer", build_optimizer)(model, config)
    return Optimizers(built) if isinstance(built, list | tuple) else built


class Optimizers(Optimizer):
    """Makes several optimizers look like one, which has all their parameter groups and a single state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # torch refuses a parameter that two of these groups hold.
        super().__init__([{"params": [p for g in o.param_groups for p in g["params"]]} for o in optimizers], {})
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self._optimizers:
            optimizer.step()


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build AdamW, Adam or SGD for the parameters that are trained, with weight decay on matrices and kernels only.

    Biases and norms (fewer than two dimensions) form a group without decay: pulling them to 0 regularizes nothing.
    Adam's decay is an L2 penalty, AdamW's is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [{**group, "initial_lr": config.learning_rate} for group in groups if group["params"]]
    # One kernel for all tensors instead of several for each: a third of a small model's step. None: torch chooses.
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters) or None
    beta1, beta2 = config.betas  # beta1 is SGD's momentum
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=beta1, fused=fused)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.learning_rate, betas=(beta1, beta2), fused=fused)


class WeightAverage:
    """Averages the weights over the steps, for evaluation and export (EMA, as torch.optim.swa_utils defines it).

    Each rank averages the parts of the weights that it holds. Buffers, such as BatchNorm's, are not averaged.
    """

    def __init__(self, strategy: Strategy, decay: float) -> None:
        self._strategy = strategy
        self._weights = strategy.local_weights()  # they share memory with the model
        self._average = [weight.clone() for weight in self._weights]
        self._decay, self._is_loaded = decay, False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after `step`. Step 1 copies them, unless an average was loaded."""
        torch._foreach_lerp_(self._average, self._weights, 1 - self._decay if step > 1 or self._is_loaded else 1.0)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside this context the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def get_weights(self) -> dict[str, Tensor]:
        """Return the averaged model's state dict on the CPU. All ranks must call it; only rank 0's is whole."""
        with self.swapped_in():  # on the CPU the state dict shares memory with the model
            return {name: weight.clone() for name, weight in self._strategy.get_weights().items()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        self._is_loaded = True
        with self.swapped_in():
            self._strategy.set_weights(weights)

    @torch.no_grad()
    def _swap(self) -> None:
        self._strategy.drop_gathered()
        for weight, average in zip(self._weights, self._average, strict=True):  # one by one: no third copy of all
            former = weight.clone()
            weight.copy_(average)
            average.copy_(former)

"""Builds the optimizer, and keeps an exponential moving average (EMA) of the weights."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import model as user_model
from ..config import OptimizerConfig
from ..strategies.base import Strategy

logger = logging.getLogger(__name__)


def choose_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer with model.py's build_optimizer() or, if it has none, with the one in this file."""
    built: Any = getattr(user_model, "build_optimizer", build_optimizer)(model, config)
    optimizer = Optimizers(built) if isinstance(built, list | tuple) else built
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and p not in held]:
        remedy = "Add them in build_optimizer(), or freeze them (requires_grad_(False))."
        logger.warning("warning: no optimizer has these parameters, so they never change: %s. %s", missing[:5], remedy)
    return optimizer


class Optimizers(Optimizer):
    """Makes several optimizers look like one optimizer, with all their parameter groups and a single state."""

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
    """Build AdamW, Adam or SGD. Parameters with fewer than two dimensions (biases, norms) get no weight decay."""
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
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam  # AdamW decouples decay, arXiv:1711.05101
    return kind(groups, lr=config.learning_rate, betas=(beta1, beta2), fused=fused)


class WeightAverage:
    """Keeps an exponential moving average of the weights, as torch.optim.swa_utils does. Buffers are not averaged."""

    def __init__(self, strategy: Strategy, decay: float, total_steps: int) -> None:
        if (share := decay**total_steps) > 0.01:
            message = "warning: with training.ema_decay=%g, %d steps leave %.0f%% of the first weights in the average"
            logger.warning(message, decay, total_steps, 100 * share)
        self._strategy = strategy
        self._weights = strategy.local_weights()  # they share memory with the model
        self._average = [weight.clone() for weight in self._weights]
        self._decay, self._is_loaded = decay, False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averaged weights after step `step`. Step 1 copies the weights, unless an average was loaded."""
        torch._foreach_lerp_(self._average, self._weights, 1 - self._decay if step > 1 or self._is_loaded else 1.0)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside this context, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def get_weights(self) -> dict[str, Tensor]:
        """Return the averaged model's state dict on the CPU. All ranks must call this. Only rank 0 gets all weights."""
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

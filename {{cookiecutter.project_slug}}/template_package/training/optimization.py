"""Builds the optimizer, and keeps an exponential moving average (EMA) of the weights."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.config import OptimizerConfig
from ..core.task import Task
from ..errors import ConfigError
from ..strategies.base import Strategy
from ..strategies.common import gather_whole, receive

logger = logging.getLogger(__name__)


def choose_optimizer(task: Task, model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer with model.py's build_optimizer() or, if it has none, with the one in this file."""
    built: Any = (task.build_optimizer or build_optimizer)(model, config)
    optimizer = Optimizers(built) if isinstance(built, list | tuple) else built
    for one in built if isinstance(built, list | tuple) else [built]:
        try:
            signature(one.step).bind()
        except TypeError:
            problem = "its step() needs a closure, which computes the loss again, and the trainer has none"
            raise ConfigError(
                f"build_optimizer in model.py: {type(one).__name__}: {problem}. Take another."
            ) from None
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if strange := held - {*model.parameters()}:
        problem = f"its optimizer has {len(strange)} parameters that the model does not hold, so no checkpoint does"
        remedy = "Put the loss's module into the model, and call it in forward()."
        raise ConfigError(
            f"build_optimizer in model.py: {problem}, and ranks do not share their gradients. {remedy}"
        )
    if missing := [
        name for name, p in model.named_parameters() if p.requires_grad and p not in held
    ]:
        remedy = "Add them in build_optimizer(), or freeze them (requires_grad_(False))."
        logger.warning(
            "warning: no optimizer has these parameters, so they never change: %s. %s",
            missing[:5],
            remedy,
        )
    return optimizer


class Optimizers(Optimizer):
    """Makes several optimizers look like one optimizer, with all their parameter groups and a single state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # torch refuses a parameter that two of these groups hold.
        super().__init__(
            [{"params": [p for g in o.param_groups for p in g["params"]]} for o in optimizers], {}
        )
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
    # torch shards no other
    has_one = config.name != "sgd" or not any(isinstance(p, DTensor) for p in parameters)
    fused = (
        has_one
        and all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    ) or None
    beta1, beta2 = config.betas  # beta1 is SGD's momentum
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=beta1, fused=fused)
    # AdamW decouples decay, arXiv:1711.05101
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.learning_rate, betas=(beta1, beta2), fused=fused)


class WeightAverage:
    """Keeps an exponential moving average of the weights, as torch.optim.swa_utils does. Buffers are not averaged.

    The average of 16-bit weights is in fp32, also in checkpoints: in 16 bits it would not move.
    """

    def __init__(self, strategy: Strategy, decay: float, total_steps: int) -> None:
        if (share := decay**total_steps) > 0.01:
            message = "warning: with training.ema_decay=%g, %d steps leave %.0f%% of the first weights in the average"
            logger.warning(message, decay, total_steps, 100 * share)
        self._strategy = strategy
        self._weights = strategy.local_weights()  # they share memory with the model
        module, fp32 = strategy.module, torch.float32
        averages = {
            p: p.detach().to(torch.promote_types(p.dtype, fp32), copy=True)
            for p in module.parameters()
        }
        self._average = [a.to_local() if isinstance(a, DTensor) else a for a in averages.values()]
        names = module.named_parameters(remove_duplicate=False)
        # than the weights
        self._wider = {name: averages[p] for name, p in names if averages[p].dtype != p.dtype}
        self._decay, self._is_loaded = decay, False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averaged weights after step `step`. Step 1 copies the weights, unless an average was loaded."""
        weights = [
            weight.to(average.dtype)
            for weight, average in zip(self._weights, self._average, strict=True)
        ]
        torch._foreach_lerp_(
            self._average, weights, 1 - self._decay if step > 1 or self._is_loaded else 1.0
        )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside this context, the model has the averaged weights."""
        averages = [
            average.to(weight.dtype)
            for weight, average in zip(self._weights, self._average, strict=True)
        ]
        self._swap(averages)
        try:
            yield
        finally:
            self._swap(averages)

    def get_weights(self) -> dict[str, Tensor]:
        """Return the averaged model's state dict on the CPU. All ranks must call this. Only rank 0 gets all weights."""
        with self.swapped_in():  # on the CPU the state dict shares memory with the model
            weights = {
                name: weight.clone() for name, weight in self._strategy.get_weights().items()
            }
        for name, average in self._wider.items():
            weights |= gather_whole({name: average}, self._strategy.context)
        return weights

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        self._is_loaded = True
        with self.swapped_in():
            self._strategy.set_weights(weights)
        for name, average in self._wider.items():
            average.copy_(receive(weights[name], self._strategy.context, average))

    @torch.no_grad()
    def _swap(self, averages: list[Tensor]) -> None:
        self._strategy.drop_gathered()
        # one by one: no third copy of all
        for weight, average in zip(self._weights, averages, strict=True):
            former = weight.clone()
            weight.copy_(average)
            average.copy_(former)

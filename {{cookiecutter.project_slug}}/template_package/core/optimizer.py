"""Builds the optimizer, and computes the learning rate of each step.

It imports neither model.py nor dataset.py, so that model.py may import build_optimizer().
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import ConfigError

if TYPE_CHECKING:
    from .config import OptimizerConfig, ScheduleConfig
    from .task import Task

NOT_LOADED = {
    "params",
    "initial_lr",
    *("weight_decay", "betas", "momentum", "eps", "nesterov", "amsgrad", "dampening", "maximize"),
    *("fused", "foreach", "capturable"),
}
"""Entries of an optimizer's groups that config.yaml, model.py or the machine decides."""
logger = logging.getLogger(__name__)


def choose_optimizer(task: "Task", model: nn.Module, config: "OptimizerConfig") -> Optimizer:
    """Build model.py's optimizer, or several, or else the one below."""
    built: Any = (task.build_optimizer or build_optimizer)(model, config)
    optimizers = built if isinstance(built, list | tuple) else [built]
    for one in optimizers:
        try:
            # a scheduler may have wrapped its own
            signature(getattr(type(one), "step", lambda _: None)).bind(one)
        except TypeError:
            problem = f"{type(one).__name__}.step() needs a closure, and the trainer has none"
            raise ConfigError(f"build_optimizer in model.py: {problem}. Take another.") from None
    optimizer = Optimizers(built) if built is optimizers else built
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if held - {*model.parameters()}:
        problem = "its optimizer has parameters that the model does not hold, and no checkpoint"
        remedy = "Put the loss's module into the model, and call it in forward()"
        raise ConfigError(f"build_optimizer in model.py: {problem}. {remedy}.")
    if config.learning_rate == 0 and any(group["lr"] for group in optimizer.param_groups):
        problem = "the schedule scales the groups' own rates by its part of this one"
        raise ConfigError(f"optimizer.learning_rate=0: {problem}. Set more than 0.")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in held:
            logger.warning("warning: %s never changes: no optimizer has it", name)
    return optimizer


class Optimizers(Optimizer):
    """Makes several optimizers look like one, with all their groups and a single state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # it refuses doubles
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.optimizers, self.param_groups = optimizers, groups
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def unsaved_of(optimizer: Any) -> dict[str, list[Any]]:
    """Return marks of what it holds besides groups and the states of parameters, by name.

    No checkpoint has it: numbers, tensors that are no parameters, and other optimizers' states.
    """
    found: dict[str, list[Any]] = {}
    for one in getattr(optimizer, "optimizers", [optimizer]):
        for name, value in vars(one).items():
            if name not in ("state", "param_groups", "defaults"):
                marks = [mark_of(leaf, one.state) for leaf in leaves_of(value)]
                found[f"{type(one).__name__}.{name}"] = marks
    return found


def changed_marks(former: dict[str, list[Any]], now: dict[str, list[Any]]) -> list[str]:
    """Return the names of what is another number than before. What is new was 0."""
    pairs = {name: zip_longest(former.get(name, []), now[name], fillvalue=0) for name in now}
    return [name for name, both in pairs.items() if any(a != b for a, b in both)]


def leaves_of(value: Any, depth: int = 5) -> Iterator[Any]:
    """Yield what stands in dicts, lists and tuples, which may stand in others."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple) and depth:
        for item in value:
            yield from leaves_of(item, depth - 1)
    else:
        yield value


def mark_of(value: Any, state: Any) -> Any:
    """Return what changes with a number, a tensor, or an optimizer that has another state."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        own = value.to_local() if isinstance(value, DTensor) else value
        is_read = own.layout == torch.strided and not own.is_meta
        # bytes: the sum of floats depends on their order, which another device adds up otherwise
        return own.detach().contiguous().view(-1).view(torch.uint8).sum().item() if is_read else 0
    if isinstance(value, Optimizer):
        return 0 if value.state is state else len(value.state)
    return number_of(value)


def number_of(value: Any) -> Any:
    """Return an int or float as text, and 0 for anything else. A bool may tell of a first step."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and value else 0


def check_saved(optimizer: Any, former: dict[str, list[Any]]) -> None:
    """Raise ConfigError if a step has changed what no checkpoint holds. `former` is from before it."""
    found = unsaved_of(optimizer)
    changed = changed_marks(former, found)
    changed += [f"state[{key!r}]" for key in optimizer.state if not isinstance(key, Tensor)]
    if changed:
        problem = f"a step changes {changed[0]}, which no checkpoint would hold"
        remedy = "Keep it in state[parameter] or in a group of param_groups"
        raise ConfigError(f"build_optimizer in model.py: {problem}. {remedy}.")


def load_group(group: dict[str, Any], former: dict[str, Any]) -> None:
    """Take over what an optimizer keeps in a group, such as ScheduleFree's count of steps."""
    group.setdefault("initial_lr", group["lr"])
    group.update({key: value for key, value in former.items() if key not in NOT_LOADED})


def check_factor(factor: Any, peak: float, total_steps: int) -> None:
    """Raise ConfigError if learning_rate() in model.py is below 0. Warn if it seems to return rates."""
    if factor is None:
        return
    steps = [*range(1, total_steps, max(1, total_steps // 100)), total_steps]
    factors = [float(factor(step, total_steps)) for step in steps]
    for step, value in zip(steps, factors, strict=True):
        if not 0 <= value < math.inf:
            problem = f"returns {value:g} at step {step} of {total_steps}"
            raise ConfigError(f"learning_rate() in model.py {problem}. Return 0 or more.")
    if len(steps) < 10 or peak >= 1:
        return
    is_rising = factors[-1] > factors[len(factors) // 2]  # a warm-up that has not ended
    if not is_rising and (top := max(factors)) <= max(0.1, peak):
        message = "warning: learning_rate() of model.py returns at most %g: it is a factor of"
        logger.warning(f"{message} optimizer.learning_rate=%g", top, peak)


def set_mode(optimizer: Any, mode: str) -> None:
    """Call train() or eval() of optimizers that have it, such as ScheduleFree (arXiv:2405.15682).

    Their steps need other weights than evaluations and checkpoints. So "eval" comes after each
    step, whether or not one follows: training does not depend on it.
    """
    for one in getattr(optimizer, "optimizers", [optimizer]):
        if hasattr(one, mode):
            getattr(one, mode)()


def build_optimizer(model: nn.Module, config: "OptimizerConfig") -> Optimizer:
    """Build AdamW, Adam or SGD. Biases and norms (fewer than two dimensions) get no weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # One kernel for all tensors: a third of a small model's step. None: torch chooses.
    can_fuse = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    options: dict[str, Any] = {"lr": config.learning_rate, "fused": can_fuse or None}
    if config.name == "sgd":
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            options["fused"] = None  # torch has no such kernel for sharded tensors
        return torch.optim.SGD(groups, momentum=config.betas[0], **options)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam  # arXiv:1711.05101
    return kind(groups, betas=(config.betas[0], config.betas[1]), **options)


def learning_rate(
    schedule: "ScheduleConfig",
    peak: float,
    step: int,
    total_steps: int,
    factor: Callable[[int, int], float] | None = None,
) -> float:
    """Return the rate of optimizer step `step`, counted from 1.

    If model.py has a learning_rate(), the `factor`, it is that times `peak`. Otherwise, linear
    warm-up reaches `peak` at step `warmup_steps`, and linear and cosine decay reach
    `min_learning_rate` one step after the last.
    """
    if factor is not None:
        return peak * float(factor(step, total_steps))
    floor, warmup = schedule.min_learning_rate, warmup_of(schedule, total_steps)
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    if schedule.name == "constant":
        return peak
    if schedule.name == "linear":
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_of(schedule: "ScheduleConfig", total_steps: int) -> int:
    """Return the number of warm-up steps, of which schedule.warmup_steps may be a fraction."""
    steps = schedule.warmup_steps
    return int(steps) if steps >= 1 else round(steps * total_steps)


def set_learning_rate(optimizer: Optimizer, rate: float, peak: float) -> None:
    """Set each group's rate: `rate / peak`, this step's part of the peak, times its initial rate."""
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", group["lr"])  # build_optimizer()'s own
        group["lr"] = rate if initial == peak or peak == 0 else rate * initial / peak

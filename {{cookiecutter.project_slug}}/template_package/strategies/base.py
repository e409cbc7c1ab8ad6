"""Plain PyTorch on one device, and the seam that the other strategies fill: what differs between them, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ..config import TrainingConfig
from ..launching.distributed import RankContext
from .numerics import check_step, checkpoint_activations, resolve_precision, set_numerics, synchronize_batchnorm

BuildOptimizer = Callable[[nn.Module], Optimizer]

_NOTHING: AbstractContextManager[None] = nullcontext()  # one for all steps: it holds no state


class Strategy:
    """One device.

    model: what compute_loss calls (a subclass wraps it). module: the user's own module, with plain names.
    """

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    has_collective_forward = False
    """Whether a forward pass waits for the other ranks: then all must run micro-batches of one size."""

    def __init__(self, config: TrainingConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        set_numerics(config)
        self.precision = resolve_precision(config.precision, context.device)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=self.precision == "fp16")
        self.num_skipped_steps = torch.zeros((), dtype=torch.int64, device=context.device)
        """Steps that the scaler has skipped, because their scaled gradients overflowed; counted on the device."""

    def build(self, build_model: Callable[[], nn.Module]) -> nn.Module:
        """The user's model, on the CPU, for prepare()."""
        return build_model()

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Move the model to the device, wrap it, then build the optimizer on what is there (none: for evaluation
        only).
        """
        self.module = self.place(model)
        if self.config.sync_batchnorm and self.context.world_size > 1:
            self.module = synchronize_batchnorm(self.module, self.context.device)  # first: it makes other modules
        if self.config.activation_checkpointing:
            checkpoint_activations(self.module)
        if self.config.compile:
            self.module.compile()  # in place: names stay plain
        self.model = self.wrap(self.module)
        self._parameters = list(self.module.parameters())
        if build_optimizer is not None:
            self.optimizer = check_step(build_optimizer(self.module))

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device, before it is compiled and wrapped."""
        return model.to(self.context.device)

    def wrap(self, module: nn.Module) -> nn.Module:
        """What compute_loss calls instead of the module."""
        return module

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that forward passes run in."""
        if self.precision == "fp32":
            return _NOTHING
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.context.device.type, dtype)

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Around one forward and backward: only the last micro-batch of a step need share gradients."""
        return _NOTHING

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add this micro-batch's gradients. Averaged over ranks, the weights of one step's micro-batches sum to 1."""
        loss = weighted(loss, weight)
        if self.scaler.is_enabled():
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """One step from the gradients, which are then gone; their global norm before clipping, if they are clipped."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)  # first: the limit is on the true gradients
        norm = None if max_gradient_norm is None else self.clip_gradients(max_gradient_norm)
        if self.scaler.is_enabled():
            self._step_scaled()
        else:
            self.optimizer.step()
        for parameter in self._parameters:  # as optimizer.zero_grad(), at a tenth of its 20 microseconds
            parameter.grad = None
        return norm

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm`; returns their global norm before, on the device."""
        return clip_grad_norm_(self._parameters, max_norm)

    @contextmanager
    def allocated_state(self) -> Iterator[None]:
        """In the body the optimizer's state takes its memory; weights may move by rounding, the caller keeps them."""
        if self.optimizer.state:
            yield
            return
        groups = self.optimizer.param_groups
        former = [{key: value if key == "params" else deepcopy(value) for key, value in g.items()} for g in groups]
        for group in groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        yield
        self.optimizer.state.clear()
        for group, values in zip(groups, former, strict=True):  # some optimizers count their steps there
            group.clear()
            group.update(values)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and scaler on the CPU, by the user's own names; all ranks call it, rank 0's is whole."""
        self.synchronize_buffers()  # rank 0's, which a resumed run will have on every rank
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        # Asked before its first step, the function would make that step itself (AdamW would then count one too many).
        has_state = bool(self.optimizer.state)
        optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=options) if has_state else {}
        return {"model": self.get_weights(), "optimizer": optimizer, "scaler": self._scaler_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict() gave, under any strategy; all ranks call it with the same whole state."""
        self.set_weights(state["model"])
        if state["optimizer"]:
            for group in self.optimizer.param_groups:  # as set_learning_rate(): on a key that is new torch fails
                group.setdefault("initial_lr", group["lr"])
            options = StateDictOptions(full_state_dict=True, strict=False)
            set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"], options=options)
            for name, parameter in self.module.named_parameters():
                if name not in state["optimizer"]["state"]:  # it never had a gradient: the function made one up
                    self.optimizer.state.pop(parameter, None)
        self._load_scaler_state(state["scaler"])

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each tensor in the model's state dict, whole."""
        return {name: tensor.shape for name, tensor in self.module.state_dict().items()}

    def get_weights(self) -> dict[str, Tensor]:
        """The model's state dict on the CPU; all ranks call it, rank 0's is whole."""
        return {name: tensor.detach().cpu() for name, tensor in self.module.state_dict().items()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over such a state dict, which every rank has whole."""
        self.module.load_state_dict(weights)

    def local_weights(self) -> list[Tensor]:
        """What this rank holds of the parameters: all of it, or its part."""
        return [parameter.detach() for parameter in self.module.parameters()]

    @property
    def num_devices(self) -> int:
        """Devices that train, over all ranks."""
        return self.context.world_size

    @property
    def wrapper(self) -> str:
        """The name of what shares the gradients, or of the model's class if nothing does: for the benchmark."""
        return type(self.model).__name__

    @property
    def evaluation_model(self) -> nn.Module:
        """What evaluation calls: no gradients are shared there, so mostly the bare module."""
        return self.module

    def synchronize_buffers(self) -> None:
        """Make buffers equal on all ranks (running statistics are each rank's own), before evaluating and saving."""

    def check_gradients(self) -> None:
        """After a backward: ConfigError if the strategy cannot do with parameters that got no gradient."""

    def replicas(self, *, with_buffers: bool) -> dict[str, Tensor]:
        """The tensors that must be equal on every rank, by name; empty where there is one, or each holds a part."""
        return {}

    def _scaler_state(self) -> dict[str, Any]:
        state = self.scaler.state_dict()
        return state and {**state, "num_skipped_steps": int(self.num_skipped_steps)}

    def _load_scaler_state(self, state: dict[str, Any]) -> None:
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)
            self.num_skipped_steps.fill_(state.get("num_skipped_steps", 0))

    def _step_scaled(self) -> None:
        # The scale falls exactly when a step was skipped; asking the scaler for it would wait for the device.
        assert self.scaler._scale is not None, "backward has scaled a loss"
        former = self.scaler._scale.clone()
        self._step_and_update()
        self.num_skipped_steps += self.scaler._scale < former

    def _step_and_update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """`loss * weight`, saved where the weight is known to be 1."""
    return loss if isinstance(weight, float) and weight == 1.0 else loss * weight

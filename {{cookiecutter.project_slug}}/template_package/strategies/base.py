"""Plain PyTorch on one device, and the methods that other strategies override."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ..config import TrainingConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext
from .numerics import (
    checkpoint_activations,
    resolve_precision,
    set_numerics,
    synchronize_batchnorm,
    unsynchronized_statistics,
)

BuildOptimizer = Callable[[nn.Module], Optimizer]


class Strategy:
    """One device. model: the module that compute_loss calls (a subclass wraps it). module: the user's own module."""

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    has_collective_forward = False
    """Whether a forward pass waits for the other ranks: then all must run micro-batches of one size."""
    needs_all_gradients = False
    """Whether every rank must have a gradient for each trained parameter."""

    def __init__(self, config: TrainingConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        set_numerics(config)
        self.precision = resolve_precision(config.precision, context.device)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=self.precision == "fp16")

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Move the model to the device, wrap it, then build the optimizer on the result (None: for evaluation only)."""
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
            self.optimizer = build_optimizer(self.module)

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device, before it is compiled and wrapped."""
        return model.to(self.context.device)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module that compute_loss calls."""
        return module

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that forward passes run in."""
        if self.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.context.device.type, dtype)

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Around one forward and backward: only the last micro-batch of a step need share gradients."""
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add this micro-batch's gradients. Averaged over ranks, the weights of one step's micro-batches sum to 1."""
        loss = weighted(loss, weight)
        if self.scaler.is_enabled():
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Step, drop the gradients, and return their global norm before clipping (None if they are not clipped)."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)  # first: the limit is on the true gradients
        norm = None if max_gradient_norm is None else self.clip_gradients(max_gradient_norm)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        for parameter in self._parameters:  # as optimizer.zero_grad(), at a tenth of its 20 microseconds
            parameter.grad = None
        return norm

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm` and return their global norm before, on the device."""
        return clip_grad_norm_(self._parameters, max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and scaler on the CPU, by the user's own names; all ranks call it, rank 0's is whole."""
        self.synchronize_buffers()  # rank 0's, which a resumed run will have on every rank
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        # Asked before its first step, the function would make that step itself (AdamW would then count one too many).
        has_state = bool(self.optimizer.state)
        optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=options) if has_state else {}
        return {"model": self.get_weights(), "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of state_dict(), saved under any strategy; all ranks call it with the same whole state."""
        self.set_weights(state["model"])
        if state["optimizer"]:
            for group in self.optimizer.param_groups:  # as set_learning_rate() does: torch fails on a key that is new
                group.setdefault("initial_lr", group["lr"])
            options = StateDictOptions(full_state_dict=True, strict=False)
            set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"], options=options)
            for name, parameter in self.module.named_parameters():
                if name not in state["optimizer"]["state"]:  # it never had a gradient: the function made a state up
                    self.optimizer.state.pop(parameter, None)
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each whole tensor in the model's state dict."""
        return {name: tensor.shape for name, tensor in self.module.state_dict().items()}

    def get_weights(self) -> dict[str, Tensor]:
        """The model's state dict on the CPU; all ranks call it, rank 0's is whole."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(dict[str, Tensor], get_model_state_dict(self.module, options=options))

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Load such a state dict, which every rank has whole."""
        self.module.load_state_dict(weights)

    def local_weights(self) -> list[Tensor]:
        """The parameters that this rank holds: all of them whole, or its parts."""
        return [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in self.module.parameters()]

    @property
    def num_devices(self) -> int:
        """Devices that train, over all ranks."""
        return self.context.world_size

    @property
    def evaluation_model(self) -> nn.Module:
        """The module that evaluation calls: no gradients are shared there, so mostly the bare one."""
        return self.module

    def synchronize_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, before evaluating and saving: running statistics are each rank's own."""
        for buffer in self.module.buffers() if self.context.world_size > 1 else ():
            dist.broadcast(buffer, src=0)

    def check_gradients(self) -> None:
        """ConfigError after a backward that left parameters without a gradient, if the ranks share each one's."""
        unused = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if unused and self.needs_all_gradients:
            raise ConfigError(
                f"compute_loss in model.py: {', '.join(unused)} got no gradient, and ranks wait for all. Freeze them"
                " (requires_grad=False), use them in the loss, or set strategy=ddp and ddp.find_unused_parameters=true."
            )

    def replicas(self, *, with_buffers: bool) -> dict[str, Tensor]:
        """The tensors that must be equal on every rank, by name: neither parts nor BatchNorm's statistics."""
        if self.context.world_size == 1:
            return {}
        own = unsynchronized_statistics(self.module)
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        tensors |= self.module.named_buffers() if with_buffers else {}
        return {name: t for name, t in tensors.items() if name not in own and not isinstance(t, DTensor)}

    def close(self) -> None:
        """End the connections that the strategy has opened besides the process group. All ranks call it."""


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """`loss * weight`, without the product where the weight is known to be 1."""
    return loss if isinstance(weight, float) and weight == 1.0 else loss * weight

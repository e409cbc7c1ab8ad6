"""Contains Strategy, which trains with plain PyTorch on one device. Other strategies override its methods."""

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ..config import TrainingConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext
from .common import (
    bits,
    checkpoint_activations,
    gather_whole,
    receive,
    set_optimizer_state,
    shapes_of,
)

BuildOptimizer = Callable[[nn.Module], Optimizer]


class Strategy:
    """Trains on one device. `module` is the user's model. `model` is either `module` itself or a wrapper around it."""

    model: nn.Module
    module: nn.Module
    # called in evaluation, which shares no gradients: mostly `module` itself
    evaluation_model: nn.Module
    optimizer: Optimizer
    # True: forward waits for the other ranks, so all need micro-batches of one size
    has_collective_forward = False
    needs_all_gradients = False  # True: every rank must have a gradient for each trained parameter
    has_gradients = True  # False: it shows no averaged gradients before the optimizer's step
    before_clipping: Callable[[], object] | None = None  # called when the gradients are averaged
    can_rebuild = True  # True: on_epoch_begin() may change which parameters are trained

    def __init__(self, config: TrainingConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        # TF32: 10 bits of mantissa
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.tf32
        torch.backends.cudnn.benchmark = config.cudnn_benchmark and not config.deterministic
        if config.deterministic:  # some versions of torch refuse cuBLAS without it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.deterministic)
        # settle_precision() has resolved it
        self.precision = config.precision.replace("auto", "fp32")
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=self.precision == "fp16")

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Move the model to the device, wrap it, and build the optimizer. For evaluation, pass build_optimizer=None."""
        self.module = self.move(model)
        # first: it makes other modules
        if self.config.sync_batchnorm and self.context.world_size > 1:
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module)  # type: ignore[no-untyped-call]
            has_any = any(isinstance(module, nn.SyncBatchNorm) for module in self.module.modules())
            if has_any and build_optimizer is not None and self.context.device.type == "cpu":
                raise ConfigError(
                    "training.sync_batchnorm=true: torch trains with it on GPUs only. Set it to false."
                )
        if self.config.activation_checkpointing:
            checkpoint_activations(self.module)
        if self.config.compile:
            self.module.compile()  # in place: names stay plain
        # before wrap() shards it
        self.evaluation_model, self.shapes = (
            self.module,
            shapes_of(self.module),
        )
        self._build_optimizer: Any = build_optimizer
        self.model = self.wrap(self.module)
        self._parameters = list(self.module.parameters())
        if build_optimizer is not None:
            self.optimizer = build_optimizer(self.module)

    def rebuild(self) -> None:
        """Wrap the model and build the optimizer again after requires_grad has changed. Keep the optimizer's state."""
        if not self.can_rebuild:
            problem = (
                "it changed requires_grad after the first step, which this strategy cannot follow"
            )
            raise ConfigError(
                f"on_epoch_begin in model.py: {problem}. Set strategy=ddp, or freeze for the whole run."
            )
        former = self.optimizer.state
        del self.model
        gc.collect()  # DDP's hooks on the parameters end with it
        self.model = self.wrap(self.module)
        self.optimizer = self._build_optimizer(self.module)
        trained = {
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        }
        self.optimizer.state.update({key: value for key, value in former.items() if key in trained})

    def move(self, model: nn.Module) -> nn.Module:
        return model.to(self.context.device)

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.context.device.type, dtype)

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Return the context for running a micro-batch. Only a step's last micro-batch needs to average gradients."""
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Compute the gradient of loss * weight, and add it to the gradients of the step's earlier micro-batches."""
        self.scaler.scale(weighted(loss, weight)).backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Step the optimizer and drop the gradients. Return their norm before clipping, or None if clipping is off."""
        # before clipping: the limit is on the unscaled gradients
        self.scaler.unscale_(self.optimizer)
        if self.before_clipping is not None:
            self.before_clipping()
        norm = None if max_gradient_norm is None else self.clip_gradients(max_gradient_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # as optimizer.zero_grad(), at a tenth of its 20 microseconds
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients to the global norm `max_norm`. Return the norm before clipping, as a device tensor."""
        return clip_grad_norm_(self.stepped(), max_norm)

    def stepped(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer steps. One that it does not hold has no part in the norm."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and scaler state on the CPU. All ranks must call this. Only rank 0 gets all of it."""
        # first: FSDP then drops the weights that evaluation left gathered
        weights = self.get_weights()
        # Before the first step torch's function would take one, to create the state, and AdamW would count it.
        optimizer = (
            get_optimizer_state_dict(self.module, self.optimizer) if self.optimizer.state else {}
        )
        optimizer = gather_whole(optimizer, self.context)
        return {"model": weights, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state dict saved by any strategy. Rank 0 passes tensors, and other ranks pass meta tensors."""
        self.set_weights(state["model"])
        if state["optimizer"]:
            set_optimizer_state(self.module, self.optimizer, state["optimizer"], self.context)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def get_weights(self) -> dict[str, Tensor]:
        """Return the model's state dict on the CPU. All ranks must call this. Only rank 0 gets the whole state dict."""
        return cast(
            dict[str, Tensor], gather_whole(get_model_state_dict(self.module), self.context)
        )

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Load rank 0's weights. All ranks must call this. The other ranks pass meta tensors of the same shapes."""
        others: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            value = receive(weights[name], self.context, tensor)
            if self.shapes[name] is None:  # a copy, such as extra state
                others[name] = value
            else:
                tensor.copy_(value)
        if others:
            self.module.load_state_dict(others, strict=False)

    def local_weights(self) -> list[Tensor]:
        """Return the parameters as this rank stores them: either whole, or only this rank's shard of each."""
        return [
            (p.to_local() if isinstance(p, DTensor) else p).detach()
            for p in self.module.parameters()
        ]

    def gathered(self) -> AbstractContextManager[None]:
        """Inside this context, each rank may run a different number of forward passes, as in text generation."""
        return nullcontext()

    def drop_gathered(self) -> None:
        """Drop the gathered weights left over from the last forward pass. Call this before you change the weights."""

    def synchronize_buffers(self, *, is_start: bool = False) -> None:
        """Copy rank 0's buffers to all ranks, as BatchNorm's differ. After the start, copy saved ones only."""
        saved = self.module.state_dict().keys()  # others may be caches, longer on some ranks
        for name, buffer in self.module.named_buffers() if self.context.world_size > 1 else ():
            if (is_start or name in saved) and buffer.layout == torch.strided:
                # NCCL takes no transposed tensor
                dist.broadcast(bits(whole := buffer.contiguous()), src=0)
                buffer.copy_(whole)

    def check_gradients(self) -> None:
        """Raise ConfigError if a parameter got no gradient and this strategy needs a gradient for every parameter."""
        unused = [
            name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None
        ]
        if unused and self.needs_all_gradients:
            remedy = "Freeze them (requires_grad=False), or set strategy=ddp and ddp.find_unused_parameters=true."
            problem = f"{', '.join(unused)} got no gradient, and ranks wait for all"
            raise ConfigError(f"compute_loss in model.py: {problem}. {remedy}")

    def close(self) -> None:
        """Close the strategy's own connections, but not the process group. All ranks must call this."""


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return `loss * weight`. If the weight is the float 1.0, return `loss` itself, which saves a GPU kernel."""
    return loss if isinstance(weight, float) and weight == 1.0 else loss * weight


class ShowsModule(nn.Module):
    """Wraps the user's module, whose attributes and methods are available on the wrapper, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

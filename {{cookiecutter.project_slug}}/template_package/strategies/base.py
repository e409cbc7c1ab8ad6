"""Plain PyTorch on one device, and the methods that other strategies override."""

import gc
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
from .common import WHOLE, checkpoint_activations, receive, set_optimizer_state

BuildOptimizer = Callable[[nn.Module], Optimizer]


class Strategy:
    """One device. model: the module that compute_loss calls (a subclass wraps it). module: the user's own module."""

    model: nn.Module
    module: nn.Module
    evaluation_model: nn.Module  # called in evaluation, which shares no gradients: mostly `module` itself
    optimizer: Optimizer
    has_collective_forward = False  # whether forward waits for the other ranks: all then need micro-batches of one size
    needs_all_gradients = False  # whether every rank must have a gradient for each trained parameter
    can_rebuild = True  # whether other parameters may be trained from an epoch on

    def __init__(self, config: TrainingConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")  # TF32: 10 bits of mantissa
        torch.backends.cudnn.allow_tf32 = config.tf32
        torch.backends.cudnn.benchmark = config.cudnn_benchmark and not config.deterministic
        torch.use_deterministic_algorithms(config.deterministic)
        self.precision = config.precision.replace("auto", "fp32")  # settle_precision() has resolved it
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=self.precision == "fp16")

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Move the model to the device, wrap it, then build the optimizer on the result (None: for evaluation only)."""
        self.module = self.move(model)
        if self.config.sync_batchnorm and self.context.world_size > 1:  # first: it makes other modules
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module)  # type: ignore[no-untyped-call]
        if self.config.activation_checkpointing:
            checkpoint_activations(self.module)
        if self.config.compile:
            self.module.compile()  # in place: names stay plain
        self.evaluation_model = self.module
        self.model = self.wrap(self.module)
        self._parameters = list(self.module.parameters())
        if build_optimizer is not None:
            self._build_optimizer = build_optimizer
            self.optimizer = build_optimizer(self.module)

    def rebuild(self) -> None:
        """Wrap the model and build the optimizer anew, after `requires_grad` has changed; its state stays."""
        if not self.can_rebuild:
            problem = "it changed requires_grad after the first step, which this strategy cannot follow"
            raise ConfigError(f"on_epoch_begin in model.py: {problem}. Set strategy=ddp, or freeze for the whole run.")
        former = self.optimizer.state
        del self.model
        gc.collect()  # DDP's hooks on the parameters end with it
        self.model = self.wrap(self.module)
        self.optimizer = self._build_optimizer(self.module)
        trained = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        self.optimizer.state.update({key: value for key, value in former.items() if key in trained})

    def move(self, model: nn.Module) -> nn.Module:
        """The model on the device, before it is compiled and wrapped."""
        return model.to(self.context.device)

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.context.device.type, dtype)

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Around one forward and backward: only the last micro-batch of a step need share gradients."""
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add this micro-batch's gradients. Averaged over ranks, the weights of one step's micro-batches sum to 1."""
        self.scaler.scale(weighted(loss, weight)).backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Step, drop the gradients, and return their global norm before clipping (None if they are not clipped)."""
        self.scaler.unscale_(self.optimizer)  # before clipping: the limit is on the unscaled gradients
        norm = None if max_gradient_norm is None else self.clip_gradients(max_gradient_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for parameter in self._parameters:  # as optimizer.zero_grad(), at a tenth of its 20 microseconds
            parameter.grad = None
        return norm

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm` and return their global norm before, on the device."""
        return clip_grad_norm_(self._parameters, max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and scaler on the CPU, by the user's own names; all ranks call it, rank 0's is whole."""
        self.synchronize_buffers()  # rank 0's, which a resumed run will have on every rank
        weights = self.get_weights()  # first: FSDP then drops the weights that evaluation left gathered
        # Asked before its first step, the function would make that step itself (AdamW would then count one too many).
        optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=WHOLE) if self.optimizer.state else {}
        return {"model": weights, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of state_dict(), saved under any strategy. Rank 0 has it; the others have meta tensors in it."""
        self.set_weights(state["model"])
        if state["optimizer"]:
            set_optimizer_state(self.module, self.optimizer, state["optimizer"], self.context)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each whole tensor in the model's state dict."""
        return {name: tensor.shape for name, tensor in self.module.state_dict().items()}

    def get_weights(self) -> dict[str, Tensor]:
        """The model's state dict on the CPU; all ranks call it, rank 0's is whole."""
        return cast(dict[str, Tensor], get_model_state_dict(self.module, options=WHOLE))

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Load a state dict of get_weights() on all ranks; rank 0 holds it whole."""
        for name, tensor in self.module.state_dict().items():
            tensor.copy_(receive(weights[name], self.context, tensor))

    def local_weights(self) -> list[Tensor]:
        """The parameters that this rank holds: all of them whole, or its parts."""
        return [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in self.module.parameters()]

    def gathered(self) -> AbstractContextManager[None]:
        """Inside this context ranks may run different numbers of forward passes, as generation does."""
        return nullcontext()

    def drop_gathered(self) -> None:
        """Drop whole copies of weights that the last forward pass has left: the weights are about to change."""

    def synchronize_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, before evaluating and saving: running statistics are each rank's own."""
        for buffer in self.module.buffers() if self.context.world_size > 1 else ():
            dist.broadcast(whole := buffer.contiguous(), src=0)  # NCCL takes no transposed one
            buffer.copy_(whole)

    def check_gradients(self) -> None:
        """ConfigError after a backward that left parameters without a gradient, if the ranks share each one's."""
        unused = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if unused and self.needs_all_gradients:
            remedy = "Freeze them (requires_grad=False), or set strategy=ddp and ddp.find_unused_parameters=true."
            problem = f"{', '.join(unused)} got no gradient, and ranks wait for all"
            raise ConfigError(f"compute_loss in model.py: {problem}. {remedy}")

    def close(self) -> None:
        """End the connections that the strategy has opened besides the process group. All ranks call it."""


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """`loss * weight`; where the weight is the number 1, `loss` itself, which saves a kernel."""
    return loss if isinstance(weight, float) and weight == 1.0 else loss * weight


class ShowsModule(nn.Module):
    """A wrapper of the user's module, whose attributes and methods can be read as if there were no wrapper."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

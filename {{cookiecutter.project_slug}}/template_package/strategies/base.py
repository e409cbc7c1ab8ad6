"""Plain PyTorch on one device, and the methods that other strategies override."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ..config import Config, TrainingConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext, all_reduce

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
BuildOptimizer = Callable[[nn.Module], Optimizer]


class Strategy:
    """One device. model: the module that compute_loss calls (a subclass wraps it). module: the user's own module."""

    model: nn.Module
    module: nn.Module
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
        self.precision = resolve_precision(config.precision, context.device)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=self.precision == "fp16")

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Move the model to the device, wrap it, then build the optimizer on the result (None: for evaluation only)."""
        self.module = self.move(model)
        if self.config.sync_batchnorm and self.context.world_size > 1:
            if self.context.device.type == "cpu":
                raise ConfigError("training.sync_batchnorm=true: torch has it on GPUs only. Set it to false.")
            # First, since it makes other modules.
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module)  # type: ignore[no-untyped-call]
        if self.config.activation_checkpointing:
            checkpoint_activations(self.module)
        if self.config.compile:
            self.module.compile()  # in place: names stay plain
        self.model = self.wrap(self.module)
        self._parameters = list(self.module.parameters())
        if build_optimizer is not None:
            self._build_optimizer = build_optimizer
            self.optimizer = build_optimizer(self.module)

    def rebuild(self) -> None:
        """Wrap the model and build the optimizer anew, after `requires_grad` has changed; its state stays."""
        if not self.can_rebuild:
            problem = "it changed requires_grad after the first step, which this strategy cannot follow"
            raise ConfigError(f"on_epoch_begin() in model.py: {problem}. Set strategy=ddp, or freeze in epoch 0 only.")
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
        self.scaler.scale(weighted(loss, weight)).backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Step, drop the gradients, and return their global norm before clipping (None if they are not clipped)."""
        self.scaler.unscale_(self.optimizer)  # first: the limit is on the true gradients
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
        has_state = bool(self.optimizer.state)
        optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=WHOLE) if has_state else {}
        return {"model": weights, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of state_dict(), saved under any strategy. Rank 0 has it; the others have meta tensors in it."""
        self.set_weights(state["model"])
        if state["optimizer"]:
            _set_optimizer_state(self.module, self.optimizer, state["optimizer"], self.context)
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
        """Load such a state dict, which rank 0 has."""
        for name, tensor in self.module.state_dict().items():
            tensor.copy_(_receive(weights[name], self.context, tensor))

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

    def replicas(self, *, with_buffers: bool) -> dict[str, Tensor]:
        """The tensors that must be equal on every rank, by name: neither parts nor BatchNorm's statistics."""
        if self.context.world_size == 1:
            return {}
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        tensors |= self.module.named_buffers() if with_buffers else {}
        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)]
        own = {id(buffer) for norm in norms for buffer in norm.buffers()}  # each rank's until they are synchronized
        return {name: t for name, t in tensors.items() if id(t) not in own and not isinstance(t, DTensor)}

    def close(self) -> None:
        """End the connections that the strategy has opened besides the process group. All ranks call it."""


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """`loss * weight`, without the product where the weight is known to be 1."""
    return loss if isinstance(weight, float) and weight == 1.0 else loss * weight


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` as fp32, bf16 or fp16: bf16 where the GPU computes it itself, fp16 on older ones, fp32 on CPU."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def settle_precision(config: Config, context: RankContext) -> Config:
    """The config with `auto` resolved for all ranks together: by the least able of their devices."""
    choices: tuple[Literal["fp32"], Literal["fp16"], Literal["bf16"]] = ("fp32", "fp16", "bf16")
    own = min(choices.index(resolve_precision(config.training.precision, device)) for device in context.devices)
    common = int(all_reduce(torch.tensor(own, device=context.device), dist.ReduceOp.MIN))
    return replace(config, training=replace(config.training, precision=choices[common]))


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost ModuleLists, ModuleDicts and Sequentials."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield child
        else:
            yield from blocks(child)


def checkpoint_activations(model: nn.Module) -> None:
    """Let each block keep only its inputs, and run again in backward (Chen et al. 2016, arXiv:1604.06174).

    BatchNorm's running statistics then move twice a step. ConfigError if the model has no blocks.
    """
    found = list(blocks(model))
    if not found:
        problem = "the model has no nn.ModuleList, ModuleDict or Sequential of blocks to run again"
        raise ConfigError(f"training.activation_checkpointing=true: {problem}. Put its layers in one, or set false.")
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class ShowsModule(nn.Module):
    """A wrapper of the user's module, whose attributes and methods can be read as if there were no wrapper."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@torch.no_grad()
def _set_optimizer_state(module: nn.Module, optimizer: Optimizer, saved: dict[str, Any], context: RankContext) -> None:
    """Load rank 0's state on every rank. torch's own function would make a step, which a user's step hooks count."""
    names = {parameter: name for name, parameter in module.named_parameters()}

    def receive(value: Any, like: Tensor | None = None) -> Any:
        return tree_map(lambda part: _receive(part, context, like) if isinstance(part, Tensor) else part, value)

    for group in (group for group in optimizer.param_groups if group["params"]):
        is_on_device = group.get("fused") or group.get("capturable")  # where torch keeps the count of steps
        for former in (former for former in saved["param_groups"] if names[group["params"][0]] in former["params"]):
            options = {key: receive(value) for key, value in former.items() if key != "params"}
            group.update({key: value.cpu() if isinstance(value, Tensor) else value for key, value in options.items()})
        for parameter in (parameter for parameter in group["params"] if names[parameter] in saved["state"]):
            for key, saved_value in saved["state"][names[parameter]].items():
                value = receive(saved_value, parameter)
                is_count = key == "step" and isinstance(value, Tensor) and not is_on_device
                optimizer.state[parameter][key] = value.cpu() if is_count else value


def _receive(value: Tensor, context: RankContext, like: Tensor | None = None) -> Tensor:
    """Rank 0's value, which the others know as meta, on the device; cut as `like` is, if that is a DTensor."""
    whole = torch.empty_like(value, device=context.device) if value.is_meta else value.to(context.device).clone()
    if context.world_size > 1:
        dist.broadcast(whole := whole.contiguous(), src=0)
    if isinstance(like, DTensor) and whole.dim() and whole.shape == like.shape:
        # One whole tensor at a time; torch's own function fails on offloaded ones.
        whole = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return whole

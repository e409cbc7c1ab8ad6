"""How ranks share gradients and state: one device, DDP (each the whole model), FSDP (each a part).

A checkpoint is the same whatever the strategy: whole tensors under plain names, on rank 0.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from ..errors import ConfigError
from .config import Config
from .ranks import Rank, all_reduce

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *BATCH_NORMS)
PLAIN = (Tensor, numpy.generic, bool, int, float, str, bytes, type(None))  # in a checkpoint
NOT_LOADED = ("params", "initial_lr", "weight_decay", "betas", "momentum")  # `optimizer:` sets them


def settle_precision(config: Config, rank: Rank) -> Config:
    """Turn precision=auto into bf16 on GPUs, fp16 if one is older than Ampere, fp32 on the CPU."""
    if config.training.precision != "auto":
        return config
    is_gpu = rank.device.type == "cuda"
    own = torch.cuda.get_device_capability(rank.device)[0] if is_gpu else 0
    oldest = int(all_reduce(torch.tensor(own), dist.ReduceOp.MIN))
    precision: Any = "bf16" if oldest >= 8 else "fp16" if oldest else "fp32"  # 8: Ampere
    return replace(config, training=replace(config.training, precision=precision))


def set_backends(config: Config) -> None:
    """Set what torch keeps for the whole process: TF32, cuDNN's choice, determinism."""
    training = config.training
    torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = training.tf32
    torch.backends.cudnn.benchmark = training.cudnn_benchmark and not training.deterministic
    torch.use_deterministic_algorithms(training.deterministic)


class Strategy:
    """Trains on one device. `module` is the user's model, `model` what compute_loss calls.

    A strategy for several ranks overrides what differs.
    """

    model: nn.Module
    optimizer: Optimizer
    has_collective_forward = False  # forward waits for other ranks: all must run it equally often
    needs_all_gradients = False

    def __init__(self, config: Config, rank: Rank) -> None:
        self.config, self.rank = config, rank
        self.precision = config.training.precision.replace("auto", "fp32")
        is_scaled = self.precision == "fp16"
        self.scaler = torch.amp.GradScaler(rank.device.type, enabled=is_scaled)

    def prepare(
        self, module: nn.Module, build_optimizer: Callable[[nn.Module], Optimizer] | None
    ) -> None:
        """Move the model to the device, wrap it, then build the optimizer; None: to evaluate only."""
        self.module = module.to(self.rank.device)
        if self.config.training.compile:
            self.module.compile()  # in place: names stay plain
        self.shapes = shapes_of(self.module)
        self.model = self.wrap(self.module)
        self._parameters = list(self.module.parameters())
        self._trained = [p for p in self._parameters if p.requires_grad]
        if build_optimizer is not None:
            self.optimizer = build_optimizer(self.module)

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.rank.device.type, dtype)

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch. The step's last one averages the gradients."""
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add the gradient of loss * weight to those of the step's earlier micro-batches."""
        self.scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]

    def unscale(self) -> None:
        """Give the gradients their own size again, after fp16's scaled losses."""
        self.scaler.unscale_(self.optimizer)

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Clip, step, and drop the gradients. Return their norm before clipping, if there is a limit."""
        if self.needs_all_gradients and any(p.grad is None for p in self._trained):
            self.check_gradients()  # in a later step too: DDP would have averaged only some
        norm = None
        if max_gradient_norm is not None:
            norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
            clip_grads_with_norm_(self._parameters, max_gradient_norm, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state on rank 0's CPU, and empty dicts elsewhere. All ranks must call this."""
        weights = self.get_weights()  # first: FSDP then drops what evaluation left gathered
        # Before the first step torch would take one, to make the state, and AdamW would count it.
        has_state = bool(self.optimizer.state)
        optimizer = get_optimizer_state_dict(self.module, self.optimizer) if has_state else {}
        return {
            "model": weights,
            "optimizer": gather_whole(optimizer, self.rank),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that any strategy saved. Rank 0 passes tensors, the others meta tensors."""
        self.set_weights(state["model"])
        if state["optimizer"]:
            set_optimizer_state(self.module, self.optimizer, state["optimizer"], self.rank)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def get_weights(self) -> dict[str, Tensor]:
        return cast(dict[str, Tensor], gather_whole(get_model_state_dict(self.module), self.rank))

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        others: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            value = receive(weights[name], self.rank, tensor)
            if self.shapes[name] is None:  # no memory of the module's, such as extra state
                others[name] = value
            else:
                tensor.copy_(value)
        if others:
            self.module.load_state_dict(others, strict=False)

    def synchronize_buffers(self, *, is_start: bool = False) -> None:
        """Copy rank 0's buffers to all ranks, as BatchNorm's differ. After the start: saved ones."""
        saved = self.module.state_dict().keys()  # others may be caches, longer on some ranks
        for name, buffer in self.module.named_buffers() if self.rank.world_size > 1 else ():
            if is_start or name in saved:
                dist.broadcast(bits(whole := buffer.contiguous()), src=0)
                buffer.copy_(whole)

    def check_gradients(self) -> None:
        """Raise ConfigError if a parameter got no gradient, and ranks wait for all of them."""
        parameters = self.module.named_parameters()
        unused = [name for name, p in parameters if p.requires_grad and p.grad is None]
        if unused and self.needs_all_gradients:
            problem = f"{', '.join(unused)} got no gradient, and ranks wait for all"
            remedy = "Freeze them, or set strategy=ddp and ddp.find_unused_parameters=true"
            raise ConfigError(f"compute_loss in model.py: {problem}. {remedy}.")


class DdpStrategy(Strategy):
    """Each rank holds the whole model. Gradients are averaged during backward."""

    model: DistributedDataParallel

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        options = self.config.ddp
        self.has_collective_forward = options.broadcast_buffers
        self.needs_all_gradients = not options.find_unused_parameters
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # by torch 2.13
        model = Wrapper(
            module,
            device_ids=[self.rank.device] if self.rank.device.type == "cuda" else None,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=True,  # no second copy of the gradients
            broadcast_buffers=options.broadcast_buffers,
        )
        del model.dim  # it would hide the module's own
        return model

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last_micro_batch else self.model.no_sync()


class Wrapper(DistributedDataParallel):
    """torch's DDP, with the attributes of the user's module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class FsdpStrategy(Strategy):
    """Each rank keeps a part of every weight, gradient and optimizer state (arXiv:1910.02054).

    A block's weights are gathered before its forward and backward pass, in 16 bits with precision
    bf16 or fp16, and dropped after it. Gradients are averaged after every micro-batch.
    """

    has_collective_forward = True
    needs_all_gradients = True

    def prepare(
        self, module: nn.Module, build_optimizer: Callable[[nn.Module], Optimizer] | None
    ) -> None:
        mean = torch.ones(1, device=self.rank.device)
        ones = torch.ones(self.rank.world_size, device=self.rank.device)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # since 2.13
        scatter(mean, ones, dist.ReduceOp.AVG)
        if mean.item() > 1.5:  # with torch 2.8, gloo's mean is a sum
            problem = f"torch {torch.__version__} adds up gradients here, where FSDP wants their mean"
            raise ConfigError(f"strategy=fsdp: {problem}. Set strategy=ddp, or install 2.11.")
        super().prepare(module, build_optimizer)

    def wrap(self, module: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.rank.device.type, (self.rank.world_size,))
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.contiguous()
            dist.broadcast(bits(tensor.data), src=0)
        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        units = [unit for unit in dict.fromkeys(blocks(module)) if _is_unit(unit, module)]
        norms: list[nn.Module] = []
        if dtype is not None:  # BatchNorm fails with 16-bit weights; autocast wants fp32 for all
            norms = [m for m in module.modules() if isinstance(m, NORMS) and m is not module]
            norms = [norm for norm in norms if _is_alone(norm, module)]
            torch.backends.mha.set_fastpath_enabled(False)  # it reads norms around their forward
        for unit in [*norms, *(unit for unit in units if unit not in norms), module]:
            own = None if unit in norms else dtype
            _check_dtypes(unit, module)
            policy = MixedPrecisionPolicy(own, own and torch.float32, cast_forward_inputs=False)
            self._root = fully_shard(unit, mesh=mesh, mp_policy=policy)
        return module

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add gradients. Older torch sends no zeros for a missing one, so refuse it there."""
        former: list[Any] = []
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            former = [(parameter, parameter.grad) for parameter in self._parameters]
        for parameter, _ in former:
            parameter.grad = None
        super().backward(loss, weight)
        if former:
            self.check_gradients()
        for parameter, grad in former:
            if grad is not None:
                parameter.grad = grad.add_(cast(Tensor, parameter.grad))

    def check_gradients(self) -> None:
        super().check_gradients()
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            self._root.set_reduce_scatter_unused_params(True)


def create_strategy(config: Config, rank: Rank) -> Strategy:
    if rank.world_size == 1:
        return Strategy(config, rank)
    kinds = {"ddp": DdpStrategy, "fsdp": FsdpStrategy}
    return kinds[config.strategy](config, rank)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the module's outermost ModuleLists, ModuleDicts and Sequentials."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield child
        else:
            yield from blocks(child)


def _is_unit(unit: nn.Module, module: nn.Module) -> bool:
    has_forward = type(unit).forward is not nn.Module.forward
    is_big = any(p.dim() > 1 for p in unit.parameters())
    return has_forward and is_big and _is_alone(unit, module)


def _is_alone(unit: nn.Module, module: nn.Module) -> bool:
    """Return True if no other part of `module` shares the unit's parameters."""
    own, uses = (
        Counter(id(p) for _, p in one.named_parameters(remove_duplicate=False))
        for one in (unit, module)
    )
    return bool(own) and all(uses[key] == count for key, count in own.items())


def _check_dtypes(unit: nn.Module, module: nn.Module) -> None:
    """FSDP gathers weights of one dtype together, and no scalars."""
    own = [p for p in unit.parameters() if not isinstance(p, DTensor)]
    own = [p for p in own if p.requires_grad or not p.dim()]
    if len({p.dtype for p in own}) > 1 or any(not p.dim() for p in own):
        held = {id(p) for p in own}
        names = [f"{name} ({p.dtype})" for name, p in module.named_parameters() if id(p) in held]
        problem = f"it gathers weights of one dtype, and no scalars: {', '.join(names[:5])}"
        raise ConfigError(f"strategy=fsdp: {problem}. Use one dtype and shape (1,), or strategy=ddp.")


@torch.no_grad()
def set_optimizer_state(
    module: nn.Module, optimizer: Optimizer, saved: dict[str, Any], rank: Rank
) -> None:
    """Load rank 0's optimizer state on all ranks, without torch's own, which takes a step."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for group in (group for group in optimizer.param_groups if group["params"]):
        group.setdefault("initial_lr", group["lr"])
        is_on_device = group.get("fused") or group.get("capturable")  # then so is its count of steps
        first = names[group["params"][0]]
        former: dict[str, Any] = next((one for one in saved["param_groups"] if first in one["params"]), {})
        for key in former.keys() - NOT_LOADED:
            value = _received(former[key], rank)
            group[key] = value.cpu() if isinstance(value, Tensor) else value
        for parameter in group["params"]:
            for key, saved_value in saved["state"].get(names[parameter], {}).items():
                value = _received(saved_value, rank, parameter)
                is_count = key == "step" and isinstance(value, Tensor) and not is_on_device
                optimizer.state[parameter][key] = value.cpu() if is_count else value


def _received(value: Any, rank: Rank, like: Tensor | None = None) -> Any:
    if isinstance(value, dict):
        return {key: _received(item, rank, like) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_received(item, rank, like) for item in value)
    return receive(value, rank, like) if isinstance(value, Tensor) else value


def shapes_of(module: nn.Module) -> dict[str, torch.Size | None]:
    """Return the shape of each tensor in the state dict; None: no memory of the module's."""
    memory = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    state = module.state_dict(keep_vars=True)
    return {name: value.shape if id(value) in memory else None for name, value in state.items()}


@torch.no_grad()
def gather_whole(state: Any, rank: Rank) -> Any:
    """Return a state with whole tensors on rank 0's CPU, and {} on the others. All must call this."""
    # Given a GPU's memory, gloo crashes (https://github.com/pytorch/pytorch/issues/152645).
    is_gloo = dist.is_initialized() and dist.get_backend() == "gloo"

    def gather(value: Any) -> Any:
        if isinstance(value, dict):  # torch.load reads plain containers only
            return {key: gather(item) for key, item in value.items()}
        if isinstance(value, list):
            return [gather(item) for item in value]
        if isinstance(value, tuple):
            return tuple(gather(item) for item in value)
        if not isinstance(value, PLAIN):
            raise TypeError(f"unexpected {type(value)} in the model's or the optimizer's state")
        if isinstance(value, DTensor):
            value = cast(DTensor, value.to("cpu" if is_gloo else rank.device)).full_tensor()
        return value.cpu() if isinstance(value, Tensor) and rank.is_main else value

    whole = gather(state)
    return whole if rank.is_main else {}


def receive(value: Tensor, rank: Rank, like: Tensor | None = None) -> Tensor:
    """Copy rank 0's `value` to this rank's device, sharded as `like`. Others pass a meta tensor."""
    if value.is_meta:
        whole = torch.empty_like(value, device=rank.device)
    else:
        whole = value.to(rank.device).clone()
    whole = whole.contiguous()
    if rank.world_size > 1:
        dist.broadcast(bits(whole), src=0)
    if isinstance(like, DTensor) and whole.dim() and whole.shape == like.shape:
        mesh, placements = like.device_mesh, like.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return whole


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes. gloo and NCCL send them whatever the dtype."""
    return tensor.detach().view(-1).view(torch.uint8)  # raises if it is not contiguous


@contextmanager
def buffers_restored(module: nn.Module, *, but: tuple[type, ...] = ()) -> Iterator[None]:
    """On exit, give buffers the values that they have on entry. Caches that grow meanwhile stay."""
    left = {id(b) for part in module.modules() if isinstance(part, but) for b in part.buffers()}
    former = {
        name: buffer.clone() for name, buffer in module.named_buffers() if id(buffer) not in left
    }
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            if name in former and buffer.shape == former[name].shape:
                buffer.copy_(former[name])

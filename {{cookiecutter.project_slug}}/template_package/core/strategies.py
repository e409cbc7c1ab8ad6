"""How ranks share gradients and state: one device, DDP (each the whole model), FSDP (each a part).

A checkpoint is the same whatever the strategy: whole tensors under plain names, on rank 0.
"""

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from textwrap import shorten
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from ..errors import ConfigError
from .config import Config
from .optimizer import check_saved, load_group, unsaved_of
from .ranks import Rank, all_reduce

BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *BATCH_NORMS)
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""False before torch 2.13: ranks that leave out other parameters would add up other weights' gradients."""
logger = logging.getLogger(__name__)


def settle_precision(config: Config, rank: Rank) -> None:
    """Turn precision=auto into bf16 on GPUs, fp16 if one is older than Ampere, fp32 on the CPU.

    Set what torch keeps for the whole process, too: TF32, cuDNN's choice, determinism.
    """
    training, gpus = config.training, [one for one in rank.devices if one.type == "cuda"]
    capabilities = [torch.cuda.get_device_capability(gpu)[0] for gpu in gpus]
    oldest = all_reduce(torch.tensor(min(capabilities, default=0)), dist.ReduceOp.MIN)
    if training.precision == "auto":
        training.precision = "bf16" if oldest >= 8 else "fp16" if oldest else "fp32"  # 8: Ampere
    torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = training.tf32
    torch.backends.cudnn.benchmark = training.cudnn_benchmark and not training.deterministic
    if training.deterministic:  # some versions of torch refuse cuBLAS without it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(training.deterministic)


class Strategy:
    """Trains on one device. `module` is the user's model, `model` what compute_loss calls.

    A strategy for several ranks overrides what differs.
    """

    model: nn.Module
    module: nn.Module
    evaluation_model: nn.Module  # called in evaluation, which shares no gradients
    optimizer: Optimizer
    has_collective_forward = False  # forward waits for other ranks: all must run it equally often
    needs_all_gradients = False
    has_parts = False  # of each weight, as a DTensor
    told: frozenset[str] = frozenset()  # what was warned of
    _built: Any = None  # the optimizer, as it was built

    def __init__(self, config: Config, rank: Rank) -> None:
        self.config, self.rank, self.collect = config, rank, gather
        self.dtype = DTYPES.get(
            config.training.precision
        )  # of matrix products; None: as the weights
        is_scaled = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(rank.device.type, enabled=is_scaled)

    def prepare(
        self, module: nn.Module, build_optimizer: Callable[[nn.Module], Optimizer] | None
    ) -> None:
        """Move the model to the device, wrap it, then build the optimizer; None: to evaluate only."""
        self.module = self.evaluation_model = self.move(module)
        if self.config.training.compile:
            self.module.compile()  # in place: names stay plain
        self.model = self.wrap(self.module)
        self._names: dict[Any, str] = {
            parameter: name for name, parameter in self.module.named_parameters()
        }
        if build_optimizer is not None:
            self.optimizer = self._built = build_optimizer(self.module)
            self._unsaved = unsaved_of(self._built)
            self._first_groups = [{**group} for group in self._built.param_groups]

    def move(self, module: nn.Module) -> nn.Module:
        return module.to(self.rank.device)

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.rank.device.type, self.dtype)

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, each rank may run another number of forward passes, as to generate text."""
        return nullcontext()

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch. The step's last one averages the gradients."""
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add the gradient of loss * weight to those of the step's earlier micro-batches."""
        self.scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]

    def unscale(self) -> None:
        """Give the gradients their own size again, after fp16's scaled losses."""
        self.scaler.unscale_(self.optimizer)

    def check_gradients(self) -> None:
        """Raise ConfigError if a parameter got no gradient, and ranks wait for all of them."""
        if not self.needs_all_gradients:
            return
        if unused := [
            name for p, name in self._names.items() if p.requires_grad and p.grad is None
        ]:
            problem = f"{', '.join(unused)} got no gradient, and ranks wait for all"
            remedy = "Freeze them, or set strategy=ddp and ddp.find_unused_parameters=true"
            raise ConfigError(f"compute_loss in model.py: {problem}. {remedy}.")

    def check_optimizer(self) -> None:
        """After the first step, raise ConfigError if it changed what no checkpoint would hold."""
        if self._built is not None:
            check_saved(self._built, self._unsaved)
            self._built = None  # rebuild() may make another one

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Clip, step, and drop the gradients. Return their norm before clipping, if there is a limit."""
        self.check_gradients()  # in later steps too: DDP would have averaged only some
        norm = None
        if max_gradient_norm is not None:
            groups = self.optimizer.param_groups  # a parameter in none has no part in it
            held = [parameter for group in groups for parameter in group["params"]]
            norm = total_norm([p.grad for p in held if p.grad is not None])
            clip_grads_with_norm_(held, max_gradient_norm, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for parameter in self._names:  # as optimizer.zero_grad(), at a tenth of its 20 microseconds
            parameter.grad = None
        return norm

    def close(self) -> None:
        """Close the strategy's own connections, but not the process group. All ranks call this."""

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state on rank 0's CPU. All ranks must call this. The others' tensors are None."""
        weights = self.get_weights()  # first: FSDP drops what an evaluation left gathered
        groups = [
            {**group, "params": [self._names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        values = {self._names[parameter]: own for parameter, own in self.optimizer.state.items()}
        optimizer = self.collect({"state": values, "param_groups": groups}, self.rank)
        return {"model": weights, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def get_weights(self) -> dict[str, Any]:
        """Return the model's state dict, as state_dict() does."""
        weights: dict[str, Any] = self.collect(self.module.state_dict(), self.rank)
        return weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that any strategy saved. Rank 0 passes tensors, the others meta tensors."""
        self.set_weights(state["model"])
        if state["optimizer"]:
            self._set_optimizer_state(state["optimizer"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def set_weights(self, weights: dict[str, Any]) -> None:
        """Load whole weights. Raise ConfigError if their names or shapes are not the model's."""
        own = self.module.state_dict()
        values = {
            name: apply_to_collection(value, Tensor, receive, self.rank, own.get(name))
            for name, value in weights.items()
        }
        try:
            self.module.load_state_dict(values)
        except RuntimeError as error:
            problem = shorten(str(error), 500, placeholder="…")  # it may list a thousand names
            remedy = "Change the model back, or choose another name=…"
            raise ConfigError(f"{problem} {remedy}") from None

    def _set_optimizer_state(self, saved: dict[str, Any]) -> None:
        """Load rank 0's state of the optimizer on all ranks. torch's own function takes a step."""
        for group in self.optimizer.param_groups:
            names = [self._names[parameter] for parameter in group["params"]]
            for former in saved["param_groups"]:
                if {*names} & {*former["params"]}:
                    load_group(group, apply_to_collection(former, Tensor, receive, self.rank))
            is_on_device = group.get("fused") or group.get("capturable")  # then so is its count
            for parameter, name in zip(group["params"], names, strict=True):
                own = saved["state"].get(name, {})
                own = apply_to_collection(own, Tensor, receive, self.rank, parameter)
                # not part of the file: a mapped one takes up disk as long as it is used
                own = apply_to_collection(own, Tensor, torch.clone)
                if isinstance(own.get("step"), Tensor) and not is_on_device:
                    own["step"] = own["step"].cpu()
                if own:
                    self.optimizer.state[parameter] = own

    def synchronize_buffers(self) -> None:
        """Copy rank 0's saved buffers to all ranks, as BatchNorm's differ."""
        saved = self.module.state_dict().keys()  # others may be caches, longer on some ranks
        for name, buffer in self.module.named_buffers():
            if name in saved:
                broadcast(buffer, self.rank)


class DdpStrategy(Strategy):
    """Each rank holds the whole model. Gradients are averaged during backward."""

    model: DistributedDataParallel

    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__(config, rank)
        finds_unused = config.ddp.find_unused_parameters
        self.needs_all_gradients = not finds_unused
        self.has_collective_forward = config.ddp.broadcast_buffers
        self.options: Any = {"find_unused_parameters": finds_unused}

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        for buffer in module.buffers():
            broadcast(buffer, self.rank)  # whatever its dtype: DDP itself shares the weights alone
        # what takes the place of `broadcast_buffers`, from torch 2.13 on, shares buffers here, too
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        model = Wrapper(
            module,
            broadcast_buffers=self.config.ddp.broadcast_buffers,  # in each forward pass
            gradient_as_bucket_view=True,  # no second copy of the gradients
            **self.options,
        )
        del model.dim  # it would hide the module's own
        model.is_made = True
        return model

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last_micro_batch else self.model.no_sync()


class ShowsModule(nn.Module):
    """A wrapper that has the attributes of the user's module, too."""

    is_made = False  # True: what compute_loss() sets from now on is the module's

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_made and name not in vars(self):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Wrapper(ShowsModule, DistributedDataParallel):
    """torch's DDP."""


class FsdpStrategy(Strategy):
    """Each rank keeps a part of every weight, gradient and optimizer state (arXiv:1910.02054).

    A block's weights are gathered before its forward and backward pass, in 16 bits with precision
    bf16 or fp16, and dropped after it. Gradients are averaged after every micro-batch.
    """

    has_collective_forward = True
    needs_all_gradients = True
    has_parts = True

    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__(config, rank)
        self.options: Any = {"reshard_after_forward": True}
        self.mesh = {"shard": rank.world_size}

    def move(self, module: nn.Module) -> nn.Module:
        return module  # wrap() moves one unit after the other: the whole may not fit on a device

    def wrap(self, module: nn.Module) -> nn.Module:
        if torch.__version__ < "2.11" and dist.get_backend() == "gloo":
            problem = f"gloo of torch {torch.__version__} adds up gradients where FSDP wants means"
            raise ConfigError(f"strategy=fsdp: {problem}. Install torch 2.11, or set strategy=ddp.")
        uses, norms = uses_of(module), list[nn.Module]()

        def is_alone(unit: nn.Module) -> bool:  # FSDP would tear apart what two blocks share
            return all(uses[p] == n for p, n in uses_of(unit).items())

        units = [unit for unit in blocks(module) if is_alone(unit)]
        if not units:
            problem = "no block of the model is in an nn.ModuleList, ModuleDict or Sequential"
            logger.warning("strategy=fsdp: %s, so each rank gathers all weights at once", problem)
        if self.dtype is not None:  # BatchNorm fails with 16-bit weights; autocast wants fp32 norms
            norms = [
                part for part in module.modules() if isinstance(part, NORMS) and is_alone(part)
            ]
            torch.backends.mha.set_fastpath_enabled(False)  # it reads norms around their forward
        mesh = init_device_mesh(
            self.rank.device.type, (*self.mesh.values(),), mesh_dim_names=(*self.mesh,)
        )
        for unit in dict.fromkeys([*norms, *units, module]):
            self._check_kinds(unit, module)
            for tensor in (*unit.parameters(), *unit.buffers()):
                if isinstance(tensor, DTensor):  # of an inner unit
                    continue
                self.place(tensor)
                broadcast(tensor, self.rank)
            dtype = None if unit in norms else self.dtype
            policy = MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)
            self._root = fully_shard(unit, mesh=mesh, mp_policy=policy, **self.options)
        return module

    def place(self, tensor: Tensor) -> None:
        tensor.data = tensor.data.to(self.rank.device).contiguous()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        for unit in self.units():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
        for unit in self.units():
            unit.reshard()
            unit.set_reshard_after_forward(self.options["reshard_after_forward"], recurse=False)

    def units(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def _check_kinds(self, unit: nn.Module, module: nn.Module) -> None:
        """Raise ConfigError if FSDP cannot gather the unit's weights together."""
        own, kinds = {*unit.parameters()}, dict[Any, str]()
        for name, p in module.named_parameters():
            if p in own and not isinstance(p, DTensor) and (p.requires_grad or not p.dim()):
                kinds[p.dtype if p.dim() else "a scalar"] = name
        if len(kinds) > 1 or "a scalar" in kinds:
            found = ", ".join(f"{name} ({kind})" for kind, name in kinds.items())
            rule = (
                f"it gathers weights of one dtype together, and no scalars, but there are {found}"
            )
            remedy = "Give scalars the shape (1,), or set strategy=ddp"
            raise ConfigError(f"strategy=fsdp: {rule}. {remedy}.")

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        former = [] if SENDS_ZEROS else [(p, p.grad) for p in self._names]
        for parameter, _ in former:
            parameter.grad = None
        super().backward(loss, weight)
        if former:
            self.check_gradients()
        for parameter, grad in former:
            if grad is not None:
                parameter.grad = grad.add_(parameter.grad)

    def check_gradients(self) -> None:
        super().check_gradients()
        if SENDS_ZEROS:
            self._root.set_reduce_scatter_unused_params(True)


def create_strategy(config: Config, rank: Rank) -> Strategy:
    kinds = {"ddp": DdpStrategy, "fsdp": FsdpStrategy}
    return kinds[config.strategy](config, rank) if rank.world_size > 1 else Strategy(config, rank)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries with weights of the outermost ModuleLists, ModuleDicts and Sequentials."""
    for child in module.children():
        is_block = any(p.dim() > 1 for p in child.parameters())
        is_block &= type(child).forward is not nn.Module.forward
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and is_block:
            yield child
        else:
            yield from blocks(child)


def uses_of(module: nn.Module) -> Counter[nn.Parameter]:
    """Return in how many places of the module each parameter stands."""
    return Counter(p for _, p in module.named_parameters(remove_duplicate=False))


def gather(value: Any, rank: Rank) -> Any:
    """Return the value with its tensors whole, on rank 0's CPU; None in their place on the others.

    Its containers become plain ones, as torch.load() reads no others.
    """
    if isinstance(value, dict):
        return {key: gather(item, rank) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [gather(item, rank) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, DTensor):
        # Given a GPU's memory, gloo crashes (https://github.com/pytorch/pytorch/issues/152645).
        device = "cpu" if dist.get_backend() == "gloo" else rank.device
        value = cast(DTensor, value.to(device)).full_tensor()
    if isinstance(value, Tensor):
        return value.cpu() if rank.is_main else None
    return value


def receive(value: Tensor, rank: Rank, like: Tensor | None = None) -> Tensor:
    """Copy rank 0's `value` to this rank's device, sharded as `like`. Others pass a meta tensor."""
    if isinstance(value, DTensor):  # it has its part
        return value
    if value.is_meta:
        value = torch.empty_like(value, device=rank.device)
    whole = value.to(rank.device).contiguous()
    broadcast(whole, rank)
    if isinstance(like, DTensor) and like.shape == whole.shape:
        whole = whole.to(like.device)  # the CPU, if weights wait there
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole


def broadcast(tensor: Tensor, rank: Rank) -> None:
    """Give all ranks rank 0's values. As bytes: gloo and NCCL send them whatever the dtype."""
    if rank.world_size > 1:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        tensor.detach().copy_(whole)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all the tensors together, whole on each rank."""
    norm = get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """On exit, give buffers the values that they have on entry. Caches that grow meanwhile stay."""
    former = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            if name in former and buffer.shape == former[name].shape:
                buffer.copy_(former[name])

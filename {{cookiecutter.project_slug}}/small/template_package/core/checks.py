"""What makes a run trustworthy: the model is tried before step 1, replicas and losses are compared."""

import logging
import sys
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..errors import ConfigError, FailureError
from .data import MicroBatch, TrainLoader
from .evaluation import figures_of, total_of
from .random_states import generators_restored
from .ranks import Rank, all_reduce
from .strategies import BATCH_NORMS, Strategy, buffers_restored
from .task import RESERVED, Task

logger = logging.getLogger(__name__)


def check_model(model: nn.Module) -> nn.Module:
    """Return the model, which trains. Raise ConfigError if a tensor is lazy, or shares memory."""
    for part in model.modules():  # Hugging Face returns models in eval mode, which is no wish
        is_loaded = hasattr(part, "from_pretrained") and any(p.requires_grad for p in part.parameters())
        if not part.training and (part is model or is_loaded):
            part.train()
    tensors = chain(model.named_parameters(), model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        problem = f"{lazy[0]} has no shape yet. Call the model on a sample there"
        raise ConfigError(f"build_model in model.py: {problem}.")
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        pointer = parameter.data_ptr() if type(parameter.data) is Tensor else 0
        if pointer and (other := owners.setdefault(pointer, name)) != name:
            problem = f"{other} and {name} share memory by .data, which ends on a GPU or under FSDP"
            raise ConfigError(f"build_model in model.py: {problem}. Assign one Parameter to both.")
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            remedy = "Set persistent=False for a buffer; let get_extra_state() return a tensor"
            raise ConfigError(f"model: state_dict() holds {name}, no dense tensor. {remedy}.")
    return model


def rehearse(
    strategy: Strategy, micro_batch: MicroBatch, task: Task, *, is_trial: bool = False
) -> None:
    """Run a forward and backward pass with weight 0, and change nothing. Raise ConfigError if wrong.

    Every start of a run begins with it: DDP orders its buckets after the first backward pass, so a
    resumed run would otherwise add up gradients in another order. A trial leaves gradients alone.
    """
    where, calls = "compute_loss in model.py", list[None]()
    shapes = saved_shapes(strategy.module)
    hook = strategy.model.register_forward_pre_hook(lambda *_: calls.append(None))
    context = strategy.accumulate(is_last_micro_batch=not is_trial)
    try:
        with (
            generators_restored(strategy.rank.device),
            torch.no_grad(),
            buffers_restored(strategy.module),
            torch.enable_grad(),
            context,
        ):
            with strategy.autocast():
                returned: Any = task.compute_loss(strategy.model, micro_batch.batch)
            if not isinstance(returned, tuple | list) or len(returned) != 2:
                raise ConfigError(f"{where} must return two values: the loss, and the outputs.")
            if len(calls) != 1:
                rule = "its wrapper shares the gradients, so call it once, and no part of it"
                raise ConfigError(f"{where} called model(...) {len(calls)} times: {rule}.")
            loss, outputs = returned
            terms = loss if isinstance(loss, dict) else {"": loss}
            if not all(isinstance(term, Tensor) and term.dim() == 0 for term in terms.values()):
                rule = "return a 0-dim tensor, or a dict of them; 0 if nothing counts"
                raise ConfigError(f"{where} returned a loss that is no scalar: {rule}.")
            if taken := RESERVED & terms.keys():
                raise ConfigError(f"{where}: name the term {min(taken)} of the loss otherwise.")
            total = total_of(loss)
            if not total.requires_grad:
                rule = "return the micro-batch's mean, not detached"
                raise ConfigError(f"{where} returned a loss with requires_grad=False: {rule}.")
            figures_of(task, loss, outputs, micro_batch.batch)
            if not task.training_metrics:
                del returned, outputs  # as train_step() does
            strategy.backward(total, 0.0)
            if not is_trial:
                strategy.check_gradients()
            if changed := saved_shapes(strategy.module).items() ^ shapes.items():
                rule = "Give it its full size in build_model, or set persistent=False"
                name = min(changed)[0]
                raise ConfigError(f"model: forward made or resized the buffer {name}. {rule}.")
    finally:
        hook.remove()
        strategy.optimizer.zero_grad()


def saved_shapes(module: nn.Module) -> dict[str, torch.Size]:
    saved = module.state_dict().keys()
    return {name: buffer.shape for name, buffer in module.named_buffers() if name in saved}


def rehearse_last(strategy: Strategy, loader: TrainLoader, task: Task) -> None:
    """Raise ConfigError if the model fails on an epoch's last batch, such as BatchNorm on one sample."""
    rank, num_left = strategy.rank, loader.num_samples % loader.global_batch_size
    largest, smallest = -(-num_left // rank.world_size), num_left // rank.world_size
    if num_left == 0 or (largest == smallest and smallest > 1):
        return
    choose = max if rank.is_main and largest > smallest else min
    micro_batch = loader.read_first(0, loader.num_samples - num_left, choose)
    try:
        rehearse(strategy, micro_batch, task, is_trial=True)
    except ValueError as error:  # BatchNorm1d: "Expected more than 1 value per channel"
        key = f"training.global_batch_size={loader.global_batch_size}"
        cause = f"an epoch's last {num_left} samples leave too few on a rank, and the model fails"
        raise ConfigError(f"{key}: {cause} ({error}). Choose another size.") from None


def check_finite(losses: list[tuple[Tensor, int]], rank: Rank) -> None:
    """Raise FailureError on all ranks if a loss is not finite. Empty the list of (loss, step)."""
    if not losses:
        return
    values = torch.stack([value for value, _ in losses])
    steps = torch.tensor([step for _, step in losses], device=rank.device)
    first = torch.where(values.isfinite(), sys.maxsize, steps).min()
    losses.clear()
    if (step := int(all_reduce(first, dist.ReduceOp.MIN))) != sys.maxsize:
        remedy = "Look for a NaN in the samples, lower optimizer.learning_rate, or clip"
        problem = f"the loss of step {step}, or its gradient, is not finite"
        raise FailureError(f"{problem}. {remedy}. The last checkpoint is sound.")


def check_replicas(strategy: Strategy, step: int, rank: Rank) -> None:
    """Raise RuntimeError on every rank if a weight differs between ranks. Warn of buffers that do."""
    module = strategy.module
    saved = module.state_dict().keys()
    norms = [part for part in module.modules() if isinstance(part, BATCH_NORMS) and part.training]
    unread = {id(buffer) for norm in norms for buffer in norm.buffers()}  # in training
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in saved and id(buffer) not in unread
    }
    tensors = {**dict(module.named_parameters()), **buffers}
    tensors = {n: t for n, t in tensors.items() if t.numel() and not isinstance(t, DTensor)}
    if rank.world_size == 1 or not tensors:
        return
    sums = torch.stack([checksum(tensor).to(rank.device) for tensor in tensors.values()])
    # The largest of -x is minus the smallest of x, so one MAX compares both ends.
    largest, negated = all_reduce(torch.stack([sums, -sums]), dist.ReduceOp.MAX)
    differing = [n for n, sum in zip(tensors, (largest + negated).tolist(), strict=True) if sum]
    for name in differing:
        if name not in buffers:
            remedy = "compute_loss must call model(...), and nothing else may change weights"
            raise RuntimeError(f"after step {step} {name!r} differs between ranks: {remedy}")
    if differing and not strategy.config.ddp.broadcast_buffers:
        remedy = "Set ddp.broadcast_buffers=true, or update them from all ranks' samples"
        message = "warning: these buffers differ between ranks: %s; only rank 0's are saved. %s."
        logger.warning(message, ", ".join(differing), remedy)


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum of all elements' bits, as int64. It depends on the elements' places, too."""
    content = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = content.detach().contiguous().flatten().view(kinds[content.itemsize])
    return torch.stack([words[::step].sum(dtype=torch.int64) * step for step in (1, 2, 3, 5)]).sum()

"""What makes a run trustworthy: the model is tried before step 1, replicas and losses are compared."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, FailureError
from .data import MicroBatch
from .evaluation import figures_of, total_of
from .random_states import generators_restored
from .ranks import Rank, all_reduce
from .strategies import BATCH_NORMS, Strategy, buffers_restored
from .task import RESERVED, Task

logger = logging.getLogger(__name__)


def set_training(model: nn.Module) -> None:
    """Put the model in training mode. Hugging Face returns models in eval mode, which is no wish."""
    for part in model.modules():
        is_loaded = hasattr(part, "from_pretrained") and any(
            p.requires_grad for p in part.parameters()
        )
        # A part that build_model() has put in eval mode stays there.
        if not part.training and (part is model or is_loaded):
            part.train()


def rehearse(strategy: Strategy, micro_batch: MicroBatch, task: Task) -> None:
    """Run a forward and backward pass with weight 0, and change nothing. Raise ConfigError if wrong.

    Every start of a run begins with it: DDP orders its buckets after the first backward pass, so a
    resumed run would otherwise add up gradients in another order.
    """
    module, calls = strategy.module, list[Any]()
    names = module.state_dict().keys()
    hook = strategy.model.register_forward_pre_hook(lambda *_: calls.append(0))
    with generators_restored(strategy.rank.device), buffers_restored(module):
        with strategy.accumulate(is_last_micro_batch=True):
            with strategy.autocast():
                loss, outputs = task.compute_loss(strategy.model, micro_batch[0])
            terms = loss if isinstance(loss, dict) else {"": loss}
            problem = ""
            if len(calls) != 1:
                problem = f"called model(...) {len(calls)} times: call it once, and no part of it"
            elif not all(isinstance(term, Tensor) and term.dim() == 0 for term in terms.values()):
                problem = (
                    "returned a loss that is no scalar: return a 0-dim tensor, or a dict of them"
                )
            elif RESERVED & terms.keys():
                problem = f"returned a loss with a term of a taken name: {RESERVED & terms.keys()}"
            elif not total_of(loss).requires_grad:
                problem = "returned a loss with requires_grad=False: do not detach it"
            if problem:
                raise ConfigError(f"compute_loss in model.py {problem}.")
            if not task.training_metrics:
                outputs = None  # as in training: backward needs the memory
            strategy.backward(total_of(loss), 0.0)
        figures_of(task, loss, outputs, micro_batch[0])
        strategy.check_gradients()
    if module.state_dict().keys() != names:
        made = min(module.state_dict().keys() ^ names)
        remedy = "Make it in build_model, or set persistent=False"
        raise ConfigError(f"model: forward made the buffer {made}. {remedy}.")
    hook.remove()
    strategy.optimizer.zero_grad()


def check_finite(losses: list[tuple[Tensor, int]], rank: Rank) -> None:
    """Raise FailureError on all ranks if a loss is not finite. Empty the list of (loss, step)."""
    if losses:
        finite = torch.stack([value for value, _ in losses]).isfinite().int()
        all_reduce(finite, dist.ReduceOp.MIN)
        for (_, step), is_finite in zip(losses, finite.tolist(), strict=True):
            if not is_finite:
                problem = f"the loss of step {step}, or its gradient, is not finite"
                remedy = "Look for a NaN in the samples or a mean over nothing, lower optimizer.learning_rate, or clip"
                raise FailureError(f"{problem}. {remedy}. The last checkpoint is sound.")
        losses.clear()


def check_replicas(strategy: Strategy, step: int, rank: Rank) -> None:
    """Raise RuntimeError on every rank if a weight differs between ranks. Warn of buffers that do."""
    norms = [part for part in strategy.module.modules() if isinstance(part, BATCH_NORMS)]
    unread = {id(buffer) for norm in norms if norm.training for buffer in norm.buffers()}
    tensors: dict[str, Tensor] = {}
    for name, value in strategy.module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and type(value) is not DTensor and id(value) not in unread:
            tensors[name] = value
    if rank.world_size == 1 or not tensors:
        return
    sums = torch.stack([checksum(tensor).to(rank.device) for tensor in tensors.values()])
    # The largest of -x is minus the smallest of x, so one MAX compares both ends.
    largest, negated = all_reduce(torch.stack([sums, -sums]), dist.ReduceOp.MAX)
    for name, difference in zip(tensors, (largest + negated).tolist(), strict=True):
        if difference and isinstance(tensors[name], nn.Parameter):
            remedy = "compute_loss must call model(...), and nothing else may change weights"
            raise RuntimeError(f"after step {step} {name!r} differs between ranks: {remedy}")
        if difference and not strategy.config.ddp.broadcast_buffers:
            remedy = "Set ddp.broadcast_buffers=true, or update it from all ranks' samples"
            message = (
                "warning: the buffer %s differs between ranks, and only rank 0's is saved. %s."
            )
            logger.warning(message, name, remedy)


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum of all the tensor's bytes, as int64. It depends on their places, too."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.stack([content[::n].sum(dtype=torch.int64) * n for n in (1, 2, 3, 5)]).sum()

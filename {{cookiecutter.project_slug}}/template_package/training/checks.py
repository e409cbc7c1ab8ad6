"""Runs a trial step, handles out-of-memory errors, and checks for non-finite losses and unequal replicas."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ..core.data import MicroBatch
from ..core.evaluation import figures_of, total_of
from ..core.random_states import generators_restored
from ..core.ranks import all_reduce
from ..core.strategies import buffers_restored
from ..core.task import RESERVED, Task
from ..data import TimedLoader
from ..errors import ConfigError, FailureError, StopRun
from ..files import write_whole
from ..launching.distributed import RankContext
from ..launching.processes import OUT_OF_MEMORY
from ..strategies.base import Strategy

logger = logging.getLogger(__name__)


def check_model(model: nn.Module) -> nn.Module:
    """Return the model in training mode, except parts that build_model() set to eval mode. Raise ConfigError if a
    tensor has no shape yet, or if two parameters share memory.
    """
    for part in model.modules():  # Hugging Face returns models in eval mode, which is no wish
        is_loaded = hasattr(part, "from_pretrained") and any(
            p.requires_grad for p in part.parameters()
        )
        if not part.training and (part is model or is_loaded):
            part.train()
    if names := [name for name, module in model.named_modules() if not module.training]:
        logger.info("left in eval mode by build_model(), where they stay: %s", ", ".join(names[:5]))
    if lazy := [
        name
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if is_lazy(tensor)
    ]:
        raise ConfigError(
            f"build_model in model.py: {lazy[0]} has no shape yet. Call the model on a sample there."
        )
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        # subclasses may have none
        pointer = parameter.data_ptr() if type(parameter.data) is Tensor else 0
        if pointer and (other := owners.setdefault(pointer, name)) != name:
            problem = f"{other} and {name} share memory by .data, which ends on a GPU or under FSDP"
            raise ConfigError(f"build_model in model.py: {problem}. Assign one Parameter to both.")
    return model


def rehearse(
    strategy: Strategy, micro_batch: MicroBatch, task: Task, *, is_trial: bool = False
) -> None:
    """Test a forward and backward pass, leaving the model unchanged. If is_trial, do not check the gradients.

    Raise ConfigError if compute_loss is wrong, such as when it does not call the model exactly once. Every run, even a
    resumed one, begins with this test, so that DDP uses the same bucket order in all later steps.
    """
    batch, tensors = micro_batch[0], list[Tensor]()
    apply_to_collection(batch, Tensor, tensors.append, allow_frozen=True)
    if any(tensor.requires_grad for tensor in tensors):
        raise ConfigError(
            "samples require a gradient. Detach them in dataset.py; compute_loss may require one anew."
        )
    for name, value in strategy.module.state_dict().items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            remedy = "Set persistent=False for a buffer; let get_extra_state() return a tensor."
            raise ConfigError(f"model: state_dict() holds {name}, no dense tensor. {remedy}")
    calls: list[None] = []
    shapes, buffers = saved_shapes(strategy.module), buffers_restored(strategy.module)
    hook = strategy.model.register_forward_pre_hook(lambda *_: calls.append(None))
    with (
        generators_restored(*strategy.rank.devices),
        buffers,
        strategy.accumulate(is_last_micro_batch=not is_trial),
    ):
        try:
            with strategy.autocast():
                returned: Any = task.compute_loss(strategy.model, batch)
            if not isinstance(returned, tuple | list) or len(returned) != 2:
                raise ConfigError(
                    "compute_loss in model.py must return two values: the loss, and the model's outputs."
                )
            loss, outputs = returned
            if len(calls) != 1:
                rule = "its wrapper shares the gradients, so call it once, and no part of it such as model.module"
                raise ConfigError(
                    f"compute_loss in model.py called model(...) {len(calls)} times: {rule}."
                )
            terms = loss if isinstance(loss, dict) else {}
            if taken := RESERVED & terms.keys():
                rule = f"name the terms of the loss otherwise than {', '.join(sorted(taken))}"
                raise ConfigError(f"compute_loss in model.py: {rule}.")
            total = (
                total_of(loss) if all(isinstance(term, Tensor) for term in terms.values()) else None
            )
            if not isinstance(total, Tensor):
                rule = (
                    "return a tensor, finite even if nothing counts (then loss_weight() returns 0)"
                )
                raise ConfigError(
                    f"compute_loss in model.py returned a loss of type {type(loss).__name__}: {rule}."
                )
            if total.dim() != 0 or not total.requires_grad:
                found = f"shape {tuple(total.shape)}, requires_grad={total.requires_grad}"
                rule = "it must be a scalar that depends on the parameters. Return the micro-batch's mean, not detached"
                raise ConfigError(f"compute_loss in model.py returned a loss of {found}: {rule}.")
            figures_of(task, loss, outputs, batch)
            if not task.training_metrics:
                del returned, outputs  # as train_step() does
            strategy.backward(total, 0.0)
            if not is_trial:
                strategy.check_gradients()
            if changed := sorted(
                {name for name, _ in saved_shapes(strategy.module).items() ^ shapes.items()}
            ):
                rule = "no checkpoint of it would fit. Give it its full size in build_model, or set persistent=False"
                raise ConfigError(
                    f"model: forward made or resized the buffer {changed[0]}: {rule}."
                )
        except RuntimeError as error:
            if "storage of size 0" not in str(error):
                raise
            problem = "its loss holds a gradient (create_graph), or a weight that is read outside of model(...)"
            raise ConfigError(
                f"compute_loss in model.py: {problem}. FSDP has neither. Set strategy=ddp."
            ) from None
        finally:
            hook.remove()
            strategy.optimizer.zero_grad()


def saved_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the buffers that checkpoints hold."""
    saved = module.state_dict().keys()
    return {name: buffer.shape for name, buffer in module.named_buffers() if name in saved}


def rehearse_last(strategy: Strategy, loader: TimedLoader, task: Task) -> None:
    """Raise ConfigError if the model fails on an epoch's last batch, which may leave unequal shares or one sample."""
    context, num_left = strategy.rank, loader.num_samples % loader.global_batch_size
    largest, smallest = -(-num_left // context.world_size), num_left // context.world_size  # shares
    has_one = smallest < 2 * -(-largest // loader.micro_batch_size)  # in a micro-batch
    if num_left == 0 or loader.num_samples == sys.maxsize or (largest == smallest and not has_one):
        return
    # Rank 0 has the largest share. If others have less, some of its largest micro-batches meet their smallest ones.
    number = 0 if context.is_main and largest > smallest else -1
    micro_batch = loader.read_first(0, loader.num_samples - num_left, number)
    left = "a micro-batch of one" if has_one else f"shares of {largest} and {smallest} on the ranks"
    cause = f"an epoch's last {num_left} samples leave {left}, and the model fails on it"
    # gloo aborts a rank that gathers more than it sends. The end of its log is then shown
    if not context.is_main:
        logger.info("rehearsing an epoch's last batch. If this line is the last: %s", cause)
    try:
        rehearse(strategy, micro_batch, task, is_trial=True)
    # BatchNorm1d: "Expected more than 1 value per channel when training"
    except ValueError as error:
        key = f"training.global_batch_size={loader.global_batch_size}"
        raise ConfigError(
            f"{key}: {cause} ({error}). Choose another size, or fewer devices."
        ) from None


class MemoryLimit:
    """Lowers this rank's micro-batch size if memory runs out. A file in the run's folder stores the size."""

    def __init__(self, directory: Path, context: RankContext, loader: TimedLoader) -> None:
        self._path = directory / f"micro_batch_size_rank_{context.rank}.txt"
        self._context, self._loader = context, loader
        size = (
            int(self._path.read_text(encoding="utf-8"))
            if self._path.exists()
            else loader.micro_batch_size
        )
        if size < loader.micro_batch_size:
            logger.info(
                "micro-batches of %d: memory ran out with more (remove %s to try again)",
                size,
                self._path,
            )
            loader.micro_batch_size = size

    def fit(self, strategy: Strategy, task: Task, micro_batch_size: int | str, epoch: int) -> None:
        """If micro_batch_size is `auto`, try to find a size that fits in memory. All ranks use the smallest result."""
        # If forward passes hold collectives, a trial on one rank alone would wait forever.
        may_try = micro_batch_size == "auto" and not (
            strategy.has_collective_forward or strategy.config.training.sync_batchnorm
        )
        while may_try:
            try:  # an epoch's last batch may be shorter than its first
                rehearse(strategy, self._loader.read_first(epoch, 0), task, is_trial=True)
                may_try = False
            except RuntimeError as error:
                self._halve(error)
            if self._context.device.type == "cuda":
                torch.cuda.empty_cache()  # now that the error, and the frames it holds, are gone
        size = torch.tensor(self._loader.micro_batch_size, device=self._context.device)
        self._loader.micro_batch_size = int(all_reduce(size, dist.ReduceOp.MIN))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If memory runs out in the `with` block, halve the micro-batch size for the restart and raise StopRun(75)."""
        try:
            yield
        except RuntimeError as error:
            self._halve(error)
            size = str(self._loader.micro_batch_size)
            write_whole(self._path, lambda beside: beside.write_text(size, encoding="utf-8"))
            raise StopRun(OUT_OF_MEMORY) from error

    def _halve(self, error: RuntimeError) -> None:
        phrases = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
        if not isinstance(error, torch.OutOfMemoryError) and not any(
            phrase in str(error) for phrase in phrases
        ):
            raise error
        former = self._loader.micro_batch_size
        if former == 1:
            raise torch.OutOfMemoryError(
                "training.micro_batch_size=1 does not fit: use a smaller model or samples"
            )
        self._loader.micro_batch_size = smaller = -(-former // 2)
        logger.warning("out of memory with micro-batches of %d samples, trying %d", former, smaller)


def check_finite(losses: list[tuple[Tensor, int]], context: RankContext) -> None:
    """Check the (loss, step) pairs and clear the list. Raise FailureError on all ranks if any loss is not finite."""
    if not losses:  # on all ranks alike
        return
    # all at once: one by one would cost a small model's step a tenth more
    values, steps = zip(*losses, strict=True)
    steps_on_device = torch.tensor(steps, device=context.device)
    first_step = torch.where(torch.stack(values).isfinite(), sys.maxsize, steps_on_device).min()
    losses.clear()
    if (found := int(all_reduce(first_step, dist.ReduceOp.MIN))) != sys.maxsize:
        remedy = "Look for a NaN in the samples or a mean over nothing, lower optimizer.learning_rate, or "
        remedy += "set training.max_gradient_norm=1"
        problem = f"the loss of step {found}, or its gradient, is not finite"
        raise FailureError(f"{problem}. {remedy}. The last checkpoint is sound.")


def check_replicas(strategy: Strategy, step: int, context: RankContext) -> None:
    """Raise RuntimeError on every rank if a weight differs between ranks in any bit. Warn of buffers that differ."""
    # other buffers may be caches of each rank
    module, saved = (
        strategy.module,
        strategy.module.state_dict().keys(),
    )
    norms = [part for part in module.modules() if isinstance(part, _NormBase) and part.training]
    # in training, by BatchNorm
    unread = {id(buffer) for norm in norms for buffer in norm.buffers()}
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in saved and id(buffer) not in unread
    }
    # Not the parts that FSDP (DTensors) and ZeRO leave on each rank (weights without elements).
    both = {**dict(module.named_parameters()), **buffers}
    tensors = {
        name: value
        for name, value in both.items()
        if value.numel() and not isinstance(value, DTensor)
    }
    if context.world_size == 1 or not tensors:
        return
    sums = torch.stack([checksum(value).to(context.device) for value in tensors.values()])
    # Two's complement: the largest of -x is minus the smallest of x, so one MAX compares both ends.
    largest, negated_smallest = all_reduce(torch.stack([sums, -sums]), dist.ReduceOp.MAX)
    differing = [
        name for name, i in zip(tensors, (largest + negated_smallest).tolist(), strict=True) if i
    ]
    is_shared = getattr(strategy.model, "broadcast_buffers", False)  # by DDP, in the next forward
    if (names := ", ".join(name for name in differing if name in buffers)) and not is_shared:
        effect = (
            "only rank 0's are evaluated and saved, and all ranks of a resumed run begin with them"
        )
        remedy = "Set ddp.broadcast_buffers=true, or update them from all ranks' samples"
        logger.warning(
            "warning: these buffers differ between ranks: %s; %s. %s.", names, effect, remedy
        )
    for name in (name for name in differing if name not in buffers):
        remedy = "compute_loss must call model(...), and nothing else may change weights"
        raise RuntimeError(
            f"after step {step} {name!r} differs between ranks, no longer one model: {remedy}"
        )


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum of all elements' bits, read as integers, as int64. It depends on the elements' places, too."""
    content = (
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        .detach()
        .contiguous()
        .flatten()
    )
    words = content.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[content.itemsize]
    )
    return torch.stack([words[::step].sum(dtype=torch.int64) * step for step in (1, 2, 3, 5)]).sum()

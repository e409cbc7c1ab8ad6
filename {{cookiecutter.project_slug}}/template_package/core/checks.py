"""What makes a run trustworthy: the model is tried before step 1, replicas and losses are compared."""

import logging
import math
import re
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..errors import ConfigError, FailureError
from .config import Config, differing_keys, unread_keys
from .data import MicroBatch, TrainLoader, loss_weight_of
from .evaluation import check_names, figures_of, in_eval_mode, telling_of_changes, total_of
from .global_batch import ALONE, global_batch
from .ranks import Rank, all_reduce
from .strategies import BATCH_NORMS, Strategy, buffers_restored, total_norm
from .task import RESERVED, Task

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
logger = logging.getLogger(__name__)


def check_model(model: nn.Module) -> nn.Module:
    """Return the model in training mode, but for parts that build_model() has put in eval mode.

    Raise ConfigError if a tensor has no shape yet, or if two parameters share memory.
    """
    for part in model.modules():
        is_loaded = hasattr(part, "from_pretrained") and any(
            p.requires_grad for p in part.parameters()
        )
        if not part.training and (part is model or is_loaded):  # Hugging Face's eval is no wish
            part.train()
    if names := [name for name, part in model.named_modules() if not part.training]:
        logger.info("left in eval mode by build_model(), where they stay: %s", ", ".join(names[:5]))
    owners: dict[int, str] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            problem = f"{name} has no shape yet. Call the model on a sample there"
            raise ConfigError(f"build_model in model.py: {problem}.")
        is_plain = isinstance(tensor, nn.Parameter) and type(tensor.data) is Tensor
        pointer = tensor.data_ptr() if is_plain else 0
        if pointer and (other := owners.setdefault(pointer, name)) != name:
            problem = f"{other} and {name} share memory by .data, which ends on a GPU or under FSDP"
            raise ConfigError(f"build_model in model.py: {problem}. Assign one Parameter to both.")
    return model


def rehearse(
    strategy: Strategy, micro_batch: MicroBatch, task: Task, *, is_trial: bool = False
) -> None:
    """Run a forward and backward pass with weight 0, and change nothing. Raise ConfigError if wrong.

    Every start of a run begins with it: DDP orders its buckets after the first backward pass, so a
    resumed run would otherwise add up gradients in another order. A trial shares no gradients.
    """
    (batch, request), calls, module = micro_batch, list[Any](), strategy.module
    tensors = list[Tensor]()
    apply_to_collection(batch, Tensor, tensors.append, allow_frozen=True)
    if any(tensor.requires_grad for tensor in tensors):
        raise ConfigError("samples require a gradient. Detach them in dataset.py.")
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            remedy = "Set persistent=False for a buffer; let get_extra_state() return a tensor"
            raise ConfigError(f"model: state_dict() holds {name}, no dense tensor. {remedy}.")
    shapes = saved_shapes(module)
    hook = strategy.model.register_forward_pre_hook(lambda *_: calls.append(0))
    try:
        with (
            buffers_restored(module),
            strategy.accumulate(is_last_micro_batch=not is_trial),
            global_batch(request.batch_size),
            telling_of_changes(strategy, task),
        ):
            with strategy.autocast():
                returned: Any = task.compute_loss(strategy.model, batch)
            if problem := problem_of(returned, len(calls)):
                raise ConfigError(f"compute_loss in model.py {problem}.")
            loss, outputs = returned
            figures = figures_of(task, loss, outputs, batch)
            if not is_trial:
                check_names(figures)
            if not task.training_metrics:
                del returned, outputs  # as in training: backward needs the memory
            strategy.backward(total_of(loss), 0.0)
            if not is_trial:
                strategy.check_gradients()
            if changed := saved_shapes(module).items() ^ shapes.items():
                problem = f"forward made or resized the buffer {min(changed)[0]}"
                remedy = "Give it its full size in build_model, or set persistent=False"
                raise ConfigError(f"model: {problem}: no checkpoint of it would fit. {remedy}.")
    except RuntimeError as error:
        if not re.search("storage of size 0|mixed torch.Tensor and DTensor", str(error)):
            raise
        problem = "holds a gradient (create_graph), or a weight that is read outside of model(...)"
        raise ConfigError(
            f"compute_loss in model.py: its loss {problem}. FSDP has neither. Set strategy=ddp."
        ) from None
    finally:
        hook.remove()
        strategy.optimizer.zero_grad()


def check_samples(loader: TrainLoader, rank: Rank) -> None:
    """Warn if a sample is another one when it is read again, or on another rank. Then call start()."""
    if loader.num_samples == sys.maxsize:  # of a stream, ranks read other parts
        return
    sums: list[Any] = []
    for items, _ in loader.read_few(2, is_raw=True):  # the second is the same on all ranks
        found: list[Any] = [0]
        kinds = Tensor, numpy.ndarray, int, float
        apply_to_collection(items, kinds, found.append, allow_frozen=True)
        sums.append(
            sum(checksum(x).to(rank.device) for x in map(plain_tensor, found) if x is not None)
        )
    largest, negated = all_reduce(torch.stack([sums[1], -sums[1]]), dist.ReduceOp.MAX)
    if largest + negated or (rank.world_size == 1 and sums[0] != sums[1]):
        logger.warning(
            "warning: a training sample is another one when it is read again, or on another rank: "
            "build_datasets() or __getitem__ draws what nothing seeds (a default_rng() made there), "
            "or reads what differs."
        )


def plain_tensor(value: Any) -> Tensor | None:
    """Return a tensor, an array or a number as a dense tensor, or None if it is no such one."""
    if isinstance(value, numpy.ndarray):
        is_plain = value.dtype.isnative and value.dtype.kind in "biuf" and value.itemsize <= 8
        return torch.from_numpy(value.copy()) if is_plain else None
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and not value.is_nested and not value.is_complex()
        return value if is_plain else None
    return torch.tensor(float(value))


def rehearse_last(strategy: Strategy, loader: TrainLoader, task: Task, epoch: int) -> None:
    """Raise ConfigError if the model fails on the epoch's last batch, whose shares may be small and unequal.

    Call loader.start() afterwards.
    """
    size, position = loader.global_batch_size, loader.num_samples - 1
    if loader.num_samples == sys.maxsize:  # a stream has no last one
        return
    loader.start(epoch, position - position % size)
    *_, (last, _) = loader.next_step(strategy.module)
    cause = f"an epoch's last {position % size + 1} samples, on {strategy.rank.world_size} ranks"
    try:
        rehearse(strategy, last, task)
    except ValueError as error:  # BatchNorm, of a single sample
        problem = f"the model fails on {cause} ({error}). Choose another size, or fewer devices."
        raise ConfigError(f"training.global_batch_size={size}: {problem}") from None
    except RuntimeError as error:  # gloo's, if compute_loss gathers shares of different sizes
        error.add_note(f"This was the trial of {cause}.")
        raise


def check_global_batch(strategy: Strategy, loader: TrainLoader, task: Task) -> None:
    """Raise ConfigError if what compute_loss() gives for a global batch depends on the ranks.

    Each rank tries its share of a small one, and all of it alone. The model is in eval mode, so
    that nothing is drawn. Call loader.start() afterwards.
    """
    rank, module = strategy.rank, strategy.module
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def run(micro_batch: MicroBatch, num_ranks: int) -> tuple[Tensor, list[Tensor]]:
        batch, request = micro_batch
        with (
            in_eval_mode(strategy.model),
            buffers_restored(module),
            strategy.accumulate(is_last_micro_batch=False),
            global_batch(request.batch_size if num_ranks > 1 else ALONE),
        ):
            with strategy.autocast():
                loss = total_of(task.compute_loss(strategy.model, batch)[0])
            weight = loss_weight_of(micro_batch, task, module, rank)
            weight *= rank.world_size / all_reduce(weight.clone())
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        # A part may be unused on some ranks.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        strategy.optimizer.zero_grad()
        for gradient in gradients:
            if type(gradient) is not DTensor:  # FSDP averages in each backward pass
                all_reduce(gradient).div_(rank.world_size)
        return all_reduce(loss.detach() * weight) / rank.world_size, gradients

    is_exact = strategy.dtype is None and all(p.dtype.itemsize > 2 for p in trained)
    tolerance = 0.1 if not is_exact else 1e-3 if rank.device.type == "cpu" else 1e-2
    size = max(2, loader.micro_batch_size // rank.world_size) * rank.world_size
    for few in (size, size - 1):  # a gather of equal shares fails
        share, whole = loader.read_few(few)
        rehearse(strategy, share, task)
        loss, gradients = run(share, rank.world_size)
        wanted_loss, wanted = run(whole, 1)
        drawn, _ = run(whole, 1)
        if not drawn.isclose(wanted_loss, equal_nan=True):
            message = "warning: compute_loss draws random numbers, which hides whether its loss is"
            logger.warning("%s that of one device", message)
            return
        off = total_norm([a - b for a, b in zip(gradients, wanted, strict=True)])
        off /= total_norm(wanted) + 1e-3  # a loss and its gradient may be 0
        error = abs(loss - wanted_loss) / (abs(wanted_loss) + 1e-3)
        if not (off <= tolerance and error <= tolerance):  # nor if one is no number
            problem = f"on {rank.world_size} ranks the loss of {few} samples is {loss:.6g}, and"
            problem += f" {wanted_loss:.6g} on one device; the gradients differ by {off:.1g}"
            remedy = "Take rows of other ranks by gather_rows(), and the mean over the own ones"
            raise ConfigError(f"compute_loss in model.py: {problem}. {remedy}.")


def problem_of(returned: Any, num_calls: int) -> str:
    """Say what is wrong with what compute_loss() returned, or with how often it called the model."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return "must return two values: the loss, and the model's outputs"
    if num_calls != 1:
        rule = "its wrapper shares the gradients, so call it once, and no part of it"
        return f"called model(...) {num_calls} times: {rule} such as model.module"
    loss = returned[0]
    terms = loss if isinstance(loss, dict) and loss else {"": loss}
    if taken := RESERVED & terms.keys():
        return f"must name the terms of the loss otherwise than {', '.join(sorted(taken))}"
    for term in terms.values():
        if not isinstance(term, Tensor):
            rule = "return a tensor, finite even if nothing counts (then loss_weight() returns 0)"
            return f"returned a loss of type {type(term).__name__}: {rule}"
        if term.dim():
            return f"returned a loss of shape {tuple(term.shape)}: return the micro-batch's mean"
    if not total_of(loss).requires_grad:
        return "returned a loss with requires_grad=False: it must depend on the parameters"
    return ""


def saved_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the buffers that checkpoints hold."""
    saved = module.state_dict().keys()
    return {name: buffer.shape for name, buffer in module.named_buffers() if name in saved}


def check_finite(losses: list[tuple[Tensor, int, int]], progress: Any, rank: Rank) -> None:
    """Raise FailureError on all ranks if a loss is not finite, else add them to progress.loss_sum.

    Each is (this rank's part of a step's loss, its step, its samples). The list is empty afterwards.
    """
    if losses:
        values = torch.stack([value for value, *_ in losses]).to(rank.sum_dtype)
        for total, (_, step, size) in zip(all_reduce(values).tolist(), losses, strict=True):
            progress.loss_sum += size * total / rank.world_size
            if not math.isfinite(total):
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
    differing = [
        name for name, value in zip(tensors, (largest + negated).tolist(), strict=True) if value
    ]
    weights = [name for name in differing if isinstance(tensors[name], nn.Parameter)]
    if weights:
        remedy = "compute_loss must call model(...), and nothing else may change weights"
        raise RuntimeError(f"after step {step} {weights[0]!r} differs between ranks: {remedy}")
    new = {*differing} - strategy.told
    if new and not strategy.config.ddp.broadcast_buffers:
        strategy.told |= new
        logger.warning(
            "warning: these buffers differ between ranks: %s; only rank 0's are evaluated and "
            "saved. Set ddp.broadcast_buffers=true, or update them from all ranks' samples (gather_rows).",
            ", ".join(sorted(new)),
        )


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum of all the tensor's bits, as int64. It depends on their places, too."""
    content = tensor.detach().contiguous().view(-1)
    content = content.view(WORDS.get(content.element_size(), torch.uint8))
    return torch.stack([content[::n].sum(dtype=torch.int64) * n for n in (1, 2, 3, 5)]).sum()


def settings_without_effect(config: Config, task: Task) -> Iterator[str]:
    """Yield a line for each setting that is no default and that another one, or a function of model.py, overrides."""
    schedule, evaluation = config.schedule.name, config.evaluation
    is_evaluated = evaluation.every_epochs or evaluation.every_steps
    section = config.strategy if hasattr(config, config.strategy) else "ddp"
    unread = "|".join(unread_keys(config))
    rules = (
        (
            "schedule[.]",
            task.learning_rate is not None,
            "as learning_rate() in model.py takes its place",
        ),
        (
            "optimizer[.](?!l)",
            task.build_optimizer is not None,
            "unless build_optimizer() in model.py reads it",
        ),
        (unread, unread, f"with schedule.name={schedule}"),
        (
            "schedule[.]name=plateau|training[.]early_stopping",
            not is_evaluated,
            "as there are no evaluations",
        ),
        (f"(?!{section})(ddp|fsdp|deepspeed)[.]", True, f"with strategy={config.strategy}"),
        ("loader[.]prefetch_factor", config.loader.num_workers == 0, "with loader.num_workers=0"),
    )
    for key, change in differing_keys({}, config).items():  # from the defaults
        setting = f"{key}={change.partition(' -> ')[2]}"
        reasons = [reason for rule, is_true, reason in rules if is_true and re.match(rule, setting)]
        if reasons:
            yield f"{setting} has no effect {reasons[0]}"

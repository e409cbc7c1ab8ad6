"""Builds the user's data sets, and the loaders of size=full with their plans.

OrderedPlan draws samples by weight, puts those of like length together, and computes a very long order piece by
piece. extras/stream.py has the plan of a stream. core/data.py has the plain plan, and says why shares are exact.
"""

import math
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from .config import Config
from .core.config import LoaderConfig
from .core.data import EvaluationLoader, MicroBatch, Plan, Request, TrainLoader
from .core.random_states import derive_seed, seed_generators
from .core.ranks import Rank
from .core.task import Task, inner
from .errors import ConfigError

WINDOW = 50  # global batches whose samples are sorted together, where samples have lengths
LONG = 10_000_000  # from this many samples on, an epoch's order is computed piece by piece


def build_datasets(task: Task, config: Config, rank: Rank) -> tuple[Dataset[Any], ...]:
    """Build the user's data sets with the same seed on all ranks. Local rank 0 builds (and downloads) them first."""
    seed_generators(config.seed)
    with rank.local_rank_first("data"):
        return tuple(task.build_datasets(config.data))


class TimedLoader(TrainLoader):
    """Measures how long it waits for samples, and reads single micro-batches for dry runs."""

    cursor: Any = None  # what a stream's checkpoint must hold besides epoch and position
    seconds_waited = 0.0  # in reading, or for the workers that read

    def read_first(self, epoch: int, position: int, number: int = 0) -> MicroBatch:
        """For a dry run, return the largest micro-batch of the step at this position, or the smallest if number=-1.

        Call start() before training reads on.
        """
        step = next(self._cut(epoch, position))
        # A worker reads, if there is one: workers that are forked later would share a file that is opened here.
        return next(super()._read([step[number]]))

    def close(self) -> None:
        del self._micro_batches, self._loader  # this ends the worker processes

    def _read(self, requests: Iterable[Request]) -> Iterator[MicroBatch]:
        asked_at = time.perf_counter()
        for micro_batch in super()._read(requests):
            self.seconds_waited += time.perf_counter() - asked_at
            yield micro_batch
            asked_at = time.perf_counter()


def create_loader(dataset: Any, task: Task, config: Config, rank: Rank) -> TimedLoader:
    """Return the loader of the training set. Raise ConfigError for a stream without an end."""
    training = config.training
    sizes = training.global_batch_size, training.micro_batch_size
    if is_stream(dataset) and (task.compares_samples or training.drop_last):
        problem = "the training set is a stream, whose ranks read what comes"
        raise ConfigError(f"loss_over in model.py, training.drop_last: {problem}. Leave both out.")
    if not is_stream(dataset):
        plan = OrderedPlan(dataset, task, "training", config.seed, training.global_batch_size)
        return TimedLoader(plan, config.loader, rank, *sizes, training.drop_last)
    ends = {
        "training.max_steps": training.max_steps,
        "checkpoint.every_steps": config.checkpoint.every_steps,
    }
    for key, number in ends.items():
        if number is None:
            problem = "the training set has no __len__. Write it, or, for a stream, a number"
            raise ConfigError(f"{key}=null: {problem}.")
    # By its text: an extra imports this file, and may have been deleted.
    stream = import_module(".extras.stream", __package__)
    loader: TimedLoader = stream.StreamLoader(
        dataset, task, config.loader, rank, config.seed, *sizes
    )
    return loader


def create_evaluation_loader(
    dataset: Any, task: Task, config: LoaderConfig, rank: Rank, name: str, batch_size: int = 0,
    limit: int | None = None,
) -> EvaluationLoader:  # fmt: skip
    """Return a loader that reads samples of like lengths together, the long ones first."""
    plan = OrderedPlan(dataset, task, name)
    loader = EvaluationLoader(plan, config, rank, batch_size, limit)
    if plan.lengths is not None and not task.compares_samples:
        order = loader.order[(-plan.lengths[loader.order]).argsort(stable=True)]
        loader.begins_with_longest = True
        parts = [order[number :: rank.world_size] for number in range(rank.world_size)]
        loader.order = torch.cat(parts)
    return loader


class OrderedPlan(Plan):
    """Shuffles, draws by `sample_weights`, and batches by `sample_lengths`, in a training set of global batches."""

    def __init__(
        self, dataset: Any, task: Task, name: str, seed: int = 0, global_batch_size: int = 0
    ) -> None:
        super().__init__(dataset, task, name, seed)
        self._size = global_batch_size  # 0: not of a training set
        self.lengths = numbers_of(dataset, "sample_lengths")
        self._weights = weights = numbers_of(dataset, "sample_weights") if self._size else None
        if weights is not None and not (weights.min() >= 0 and 0 < weights.sum() < math.inf):
            raise ConfigError(
                "sample_weights of the training set: must be finite, from 0, and not all 0."
            )
        source = [dataset, *inner(dataset)][-1]  # below each Subset
        # Hugging Face's data sets decode what they read.
        if self._reads_many and not type(source).__module__.startswith("datasets."):
            self.max_workers = 0

    def _length(self, name: str) -> int:
        if is_stream(self.dataset):
            rule = (
                "a stream can be trained on, not evaluated. Return a list of its first items, say"
            )
            raise ConfigError(f"the {name} data set has no __len__ and __getitem__: {rule}.")
        return len(self.dataset)

    def order(self, epoch: int) -> Any:
        weights, lengths, seed = self._weights, self.lengths, self.seed
        if weights is None and lengths is None and self.num_samples >= LONG:
            return LongOrder(self.num_samples, seed, epoch)
        draws = super().order(epoch) if weights is None else weighted_order(weights, seed, epoch)
        if lengths is None:
            return draws
        return bucket_by_length(draws, lengths, self._size, seed, epoch)


def is_stream(dataset: Any) -> bool:
    """Return True if the data set can only be iterated: it has no __len__, or neither __getitem__ nor __getitems__."""
    own = {name for kind in type(dataset).__mro__ if kind is not Dataset for name in vars(kind)}
    return "__len__" not in own or not own & {"__getitem__", "__getitems__"}


def numbers_of(dataset: Any, name: str) -> Tensor | None:
    """Return the data set's attribute `name` as a float64 tensor, one number per sample, or None if it is not set.

    A Subset or ConcatDataset has the numbers of its data sets. Raise ConfigError if another data set hides them.
    """
    kind = type(dataset).__name__
    values: Any = getattr(dataset, name, None)
    if not hasattr(dataset, name):
        holders = [one for one in inner(dataset) if getattr(one, name, None) is not None]
        if not holders:
            return None
        datasets = getattr(dataset, "datasets", inner(dataset)[:1])
        parts: Any = [numbers_of(part, name) for part in datasets]
        if not isinstance(dataset, Subset | ConcatDataset) or any(part is None for part in parts):
            problem = f"{name} of {type(holders[0]).__name__} is out of reach (in {kind})"
            remedy = "Give it to the data set that build_datasets() returns, if that is no stream; None turns it off"
            raise ConfigError(f"{problem}. {remedy}.")
        indices = getattr(dataset, "indices", range(len(dataset)))
        values = torch.cat(parts)[torch.as_tensor(indices)]
    if values is None:
        return None
    numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if numbers.shape != (len(dataset),):
        problem = f"has the shape {tuple(numbers.shape)}, not one number per sample"
        raise ConfigError(f"{name} of {kind} {problem}.")
    return numbers


def weighted_order(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """Draw indices with replacement, in proportion to their weights, and add i * num_samples to draw i."""
    num_samples = len(weights)
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -1))
    bounds = weights.cumsum(0)  # torch.multinomial() stops at 2**24 samples
    points = torch.rand(num_samples, generator=generator, dtype=torch.float64) * bounds[-1]
    return torch.searchsorted(bounds, points, right=True) + num_samples * torch.arange(num_samples)


class LongOrder:
    """An epoch's shuffled order that is computed where it is sliced."""

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self._num_samples, self._seed = num_samples, derive_seed(seed, epoch, -1)

    def __getitem__(self, part: slice) -> Tensor:
        positions = torch.arange(*part.indices(self._num_samples))
        return long_order(positions, self._num_samples, self._seed)


def long_order(positions: Tensor, num_samples: int, seed: int) -> Tensor:
    """Return the entries of a shuffled range(num_samples) at these positions, without computing any other entry.

    `positions` and the result are int64 tensors of shape (n,). A Feistel network of six rounds permutes the numbers
    below a power of 4. A result of num_samples or more is permuted again until it is smaller (cycle walking).
    """
    half = max(1, ((num_samples - 1).bit_length() + 1) // 2)  # bits
    left, right = positions >> half, positions & (1 << half) - 1
    for number in range(6):
        mixed = (right ^ derive_seed(seed, number, 0)) * 0x2545F4914F6CDD1D  # wraps around
        mixed = (mixed ^ mixed >> 32) * 0x369DEA0F31A53F85
        left, right = right, left ^ (mixed >> 32 & (1 << half) - 1)
    found = left << half | right
    if len(beyond := (found >= num_samples).nonzero().flatten()):
        found[beyond] = long_order(found[beyond], num_samples, seed)
    return found


def bucket_by_length(order: Tensor, lengths: Tensor, size: int, seed: int, epoch: int) -> Tensor:
    """Reorder an epoch's indices so that samples of similar lengths share a global batch, which saves padding.

    In each group of WINDOW global batches (`size` samples each), samples are sorted by length and batched again. Then
    all the epoch's batches are shuffled. If the last batch has fewer samples, it stays at the end, unsorted.
    """
    whole, last = order.tensor_split([len(order) // size * size])
    windows = torch.split(whole, WINDOW * min(size, len(order)))
    # With sample_weights, each index is larger by a multiple of num_samples: see weighted_order().
    batches = torch.cat(
        [window[lengths[window % len(lengths)].argsort(stable=True)] for window in windows]
    )
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -2))
    shuffled = torch.randperm(len(whole) // size, generator=generator)
    return torch.cat([batches.view(-1, size)[shuffled].flatten(), last])

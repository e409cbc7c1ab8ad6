"""Decides which samples each rank trains on, and reads them, in the rank's own process or in worker processes.

Each epoch is shuffled and split into global batches, then into a share per rank, then into micro-batches. Global
batches do not depend on the number of ranks, so a run can resume at any point on any number of them.
"""

import gc
import hashlib
import math
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from ..config import LoaderConfig
from ..core.task import Task, inner
from ..errors import ConfigError
from ..launching.distributed import RankContext, all_reduce, broadcast_object, gather_objects
from ..launching.processes import STOP_SIGNALS, die_with_parent, num_usable_cores, signals_blocked

PLAIN = (str, int, float, bytes, type(None))  # these lead to no random generator
WINDOW = 50  # global batches whose samples are sorted together, where samples have lengths
LONG = 10_000_000  # from this many samples on, an epoch's order is computed piece by piece


@dataclass(slots=True)
class Request:
    """Lists the samples of one micro-batch. It is not a tuple, since pin_memory would search a tuple for tensors."""

    epoch: int
    indices: list[int]
    draws: list[int]  # what each sample's random seed derives from, as epoch_order() returns it
    num_samples: int  # how many of them count: all, or 0 for a filler, which a rank runs to stay together with others
    # A stream has no indices. There, num_samples says how many items to read and, once read, how many there were.
    weight: float = 0.0  # in training: num_samples * world_size / samples of the global batch
    is_last: bool = False  # in training: the last one of this rank in its step
    cursor: Any = None  # in a stream: where to begin reading and, once read, where that ended


class MicroBatch(NamedTuple):
    """Holds the samples of one forward pass, and the Request that asked for them."""

    batch: Any
    request: Request


def epoch_order(num_samples: int, seed: int, epoch: int, weights: Tensor | None = None) -> Tensor:
    """Return the order of the samples in one epoch: an int64 tensor (num_samples,), the same on every rank.

    Without `weights`, it holds each index once, shuffled. With `weights`, indices are drawn with replacement, in
    proportion to their weights, and i * num_samples is added to entry i. A sample's augmentation is seeded from its
    entry, `seed` and `epoch`, so repeats are augmented differently. entry % num_samples gives back the index.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -1))
    if weights is None:
        return torch.randperm(num_samples, generator=generator)
    bounds = weights.cumsum(0)  # torch.multinomial() stops at 2**24 samples
    points = torch.rand(num_samples, generator=generator, dtype=torch.float64) * bounds[-1]
    return torch.searchsorted(bounds, points, right=True) + num_samples * torch.arange(num_samples)


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
    # With sample_weights, each index is larger by a multiple of num_samples: see epoch_order().
    batches = torch.cat([window[lengths[window % len(lengths)].argsort(stable=True)] for window in windows])
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -2))
    shuffled = torch.randperm(len(whole) // size, generator=generator)
    return torch.cat([batches.view(-1, size)[shuffled].flatten(), last])


def numbers_of(dataset: Any, name: str) -> Tensor | None:
    """Return the data set's attribute `name` as a float64 tensor, one number per sample, or None if it is not set.

    A Subset or ConcatDataset has the numbers of its data sets. Raise ConfigError if another data set hides them.
    """
    values, kind = getattr(dataset, name, None), type(dataset).__name__
    holders = [] if hasattr(dataset, name) else [one for one in inner(dataset) if getattr(one, name, None) is not None]
    if holders:
        parts = [numbers_of(part, name) for part in getattr(dataset, "datasets", inner(dataset)[:1])]
        if not isinstance(dataset, Subset | ConcatDataset) or any(part is None for part in parts):
            remedy = "Give it to the data set that build_datasets() returns, if that is no stream; None turns it off"
            raise ConfigError(f"{name} of {type(holders[0]).__name__} is out of reach (in {kind}). {remedy}.")
        values = torch.cat(cast(Any, parts))[torch.as_tensor(getattr(dataset, "indices", range(len(dataset))))]
    if values is None:
        return None
    numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if (shape := tuple(numbers.shape)) != (len(dataset),):
        raise ConfigError(f"{name} of {kind} has the shape {shape}, not one number per sample.")
    return numbers


def is_stream(dataset: Any) -> bool:
    """Return True if the data set can only be iterated: it has no __len__, or neither __getitem__ nor __getitems__."""
    own = {name for kind in type(dataset).__mro__ if kind is not Dataset for name in vars(kind)}
    return "__len__" not in own or not own & {"__getitem__", "__getitems__"}


def check_dataset(dataset: Any, name: str) -> int:
    """Count the samples. Raise ConfigError if the count is 0 or unknown, or if ranks disagree. All ranks call this."""
    if is_stream(dataset):
        rule = "a stream can be trained on, not evaluated. Return a list of its first items, say"
        raise ConfigError(f"the {name} data set has no __len__ and __getitem__: {rule}.")
    lengths: list[int] = broadcast_object(gather_objects(len(dataset)))
    if min(lengths) != max(lengths):
        rule = "Every rank must see the same ones: is a folder still being filled, or a node's copy not whole?"
        raise ConfigError(f"the {name} data set differs between ranks: {lengths} samples. {rule}")
    if lengths[0] == 0:
        raise ConfigError(f"the {name} data set is empty: build_datasets() must return at least one sample.")
    return lengths[0]


class TrainLoader:
    """Reads this rank's micro-batches, step after step and epoch after epoch. It can begin anywhere in an epoch."""

    cursor: Any = None  # what a stream's checkpoint must hold besides epoch and position

    def __init__(
        self, dataset: Dataset[Any], task: Task, config: LoaderConfig, context: RankContext, *, seed: int,
        global_batch_size: int, micro_batch_size: int | str,
    ) -> None:  # fmt: skip
        self._reader = BatchReader(dataset, task, config, context, seed, "training")
        self.num_samples, self.global_batch_size = self._reader.num_samples, global_batch_size
        self.steps_per_epoch = -(-self.num_samples // global_batch_size)
        share = -(-min(global_batch_size, self.num_samples) // context.world_size)  # the largest share of a rank
        self.micro_batch_size = share if micro_batch_size == "auto" else min(int(micro_batch_size), share)
        self._context, self._seed, self._task = context, seed, task
        self._sample_lengths = numbers_of(dataset, "sample_lengths")
        self._sample_weights = weights = numbers_of(dataset, "sample_weights")
        if weights is not None and not (weights.min() >= 0 and 0 < weights.sum() < math.inf):
            raise ConfigError("sample_weights of the training set: must be finite, from 0, and not all 0.")
        self.seconds_waited = 0.0  # in reading, or for the workers that read

    def start(self, epoch: int, position: int) -> None:
        """Make the next step begin at sample number `position` of epoch number `epoch`. Both numbers count from 0."""
        batches = self._global_batches(epoch, position)
        # For 32 steps at once: made one by one, with CPU caches that a step has left cold, they take far longer.
        blocks = iter(lambda: [request for batch in islice(batches, 32) for request in self._share(*batch)], [])
        self._batches = self._reader.read(chain.from_iterable(blocks))

    def next_step(self, module: nn.Module) -> Iterator[tuple[MicroBatch, float | Tensor]]:
        """Yield this rank's micro-batches of the next global batch, each with the weight to multiply its loss by.

        The weight is world_size times the micro-batch's fraction of the global batch's samples (or of its total loss
        weight, if model.py defines loss_weight()). Averaged over ranks, the sum of weight * loss is the mean loss.
        """
        if self._task.loss_weight is None:
            for micro_batch in self._next_batches():
                yield micro_batch, micro_batch.request.weight
            return
        held = list(self._next_batches())
        weights = torch.stack([loss_weight_of(micro_batch, self._task, module, self._context) for micro_batch in held])
        total = all_reduce(weights.sum())
        scale = torch.where(total == 0, 0.0, self._context.world_size / total)  # all weights of a batch may be 0
        yield from zip(held, weights * scale, strict=True)

    def read_first(self, epoch: int, position: int, choose: Any = max) -> MicroBatch:
        """For a dry run, return the largest micro-batch of the step at this position, or the smallest if choose=min."""
        requests = self._share(*next(self._global_batches(epoch, position)))
        chosen = choose(requests, key=lambda request: len(request.indices))
        # A worker reads, if there is one: workers that are forked later would share a file that is opened here.
        return next(self._reader.read([chosen]))  # start() must be called before training reads on

    def close(self) -> None:
        del self._batches, self._reader  # this ends the worker processes

    def _next_batches(self) -> Iterator[MicroBatch]:
        asked_at = time.perf_counter()
        for micro_batch in self._batches:
            self.seconds_waited += time.perf_counter() - asked_at
            yield micro_batch
            if micro_batch.request.is_last:
                return
            asked_at = time.perf_counter()

    def _global_batches(self, epoch: int, position: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (epoch, indices as in epoch_order()) for each global batch, without end. Start at `position`."""
        size, num_samples = self.global_batch_size, self.num_samples
        is_long = self._sample_lengths is self._sample_weights is None and num_samples >= LONG
        while True:
            order = torch.empty(0) if is_long else epoch_order(num_samples, self._seed, epoch, self._sample_weights)
            if self._sample_lengths is not None:
                order = bucket_by_length(order, self._sample_lengths, size, self._seed, epoch)
            seed = derive_seed(self._seed, epoch, -1)
            for start in range(position, num_samples, size):
                stop = min(start + size, num_samples)
                part = long_order(torch.arange(start, stop), num_samples, seed) if is_long else order[start:stop]
                yield epoch, part.tolist()
            epoch, position = epoch + 1, 0

    def _share(self, epoch: int, global_batch: list[int]) -> Iterator[Request]:
        """Yield a Request per micro-batch in this rank's share of global_batch. Share sizes differ by at most 1."""
        rank, world_size, size = self._context.rank, self._context.world_size, len(global_batch)
        # Equally many pieces on all ranks: forward may hold collectives (FSDP). An empty one weighs 0. Rank 0 has none:
        # no share is larger than its own. Its BatchNorm statistics are the ones that are saved.
        largest_share = -(-size // world_size)
        num_pieces = -(-largest_share // self.micro_batch_size)
        share = global_batch[-(-rank * size // world_size) : -(-(rank + 1) * size // world_size)]
        for number in range(num_pieces):
            piece = share[number * len(share) // num_pieces : (number + 1) * len(share) // num_pieces]
            weight = len(piece) * world_size / size  # 7 samples on 2 ranks: 4 * 2/7 and 3 * 2/7; DDP's mean: 4/7, 3/7
            draws = piece or global_batch[:1]
            indices = draws if self._sample_weights is None else [draw % self.num_samples for draw in draws]
            yield Request(epoch, indices, draws, len(piece), weight, number == num_pieces - 1)


class Fetcher(Dataset[MicroBatch]):
    """Reads the samples that a Request lists. Afterwards, it restores the states of the random generators.

    To make augmentation repeatable, it seeds the random generators, and those that the data set owns, from a hash of
    (seed, epoch, index) before it reads each sample, and again before it collates the batch. Samples that
    `__getitems__` reads together share one seed.
    """

    max_workers = 8
    _is_checked = False  # its batches are as they should be
    _own: list[Any] | None = None  # the data set's generators, once this process has looked for them

    def __init__(self, dataset: Dataset[Any], task: Task, seed: int) -> None:
        self._dataset: Any = dataset
        self._task = task
        self._roots: list[Any] = [dataset]  # where to look for generators, besides dataset.py
        self._seed, self._epoch = seed, -1
        while isinstance(dataset, Subset):  # a Subset has __getitems__ whatever the data set below offers
            dataset = dataset.dataset
        self._has_whole_batches = hasattr(dataset, "__getitems__")
        self.is_quick = self._has_whole_batches and not type(dataset).__module__.startswith("datasets.")  # Hugging Face

    def __getitem__(self, request: Request) -> MicroBatch:
        try:
            self.set_epoch(request.epoch)
            micro_batch = MicroBatch(self._read(request), request)
            if not self._is_checked:  # a batch that collate() or __getitems__ makes may differ from the first
                check_batch(micro_batch.batch, len(request.indices) or request.num_samples, self._task)
                self._is_checked = self._task.collate is default_collate and not self._has_whole_batches
            return micro_batch
        except (StopIteration, SystemExit) as error:  # it would end the loop over batches without an error
            raise RuntimeError(f"the data set, or its collate function, raised {type(error).__name__}") from error
        except ConfigError:
            raise
        except Exception as error:
            if "default_collate: batch must" in str(error) or "automatic differentiation" in str(error):
                raise ConfigError(f"{error} Mend the samples in dataset.py, or write collate(items) there.") from None
            error.add_note(f"while reading the samples {request.indices} of {type(self._dataset).__name__}")
            raise

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            for one in [self._dataset] if hasattr(self._dataset, "set_epoch") else inner(self._dataset):
                getattr(one, "set_epoch", lambda _: None)(epoch)
        self._epoch = epoch

    def _read(self, request: Request) -> Any:
        dataset, rows = self._dataset, request.indices
        if type(dataset) is Subset:
            rows, dataset = [int(dataset.indices[row]) for row in rows], dataset.dataset
        if type(dataset) is TensorDataset and self._task.collate is default_collate:
            index = torch.from_numpy(numpy.array(rows))  # once: each tensor would make its own from a list
            return [tensor[index] for tensor in dataset.tensors]  # as collated items, without reading them one by one
        with generators_restored() if get_worker_info() is None else nullcontext():  # in a worker, nobody else draws
            is_first, batch = self._own is None, self._read_seeded(request)
            own = generators_of(*self._roots, self._task.data_globals) if is_first else []
            if len(own) > len(self._own or ()):  # some were made when first used
                self._own = own
                batch = self._read_seeded(request)
            return batch

    def _read_seeded(self, request: Request) -> Any:
        items: Any = []
        if not self._has_whole_batches:
            for draw, index in zip(request.draws, request.indices, strict=True):
                self._seed_for(request.epoch, draw)
                items.append(self._dataset[index])
        self._seed_for(request.epoch, -3 - request.draws[0])
        if self._has_whole_batches:
            items = self._dataset.__getitems__(request.indices)
        return self._task.collate(items) if isinstance(items, list) else items

    def _seed_for(self, epoch: int, number: int) -> None:
        if self._own is None:
            self._own = generators_of(*self._roots, self._task.data_globals)
        seed_cpu(derive_seed(self._seed, epoch, number), self._own)


class Requests:
    """A sampler for the DataLoader. The samples that it requests can be changed without restarting the workers."""

    now: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)


class BatchReader:
    """Reads micro-batches and moves them to the rank's device. Its worker processes live as long as this object."""

    def __init__(
        self, dataset: Any, task: Task, config: LoaderConfig, context: RankContext, seed: int, name: str
    ) -> None:
        self.num_samples = check_dataset(dataset, name)
        self.fetcher: Any = dataset if isinstance(dataset, Fetcher) else Fetcher(dataset, task, seed)
        self._requests, self.device = Requests(), context.device
        # A worker's pipe costs about 1 ms a batch, and on the CPU the cores are busy.
        is_slow = context.device.type == "cuda" and not self.fetcher.is_quick
        num_auto = min(self.fetcher.max_workers, num_usable_cores() // context.local_world_size) if is_slow else 0
        self.num_workers = num_auto if config.num_workers == "auto" else config.num_workers
        self._loader: DataLoader[MicroBatch] | None = None
        if self.num_workers or context.device.type != "cpu":
            self._loader = DataLoader(
                self.fetcher,
                batch_size=None,  # a request is a whole micro-batch already
                collate_fn=cast(Any, MicroBatch._make),  # torch's own would turn tuples into lists, arrays into tensors
                sampler=cast(Any, self._requests),
                num_workers=self.num_workers,
                prefetch_factor=config.prefetch_factor if self.num_workers else None,
                persistent_workers=self.num_workers > 0,
                pin_memory=context.device.type == "cuda",
                worker_init_fn=partial(_start_worker, os.getpid()),
                # By default a rank that a fork server has started would start one of its own, which imports torch anew.
                multiprocessing_context="fork" if self.num_workers and sys.platform == "linux" else None,
                generator=torch.Generator(),  # otherwise each iterator would draw from the run's own generator
            )

    def read(self, requests: Iterable[Request]) -> Iterator[MicroBatch]:
        """Return an iterator over the requested micro-batches, in order. It is valid until the next call of read()."""
        if self._loader is None:
            return map(self.fetcher.__getitem__, requests)
        self._requests.now = requests
        with signals_blocked() if self._loader.num_workers else nullcontext():  # they would kill a worker that starts
            micro_batches = iter(self._loader)
        if self.device.type == "cpu":
            return micro_batches
        return (micro_batch._replace(batch=move(micro_batch.batch, self.device)) for micro_batch in micro_batches)


def _start_worker(rank_pid: int, _worker_id: int) -> None:
    die_with_parent(rank_pid)
    os.setpgrp()  # Ctrl-C goes to a whole group: the rank decides, and saves first
    for number in STOP_SIGNALS:  # some schedulers signal each process of a run
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # for the processes that user code starts here


@runtime_checkable
class Movable(Protocol):
    to: Any  # the method of a tensor, a graph, a tokenizer's output


def move(batch: Any, device: torch.device) -> Any:
    """Move everything that has a to() method to `device`, including items of lists, mappings and dataclasses."""

    def move_one(value: Movable) -> Any:
        return value.to(device, non_blocking=device.type == "cuda") if isinstance(value, Tensor) else value.to(device)

    return apply_to_collection(batch, dtype=Movable, function=move_one)


@torch.no_grad()
def loss_weight_of(micro_batch: MicroBatch, task: Task, module: nn.Module, context: RankContext) -> Tensor:
    """Return this micro-batch's loss weight as a 0-dim tensor. It is 0 if no sample counts toward the loss."""
    weight: Any = micro_batch.request.num_samples
    if task.loss_weight is not None and weight:
        weight = task.loss_weight(micro_batch.batch, module)
    return torch.ones((), dtype=context.sum_dtype, device=context.device).mul(weight)  # a copy from the host would wait


def check_batch(batch: Any, num_samples: int, task: Task) -> None:
    """Raise ConfigError if a batch requires a gradient, or has left samples out that its weight in the loss counts."""
    entries = [*entries_of(batch)]
    if any(getattr(entry, "requires_grad", False) for entry in entries):
        raise ConfigError("samples require a gradient. Detach them in dataset.py; compute_loss may require one anew.")
    largest = max([len(entry) for entry in entries if getattr(entry, "ndim", 1)], default=num_samples)
    if largest < num_samples and task.loss_weight is None:  # also (T, B), where loss_weight() can return B
        remedy = "Leave none out, or let loss_weight() of model.py return what the loss is a mean over"
        raise ConfigError(f"dataset.py made a batch of {largest} entries from {num_samples} samples. {remedy}.")


def entries_of(batch: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and lists in a batch. In a list, look at the first item only."""
    if isinstance(batch, Tensor | numpy.ndarray | list):
        yield batch
    parts: Any = batch[:1] if isinstance(batch, list) else batch if isinstance(batch, tuple) else ()
    if is_dataclass(batch) or isinstance(batch, Mapping):
        parts = (batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})).values()
    for part in parts:
        yield from entries_of(part)


def seed_generators(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch, on all devices."""
    if (name := type(cast(Any, numpy.random).get_bit_generator()).__name__) != "MT19937":
        raise ConfigError(f"numpy.random.set_bit_generator(): checkpoints cannot hold {name}. Leave the call out.")
    torch.manual_seed(seed)
    seed_cpu(seed)


def seed_cpu(seed: int, others: Iterable[Any] = ()) -> None:
    """Seed the random generators of the CPU, and give each of the `others` a seed of its own."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() takes 80 microseconds
    for own_seed, other in enumerate(others, start=seed + 1):
        if isinstance(other, numpy.random.Generator):
            other.bit_generator.state = type(other.bit_generator)(own_seed).state
        else:
            (other.manual_seed if isinstance(other, torch.Generator) else other.seed)(own_seed % 2**32)


def generators_of(*roots: Any) -> list[Any]:
    """Return the random generators that the roots lead to, in the same order in every process. It calls no user code.

    Attributes, containers, closures, classes, and the globals of functions in this package lead on.
    """
    kinds = numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator
    global_ones: Any = random.seed, numpy.random.rand, torch.default_generator.seed
    found, reached, seen = list[Any](), [*roots], {id(method.__self__) for method in global_ones}
    package, libraries = __name__.partition(".")[0], {*sys.stdlib_module_names, "torch", "numpy"}
    for value in reached:  # it grows
        is_code = isinstance(value, type | FunctionType) and str(value.__module__).partition(".")[0] in libraries
        is_other = type(value) is dict and not str(value.get("__package__", package)).startswith(package)
        if isinstance(value, kinds):
            found.append(value)
        elif not is_code and not is_other and not isinstance(value, Tensor | ModuleType) and len(reached) < 20_000:
            parts = {id(x): x for x in gc.get_referents(value)[:500] if id(x) not in seen and not isinstance(x, PLAIN)}
            seen.update(parts)
            reached += parts.values()
    return found


def derive_seed(seed: int, epoch: int, index: int) -> int:
    """Hash (seed, epoch, index) to a 63-bit seed. Adding up the three would often give the same seed twice."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def get_random_states(*devices: torch.device) -> dict[str, Any]:
    """Return the RNG states of the CPU and of the given CUDA devices. torch.load(weights_only=True) can load them."""
    name, keys, position, has_gauss, gauss = cast(tuple[Any, ...], numpy.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.copy()), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"],
    }


def set_random_states(states: dict[str, Any], *devices: torch.device) -> None:
    """Restore the states that get_random_states() returned. Ignore CUDA states with no matching GPU in `devices`."""
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    numpy.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    gpus = [device for device in devices if device.type == "cuda"]
    for device, state in zip(gpus, states["cuda"], strict=False):  # the checkpoint may hold fewer
        torch.cuda.set_rng_state(state, device)


@contextmanager
def generators_restored(*devices: torch.device) -> Iterator[None]:
    """On exit, restore the random generators of the CPU and the given CUDA devices to their state on entry."""
    states = get_random_states(*devices)
    try:
        yield
    finally:
        set_random_states(states, *devices)

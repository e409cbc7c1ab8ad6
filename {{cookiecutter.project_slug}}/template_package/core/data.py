"""Decides which samples each rank takes in each step, and reads them.

Any global batch size is exact on any number of ranks:

- An epoch's order is a function of (seed, epoch). It is cut into global batches, of which the last
  may be short. A position in the order says where a run is, whatever its ranks.
- cut_share() cuts a global batch of B samples into a share per rank, and each share into
  micro-batches. Their sizes differ by at most one sample.
- A micro-batch of n samples has the mean loss of its n samples. Its loss is multiplied by
  n * world_size / B. DDP averages gradients over ranks, that is, it divides their sum by
  world_size. What is left is the sum of n / B times each mean: the mean over all B samples.
- Ranks with fewer samples run as many micro-batches as the others, with weight 0 where they have
  no sample, since forward and backward passes may hold collectives.

A Plan says which samples come in which order, and reads them. The loaders are handed one. The plans
of size=full draw by weight, sort by length, or read a stream.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from ..errors import NEEDS_FULL, ConfigError, FailureError
from .global_batch import global_batch
from .processes import start_worker
from .random_states import (
    derive_seed,
    generators_of,
    seed_cpu,
    seed_generators,
)
from .ranks import Rank, all_reduce, num_usable_cores
from .task import Task, inner


@dataclass(slots=True)
class Request:
    """The samples of one micro-batch. No tuple: pin_memory would search a tuple for tensors."""

    epoch: int
    indices: list[int]
    draws: list[int]  # each sample's random seed derives from its draw, a number in Plan.order()
    num_samples: int  # how many count: all, or 0 for a filler, which keeps the ranks together
    weight: float = 0.0  # in training: num_samples * world_size / samples of the global batch
    is_last: bool = False  # in training: of this rank in its step
    batch_size: int = 0  # samples of the global batch, if the loss compares them; else 0
    is_raw: bool = False  # to look at the samples alone: they are not collated


MicroBatch = tuple[Any, Request]  # a batch as collate() returns it, and what was asked for


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return each index once, shuffled: (num_samples,) int64, the same on every rank."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, -1))
    return torch.randperm(num_samples, generator=generator)


def cut_share(
    batch: Tensor, rank: int, world_size: int, micro_batch_size: int
) -> tuple[Tensor, ...]:
    """Return this rank's micro-batches of a batch, equally many on all ranks. Some may be empty.

    No share is larger than rank 0's, so that its micro-batches are never empty: its BatchNorm
    statistics are the ones that are saved.
    """
    largest_share = -(-batch.numel() // world_size)  # len() takes 3 microseconds
    share = batch.tensor_split(world_size)[rank]  # sizes differ by at most one, larger ones first
    return share.tensor_split(-(-largest_share // micro_batch_size))


class Plan(Dataset[MicroBatch]):
    """Which samples of a data set are read, in which order, and how.

    Augmentation is repeatable: before each sample, and before collating, the random generators and
    those that the data set owns are seeded from a hash of (seed, epoch, index). Samples that
    __getitems__ reads together share one seed.
    """

    max_workers = 8
    _epoch = -1
    _own: list[Any] | None = None  # the data set's generators, once they have been looked for

    def __init__(self, dataset: Any, task: Task, name: str, seed: int = 0) -> None:
        self.dataset, self.task, self.seed = dataset, task, seed
        while isinstance(dataset, Subset):  # a Subset has __getitems__ whatever is below
            dataset = dataset.dataset
        self._reads_many = hasattr(dataset, "__getitems__")
        length = self.num_samples = self._length(name)
        ends = all_reduce(torch.tensor([length, -length]), distributed.ReduceOp.MAX)
        if length == 0 or ends.sum() != 0:
            raise ConfigError(
                f"the {name} data set is empty, or differs between ranks: {-ends[1]} to {ends[0]} "
                "samples. All must see the same ones: is a folder still being filled?"
            )

    def _length(self, name: str) -> int:
        """Return the number of samples. Raise ConfigError if they cannot be drawn equally."""
        parts = [self.dataset, *inner(self.dataset)]
        is_weighted = any(getattr(part, "sample_weights", None) is not None for part in parts)
        if is_weighted or not hasattr(self.dataset, "__len__"):
            raise ConfigError(
                f"the {name} data set has sample_weights, or no __len__ (a stream): that {NEEDS_FULL}"
            )
        return len(self.dataset)

    def order(self, epoch: int) -> Any:
        """Return the draws of an epoch: a tensor, or what can be sliced as one.

        A draw modulo num_samples is a sample's index.
        """
        return epoch_order(self.num_samples, self.seed, epoch)

    def __getitem__(self, request: Request) -> MicroBatch:
        try:
            batch = self._read(request)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # some would end the loop without a word
            text = str(error)
            if "default_collate: batch must" in text or "automatic differentiation" in text:
                raise ConfigError(
                    f"{text} Mend the samples in dataset.py, or write collate(items) there."
                ) from None
            if "shared memory" in text:
                raise FailureError(
                    f"/dev/shm has no room for a batch ({text}). Make it larger (docker run "
                    "--shm-size=8g), or set loader.num_workers=0."
                ) from None
            raise RuntimeError(
                f"the data set, or its collate function, raised {error!r} "
                f"while reading the samples {request.indices} of {type(self.dataset).__name__}"
            ) from error
        size = largest_size(batch)
        if 0 < size < request.num_samples and self.task.loss_weight is None:
            raise ConfigError(
                f"dataset.py made a batch of {size} entries from {request.num_samples} samples. Leave "
                "none out, or let loss_weight() of model.py return what the loss is a mean over."
            )
        return batch, request

    def _read(self, request: Request) -> Any:
        dataset: Any = self.dataset
        rows = request.indices
        if type(dataset) is Subset:
            rows, dataset = [dataset.indices[row] for row in rows], dataset.dataset
        if type(dataset) is TensorDataset and self.task.collate is default_collate:
            return [*dataset[torch.tensor(rows)]]  # as collated; it draws nothing
        self.set_epoch(request.epoch)
        if self._own is not None:
            return self._read_seeded(request)
        roots = self.dataset, self.task.data_globals
        self._own = generators_of(*roots)
        batch = self._read_seeded(request)
        own = generators_of(*roots)
        if len(own) > len(self._own):  # some data sets make one when they are first read
            self._own = own
            batch = self._read_seeded(request)
        return batch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._seed_for(-(2**20) - 1, epoch)  # it may draw
            for one in [self.dataset, *inner(self.dataset)]:
                getattr(one, "set_epoch", lambda _: None)(epoch)
        self._epoch = epoch

    def _read_seeded(self, request: Request) -> Any:
        items: Any = []
        if not self._reads_many:
            for draw in request.draws:
                self._seed_for(request.epoch, draw)
                items.append(self.dataset[draw % self.num_samples])
        self._seed_for(request.epoch, -3 - request.draws[0])
        if self._reads_many:
            items = self.dataset.__getitems__(request.indices)
        if request.is_raw:  # clones: a worker would share the whole tensor that a sample views
            return apply_to_collection(
                items, Tensor, lambda x: x.detach().clone(), allow_frozen=True
            )
        return self.task.collate(items) if isinstance(items, list) else items

    def _seed_for(self, epoch: int, number: int) -> None:
        seed_cpu(derive_seed(self.seed, epoch, number), self._own or ())


class Loader:
    """Reads micro-batches to the rank's device. Its worker processes live as long as this object."""

    def __init__(self, plan: Plan, config: Any, rank: Rank) -> None:
        self.plan, self._rank, self.device = plan, rank, rank.device
        self.num_samples = plan.num_samples
        self._requests: Any = Requests()
        is_gpu = self.device.type == "cuda"
        num_workers: Any = config.num_workers
        if num_workers == "auto":  # a worker's pipe costs 1 ms a batch, and a CPU's cores are busy
            num_cores = num_usable_cores() // rank.local_world_size
            num_workers = is_gpu * min(plan.max_workers, num_cores)
        self._loader = DataLoader[MicroBatch](
            plan,
            batch_size=None,  # a request is a whole micro-batch already
            collate_fn=tuple,  # torch's own would turn the tuples in it into lists
            sampler=self._requests,
            num_workers=num_workers,
            prefetch_factor=config.prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            pin_memory=is_gpu,
            worker_init_fn=partial(start_worker, os.getpid()),
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            generator=torch.Generator(),  # otherwise iterators draw from the run's own
        )

    def _read(self, requests: Iterable[Request]) -> Iterator[MicroBatch]:
        """Yield the requested micro-batches in order. Only the latest call's iterator is valid."""
        self._requests.now = requests
        # To read here through the DataLoader would take 60 microseconds more a batch.
        is_plain = not (self._loader.num_workers or self._loader.pin_memory)
        for batch, request in map(self.plan.__getitem__, requests) if is_plain else self._loader:
            yield move(batch, self.device), request

    def seed_model(self, request: Request) -> None:
        """Seed what model.py draws for this micro-batch, by its first sample.

        So it depends neither on what was drawn before, nor on the rank that computes it.
        """
        seed = seed_cpu if self._rank.device.type == "cpu" else seed_generators
        seed(derive_seed(self.plan.seed, -1 - request.epoch, request.draws[0]))

    def _request(self, epoch: int, piece: Tensor, batch: Tensor) -> Request:
        """Return the request for a piece of a global batch. If it is empty, a sample is repeated."""
        number, size = piece.numel(), batch.numel()
        draws = (piece if number else batch[:1]).tolist()
        indices = [draw % self.plan.num_samples for draw in draws]
        weight = number * self._rank.world_size / size
        size *= self.plan.task.compares_samples
        return Request(epoch, indices, draws, number, weight, batch_size=size)

    def trial(self, size: int) -> tuple[Tensor, Tensor]:
        """Return samples to try, at most `size` on this rank, and the global batch that they stand for."""
        raise NotImplementedError

    def read_trial(self, size: int, shift: int = 0, *, is_cut: bool = False) -> list[MicroBatch]:
        """Read samples of a trial as one micro-batch, in a shifted order, or cut in two. Seed the model.

        After another shift, collate() and the model draw otherwise, and each sample is the same.
        """
        samples, batch = self.trial(size)
        # Off the middle, at an odd number: else both parts often hold equally many that count.
        cuts = [min(len(samples) // 2 + 1 | 1, len(samples) - 1)] * is_cut
        pieces = samples.tensor_split(cuts)
        requests = [self._request(0, piece.roll(-shift), batch) for piece in pieces]
        micro_batches = [*self._read(requests)]
        self.seed_model(replace(requests[0], epoch=shift))
        return micro_batches


class Requests:
    """A sampler for the DataLoader, whose requests can change while its workers live on."""

    now: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)


class TrainLoader(Loader):
    """Reads this rank's micro-batches, step after step. It can begin anywhere in an epoch."""

    def __init__(
        self,
        plan: Plan,
        config: Any,
        rank: Rank,
        global_batch_size: int,
        micro_batch_size: int | str,
        drop_last: bool = False,
    ) -> None:
        super().__init__(plan, config, rank)
        self.global_batch_size = global_batch_size
        if drop_last:  # other ones in each epoch
            self.num_samples -= self.num_samples % global_batch_size
        if not self.num_samples:
            problem = f"there are {plan.num_samples} training samples"
            raise ConfigError(
                f"training.global_batch_size={global_batch_size}: {problem}, and drop_last drops all."
            )
        self.steps_per_epoch = -(-self.num_samples // global_batch_size)
        share = -(-min(global_batch_size, self.num_samples) // rank.world_size)  # the largest one
        size = share if micro_batch_size == "auto" else int(micro_batch_size)
        check_whole(plan.task, "training", size, share)
        self.micro_batch_size = min(share, size)

    def start(self, epoch: int, position: int) -> None:
        """Begin the next step at sample number `position` of `epoch`. Both count from 0."""
        self._micro_batches = self._read(chain.from_iterable(self._cut(epoch, position)))

    def next_step(self, module: nn.Module) -> Iterator[tuple[MicroBatch, float | Tensor]]:
        """Yield this rank's micro-batches of the next global batch, each with its loss's weight.

        With loss_weight() in model.py, weights are fractions of the batch's total loss weight.
        """
        task, rank = self.plan.task, self._rank
        held: list[MicroBatch] = []
        for batch, request in self._micro_batches:
            if task.loss_weight is None:
                self.seed_model(request)
                with global_batch(request.batch_size):  # until the next one: backward passes, too
                    yield (batch, request), request.weight
            else:
                held.append((batch, request))
            if request.is_last:
                break
        if held:
            with global_batch(request.batch_size):
                counted = list[Tensor]()
                for micro_batch in held:
                    self.seed_model(micro_batch[1])
                    counted.append(loss_weight_of(micro_batch, task, module, rank))
                weights = torch.stack(counted)
                total = all_reduce(weights.sum())
                scale = torch.where(total == 0, 0.0, rank.world_size / total)
                for micro_batch, weight in zip(held, weights * scale, strict=True):
                    self.seed_model(micro_batch[1])
                    yield micro_batch, weight

    def _cut(self, epoch: int, position: int) -> Iterator[list[Request]]:
        """Yield this rank's requests of each step, without end."""
        rank, world_size = self._rank.rank, self._rank.world_size
        while True:
            order = self.plan.order(epoch)
            for start in range(position, self.num_samples, self.global_batch_size):
                batch = order[start : start + self.global_batch_size]
                step = [
                    self._request(epoch, piece, batch)
                    for piece in cut_share(batch, rank, world_size, self.micro_batch_size)
                ]
                step[-1].is_last = True
                yield step
            epoch, position = epoch + 1, 0

    def trial(self, size: int) -> tuple[Tensor, Tensor]:
        batch = self.plan.order(0)[: size * self._rank.world_size]
        return batch.tensor_split(self._rank.world_size)[self._rank.rank], batch

    def read_few(self, size: int, *, is_raw: bool = False) -> list[MicroBatch]:
        """Read this rank's share of a global batch of this size, and all of it. Then call start()."""
        few = self.plan.order(0)[:size]
        share = few.tensor_split(self._rank.world_size)[self._rank.rank]
        requests = self._request(0, share, few), self._request(0, few, few)
        return [*self._read([replace(request, is_raw=is_raw) for request in requests])]


class EvaluationLoader(Loader):
    """Gives each evaluated sample to exactly one rank. All ranks read equally many micro-batches."""

    begins_with_longest = False  # then a trial takes the first ones: they need the most memory

    def __init__(
        self, plan: Plan, config: Any, rank: Rank, batch_size: int, limit: int | None = None
    ) -> None:
        super().__init__(plan, config, rank)
        num_all = self.num_samples
        self._batch_size = plan.task.compares_samples and batch_size  # of what the loss compares
        self.num_samples = min(num_all, limit or num_all)
        # With a limit, take samples at even distances: the first ones may be of one class.
        self.order = torch.arange(self.num_samples) * num_all // self.num_samples

    def read(self, micro_batch_size: int) -> Iterator[MicroBatch]:
        """Read this rank's share."""
        requests: list[Request] = []
        for batch in torch.split(self.order, self._batch_size or self.num_samples):
            size = len(batch) if self._batch_size else micro_batch_size
            pieces = cut_share(batch, self._rank.rank, self._rank.world_size, size)
            requests += [self._request(0, piece, batch) for piece in pieces]
        for micro_batch in self._read(requests):
            self.seed_model(micro_batch[1])
            yield micro_batch

    def trial(self, size: int) -> tuple[Tensor, Tensor]:
        batch = self.order[: self._batch_size or None]
        share = batch.tensor_split(self._rank.world_size)[self._rank.rank]
        few = len(share) if self._batch_size else min(len(share), size)
        if self.begins_with_longest:
            return share[:few], batch
        # else not the first ones, which may be of one class
        return share[torch.arange(few) * len(share) // max(few, 1)], batch


def check_whole(task: Task, section: str, size: int, share: int) -> None:
    """Raise ConfigError if micro-batches would cut a share whose samples the loss compares."""
    if task.compares_samples and size < share:
        problem = f"loss_over in model.py compares all samples, and a rank's share has {share}"
        remedy = "Leave it at auto, and cut the share inside of forward (README: loss_over)"
        raise ConfigError(f"{section}.micro_batch_size={size}: {problem}. {remedy}.")


@torch.no_grad()
def loss_weight_of(micro_batch: MicroBatch, task: Task, module: nn.Module, rank: Rank) -> Tensor:
    """Return this micro-batch's loss weight, 0-dim. It is 0 if no sample counts."""
    batch, request = micro_batch
    weight: Any = request.num_samples
    if task.loss_weight is not None:  # on all ranks: it may gather
        weight = task.loss_weight(batch, module) * bool(weight)
    return torch.ones((), dtype=rank.sum_dtype, device=rank.device).mul(weight)


@runtime_checkable
class Movable(Protocol):
    to: Any  # the method of a tensor, a graph, a tokenizer's output


def move(batch: Any, device: torch.device) -> Any:
    """Move all that has a to() method from the CPU to `device`, in lists, mappings, dataclasses."""
    if device.type == "cpu":
        return batch

    def move_one(value: Movable) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=device.type == "cuda")
        return value.to(device)

    return apply_to_collection(batch, Movable, move_one)


def largest_size(batch: Any) -> int:
    """Return the length of the longest tensor, array or list in a batch."""
    if is_dataclass(batch):
        batch = vars(batch)
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple):
        return max(map(largest_size, batch), default=0)
    if isinstance(batch, list):
        return max(len(batch), largest_size(tuple(batch[:1])))
    return len(batch) if getattr(batch, "ndim", 0) else 0

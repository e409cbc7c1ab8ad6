"""Reads a stream: a training set that can only be iterated. Each loader worker of each rank reads a part of it.

To the rest of the package, a stream is one endless epoch. This file reads it in passes: once every part has been read,
a new pass begins. Checkpoints store each rank's cursor: how far it has got through its parts.
"""

import logging
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import _utils

from ..core.data import MicroBatch, Plan, Request, move
from ..core.random_states import generators_of
from ..core.ranks import Rank, all_reduce
from ..core.task import Task, inner
from ..data import TimedLoader
from ..errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StreamRequest(Request):
    """In a stream, num_samples says how many items to read and, once read, how many there were."""

    cursor: Any = None  # where to begin reading and, once read, where that ended


class StreamLoader(TimedLoader):
    """Reads this rank's micro-batches from a stream. All ranks run the same number of micro-batches per step.

    A rank that runs out of data repeats its first micro-batch, with weight 0, until all ranks have run out.
    """

    _first: tuple[Any, Any] | None = (
        None  # the stream's first one: rehearsed, and run with weight 0
    )

    def __init__(
        self,
        dataset: Any,
        task: Task,
        config: Any,
        rank: Rank,
        seed: int,
        size: int,
        micro_batch_size: int | str,
    ) -> None:
        for name in ("sample_weights", "sample_lengths"):
            if any(getattr(one, name, None) is not None for one in (dataset, *inner(dataset))):
                problem = "a training set without __len__ and __getitem__ has none. Set it to None"
                raise ConfigError(f"{name}: {problem}.")
        if size % rank.world_size:
            rule = (
                f"all ranks read equal shares of a stream. Choose a multiple of {rank.world_size}"
            )
            raise ConfigError(f"training.global_batch_size={size}: {rule}.")
        plan = StreamPlan(dataset, task, seed, rank)
        super().__init__(plan, config, rank, size, micro_batch_size)
        # a step's micro-batches are counted before the first one is moved
        self.device = torch.device("cpu")

    def start(self, epoch: int, position: int) -> None:
        """Make the next step begin at the stream position `self.cursor`. Both arguments are ignored."""
        self._micro_batches = self._steps(self.read_first(epoch, position))

    def read_first(self, epoch: int, position: int, number: int = 0) -> MicroBatch:
        """Return this rank's first micro-batch for a dry run. Training then opens the stream anew at self.cursor."""
        share, beginning = self.global_batch_size // self._rank.world_size, self._beginning(0)
        while share % self.micro_batch_size:
            self.micro_batch_size -= 1
        self.cursor = self.cursor or beginning
        if self.cursor["split"] != beginning["split"]:
            problem = f"it began on {self.cursor['split']}, not {beginning['split']}"
            remedy = "Set device_ids and loader.num_workers as before, or choose another name=…"
            raise ConfigError(f"a stream goes on in the same parts: {problem}. {remedy}.")
        if self._first is None or self._first[1].num_samples > self.micro_batch_size:
            self._first = next(self._read_from(beginning), None)
        if self._first is None:
            problem = f"rank {self._rank.rank} finds no training item"
            raise ConfigError(f"{problem}: cut the stream in more files.")
        batch, request = self._first
        return move(batch, self._rank.device), request

    def _beginning(self, number: int) -> dict[str, Any]:
        """Return the cursor from which this rank begins pass number `number` over the data."""
        num_ranks, num_workers = self._rank.world_size, max(1, self._loader.num_workers)
        first, of = self._rank.rank * num_workers, num_ranks * num_workers
        parts = [
            {"part": [first + worker, of], "num_read": 0, "is_over": False}
            for worker in range(num_workers)
        ]
        return {
            "pass": number,
            "split": f"{num_ranks} ranks x {num_workers} parts",
            "turn": 0,
            "parts": parts,
        }

    def _read_from(self, cursor: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield micro-batches from `cursor` to the end of the data. Each also says where the next one starts."""
        parts = [*cursor["parts"]]

        def requests() -> Iterator[StreamRequest]:
            # a worker's first request names its cursor; before the turn, it asks for no item
            for number in count():
                part = cursor["parts"][number] if number < len(parts) else None
                size = self.micro_batch_size * (number >= cursor["turn"])
                yield StreamRequest(cursor["pass"], [], [], size, cursor=part)

        # Hugging Face's workers share it: not all of them at once
        self.plan.set_epoch(cursor["pass"])
        request: Any  # a StreamRequest
        for number, (batch, request) in enumerate(self._read(requests())):
            parts[number % len(parts)] = request.cursor
            request.cursor = cursor | {"turn": (number + 1) % len(parts), "parts": [*parts]}
            if request.num_samples:
                yield batch, request
            if all(part["is_over"] for part in parts):
                return

    def _steps(self, first: tuple[Any, Any]) -> Iterator[MicroBatch]:
        num_pieces = self.global_batch_size // self._rank.world_size // self.micro_batch_size
        idle = first[0], replace(first[1], num_samples=0)
        micro_batches = self._read_from(self.cursor)
        while True:
            pieces = [*islice(micro_batches, num_pieces)]
            num_items = sum(request.num_samples for _, request in pieces)
            total = int(all_reduce(torch.tensor(num_items)))  # on the CPU
            if total == 0:  # on all ranks
                number = self.cursor["pass"]
                if self.cursor == self._beginning(number):
                    problem = "the training set has no items in its second pass"
                    raise ConfigError(f"{problem}: __iter__ must begin anew.")
                self.cursor = self._beginning(number + 1)
                micro_batches = self._read_from(self.cursor)
                continue
            self.cursor = pieces[-1][1].cursor if pieces else self.cursor
            pieces += [idle] * (num_pieces - len(pieces))
            for number, (batch, request) in enumerate(pieces, start=1):
                weight = request.num_samples * self._rank.world_size / total
                answer = replace(request, weight=weight, is_last=number == num_pieces)
                yield move(batch, self._rank.device), answer


class StreamPlan(Plan):
    """Reads one part of a stream, in the rank's own process or in a worker. A request says how many items to read."""

    def __init__(self, dataset: Any, task: Task, seed: int, rank: Rank) -> None:
        library = type(dataset).__module__.partition(".")[0]
        is_sharded = library in ("datasets", "webdataset")
        self._is_sharded = is_sharded or getattr(dataset, "is_sharded", False)
        self.max_workers = 8 if self._is_sharded else 1  # more would each read all of it
        layers = getattr(dataset, "_ex_iterable", None)
        if _has(layers, "split_when_sharding"):
            rule = "each part would skip or take a part of them, of its own files. Hold out whole files instead"
            raise ConfigError(f"the training stream comes from skip() or take(): {rule}.")
        if library == "datasets" and dataset._distributed is None:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank.rank, rank.world_size)
        # not in the state
        self._has_state = hasattr(dataset, "load_state_dict") and not _has(layers, "buffer_size")
        self._beginning = deepcopy(dataset.state_dict()) if self._has_state else None
        super().__init__(dataset, task, "training", seed)
        # its own generators may hold the order of its items
        self._roots = [] if self._has_state or library == "datasets" else [dataset]

    def _length(self, name: str) -> int:
        return sys.maxsize

    def _read(self, request: Any) -> Any:
        self.set_epoch(request.epoch)
        if self._own is None:
            self._own = generators_of(*self._roots, self.task.data_globals)
        if request.cursor is not None:
            self._cursor = request.cursor
            self._items = self._read_part(request.cursor, request.epoch)
        part, num_parts = self._cursor["part"]
        request.draws = [self._cursor["num_read"] * num_parts + part]  # as unique as an index
        items = [*islice(self._items, request.num_samples)]
        batch = self.task.collate(items) if items else None
        if self._has_state and request.num_samples:
            self._cursor = self._cursor | {"state": deepcopy(self.dataset.state_dict())}
        request.num_samples, request.cursor = len(items), self._cursor
        return batch

    def _read_part(self, cursor: dict[str, Any], epoch: int) -> Iterator[Any]:
        (part, num_parts), num_former = cursor["part"], cursor["num_read"]
        started_at = time.perf_counter()
        if self._has_state:
            self.dataset.load_state_dict(deepcopy(cursor.get("state", self._beginning)))
        if not self._is_sharded:
            # a data set that splits its items among workers would split them again
            _utils.worker._worker_info = None
        items = iter(() if cursor["is_over"] else self.dataset)
        for index in count(num_former if self._has_state else 0):
            if index == num_former > 0 and not self._has_state:
                message = "found the place in the stream in %.1f seconds, by reading all that comes before it"
                logger.info(message, time.perf_counter() - started_at)
            # The first item alike in all parts: __iter__ begins with it, and may shuffle the files.
            number = index * num_parts + part if self._is_sharded and index else index
            self._seed_for(epoch, number)
            if (item := next(items, self)) is self:
                break
            if index >= num_former and (self._is_sharded or index % num_parts == part):
                self._cursor = self._cursor | {"num_read": index + 1}
                yield item
        self._cursor = self._cursor | {"is_over": True}


def _has(layer: Any, name: str) -> bool:
    """Return True if attribute `name` is true in this Hugging Face data set or in a data set that it wraps."""
    inner = getattr(layer, "ex_iterables", [getattr(layer, "ex_iterable", None)])
    return bool(getattr(layer, name, False)) or any(
        _has(one, name) for one in inner if one is not None
    )

"""Reads a training set without a length (a stream): each rank, and each of its workers, its own part of the items.

For the rest of the package a stream is one epoch without end. Here it has passes: when all parts have ended, it begins
anew. A checkpoint holds the place of each rank in its parts.
"""

import logging
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import _utils

from ..config import LoaderConfig
from ..errors import ConfigError
from ..launching.distributed import RankContext, all_reduce
from . import loader
from .loader import Fetcher, MicroBatch, Request, TrainLoader

logger = logging.getLogger(__name__)


class StreamLoader(TrainLoader):
    """This rank's micro-batches of a stream, step by step, in the same number on all ranks.

    When its parts have ended, a rank runs a batch with weight 0 until those of the other ranks have ended too.
    """

    _size = sys.maxsize  # samples of the rehearsed micro-batch; this large: none yet

    def __init__(self, dataset: Any, config: LoaderConfig, context: RankContext, *, seed: int, **sizes: Any) -> None:
        if (size := sizes["global_batch_size"]) % context.world_size:
            rule = f"all ranks read equal shares of a stream. Choose a multiple of {context.world_size}"
            raise ConfigError(f"training.global_batch_size={size}: {rule}.")
        super().__init__(PartFetcher(dataset, seed, context), config, context, seed=seed, **sizes)
        self._reader.device = torch.device("cpu")  # a step's micro-batches are counted before the first one is moved

    def start(self, epoch: int, position: int) -> None:
        """Let the next step begin at `place`."""
        self.read_first(epoch, position)
        self._go_to(self.place)
        self._batches = self._steps()

    def read_first(self, epoch: int, position: int, choose: Any = max) -> MicroBatch:
        """A micro-batch from the beginning, to rehearse. Steps read the stream anew, so that no item is lost."""
        if self._size > self.micro_batch_size:
            share, beginning = self.global_batch_size // self._context.world_size, self._beginning(0)
            self._size = max(size for size in range(1, self.micro_batch_size + 1) if share % size == 0)
            self.place = self.place or beginning
            begun, now = ([part["part"] for part in place["parts"]] for place in (self.place, beginning))
            if begun != now:
                former, present = (f"{parts[0][1] // len(parts)} ranks x {len(parts)} parts" for parts in (begun, now))
                remedy = "Set device_ids and loader.num_workers as before, or choose another name=…"
                raise ConfigError(f"a stream goes on in the same parts: it began on {former}, not {present}. {remedy}.")
            self._go_to(beginning)
            self._spare = self._read(1)
            if self._size < self.micro_batch_size:
                logger.info("stream: micro-batches of %d samples, which divide a rank's share of %d", self._size, share)
            if not self._spare:
                raise ConfigError(f"rank {self._context.rank} finds no training item: cut the stream in more files.")
        batch, request = self._spare[0]
        return MicroBatch(loader.move(batch, self._context.device), request)

    def close(self) -> None:
        del self._answers  # or the workers would live on
        super().close()

    def _beginning(self, number: int) -> dict[str, Any]:
        """The place where this pass begins: of each part of this rank, one a worker, and whose turn it is."""
        num_workers = max(1, self._reader.num_workers)
        first, of = self._context.rank * num_workers, self._context.world_size * num_workers
        parts = [{"part": [first + worker, of], "num_read": 0, "is_over": False} for worker in range(num_workers)]
        return {"pass": number, "turn": 0, "parts": parts}

    def _go_to(self, place: dict[str, Any]) -> None:
        """Restart reading at `place`, with batches from the workers in turn."""
        self._pass, self._turn, self._parts = place["pass"], 0, [*place["parts"]]

        def requests() -> Iterator[Request]:
            self._reader.fetcher.set_epoch(place["pass"])  # Hugging Face's workers share it: not all of them at once
            for number in count():  # a worker's first request names its place; before the turn, it asks for no item
                part = place["parts"][number] if number < len(place["parts"]) else None
                yield Request(place["pass"], [], [], self._size * (number >= place["turn"]), 0.0, False, part)

        self._answers = self._reader.read(requests())

    def _read(self, num_batches: int) -> list[MicroBatch]:
        """The next batches of this rank; fewer once its parts have ended."""
        found: list[MicroBatch] = []
        while len(found) < num_batches and not all(part["is_over"] for part in self._parts):
            answer = next(self._answers)
            self._parts[self._turn] = answer.request.place
            self._turn = (self._turn + 1) % len(self._parts)
            found += [answer] * (answer.request.num_samples > 0)
        return found

    def _steps(self) -> Iterator[MicroBatch]:
        num_ranks, spare = self._context.world_size, self._spare[0]
        idle = spare._replace(request=replace(spare.request, num_samples=0))
        num_pieces = self.global_batch_size // num_ranks // self._size
        while True:
            pieces = self._read(num_pieces)
            total = int(all_reduce(torch.tensor(sum(request.num_samples for _, request in pieces))))  # on the CPU
            if total == 0:
                if not any(part["num_read"] for part in self._parts) and self._pass:
                    raise ConfigError("the training set has no items in its second pass: __iter__ must begin anew.")
                self._go_to(self._beginning(self._pass + 1))
                continue
            self.place = {"pass": self._pass, "turn": self._turn, "parts": [*self._parts]}
            pieces += [idle] * (num_pieces - len(pieces))
            for number, (batch, request) in enumerate(pieces, start=1):
                weight = request.num_samples * num_ranks / total
                answer = replace(request, weight=weight, is_last=number == num_pieces)
                yield MicroBatch(loader.move(batch, self._context.device), answer)


def _layers(layer: Any) -> Iterator[Any]:
    for inner in () if layer is None else (getattr(layer, "ex_iterable", None), *getattr(layer, "ex_iterables", ())):
        yield from _layers(inner)
    yield layer


class PartFetcher(Fetcher):
    """Reads one part of a stream, in the rank or in a worker: as many items as each request asks for.

    Random generators are seeded before each item, so that its augmentation depends on (seed, pass, item) alone.
    """

    def __init__(self, dataset: Any, seed: int, context: RankContext) -> None:
        library = type(dataset).__module__.partition(".")[0]
        self._is_sharded = library in ("datasets", "webdataset") or getattr(dataset, "is_sharded", False)
        self.max_workers = 8 if self._is_sharded else 1  # more would each read all of it
        layers = [*_layers(getattr(dataset, "_ex_iterable", None))]  # of a Hugging Face data set
        # Its state leaves out what lies in a shuffle buffer.
        self._has_state = hasattr(dataset, "load_state_dict") and not any(hasattr(one, "buffer_size") for one in layers)
        if library == "datasets":
            from datasets.distributed import split_dataset_by_node

            if dataset._distributed is not None:
                raise ConfigError("the training stream is split already. Delete split_dataset_by_node.")
            if any(getattr(one, "split_when_sharding", False) for one in layers):
                rule = "each part would skip or take a part of them, of its own files. Hold out whole files instead"
                raise ConfigError(f"the training stream comes from skip() or take(): {rule}.")
            dataset = split_dataset_by_node(dataset, context.rank, context.world_size)
        self._beginning = deepcopy(dataset.state_dict()) if self._has_state else None
        super().__init__(dataset, seed)

    def __len__(self) -> int:
        return sys.maxsize

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __getitem__(self, request: Request) -> MicroBatch:
        with loader.generators_restored():
            if request.place is not None:
                self._place, self._items = request.place, self._read_part(request.place, request.epoch)
            items = [*islice(self._items, request.num_samples)]
            batch = loader._collate(items) if items else None
        if self._has_state and request.num_samples:
            self._place = self._place | {"state": deepcopy(self._dataset.state_dict())}
        return MicroBatch(batch, replace(request, num_samples=len(items), place=self._place))

    def _read_part(self, place: dict[str, Any], epoch: int) -> Iterator[Any]:
        dataset, started_at = self._dataset, time.perf_counter()
        (part, num_parts), num_former = place["part"], place["num_read"]
        self.set_epoch(epoch)
        if self._has_state:
            dataset.load_state_dict(deepcopy(place.get("state", self._beginning)))
        if not self._is_sharded:
            _utils.worker._worker_info = None  # a data set that splits its items among workers would split them again
        items = iter(() if place["is_over"] else dataset)
        for index in count(num_former if self._has_state else 0):
            if index == num_former > 0 and not self._has_state:
                words = "found the place in the stream in %.1f seconds, by reading all that comes before it"
                logger.info(words, time.perf_counter() - started_at)
            # The first item alike in all parts: __iter__ begins with it, and may shuffle the files.
            number = index * num_parts + part if self._is_sharded and index else index
            loader.seed_generators(loader.derive_seed(self._seed, epoch, number), ("python", "numpy", "torch"))
            if (item := next(items, self)) is self:
                break
            if index >= num_former and (self._is_sharded or index % num_parts == part):
                self._place = self._place | {"num_read": index + 1}
                yield item
        self._place = self._place | {"is_over": True}

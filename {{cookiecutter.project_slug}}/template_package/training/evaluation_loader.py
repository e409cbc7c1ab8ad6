"""Who evaluates which samples: each once, over all ranks, in as many micro-batches on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from ..config import LoaderConfig
from ..launching.distributed import RankContext
from .fetching import Collate, Fetcher, MicroBatch, Request, read_batches
from .loader import check_dataset, cut, holds_non_finite, lengths_of, split_evenly
from .transfer import move
from .watchdog import beat
from .workers import MAX_NAMED

AUTO_MICRO_BATCH_SIZE = 256


class EvaluationLoader:
    """Each sample of a data set once, over all ranks; every rank runs the same number of batches.

    A rank whose part is shorter repeats its first index with num_samples 0: forward passes may hold collectives (FSDP).
    """

    def __init__(
        self, dataset: Dataset[Any], config: LoaderConfig, context: RankContext, *, micro_batch_size: int | str,
        name: str, collate: Collate | None = None,
    ) -> None:  # fmt: skip
        self.num_samples = check_dataset(dataset, name)
        self._context, self._config = context, config
        self.micro_batch_size = AUTO_MICRO_BATCH_SIZE if micro_batch_size == "auto" else int(micro_batch_size)
        self._order, lengths = torch.arange(self.num_samples), lengths_of(dataset)
        if lengths is not None:  # like lengths together, and of each some on every rank
            order = lengths.argsort(stable=True)
            self._order = torch.cat([order[rank :: context.world_size] for rank in range(context.world_size)])
        self._fetcher = Fetcher(dataset, collate, seed=0, draws_alone=True)  # nothing of it moves the run's generators
        self.limit = sys.maxsize
        """Samples that are read at once, where fewer fit in this rank's memory."""

    def __iter__(self) -> Iterator[MicroBatch]:
        yield from read_batches(self._fetcher, self._requests(), self._config, self._context)

    def parts(self, request: Request) -> Iterator[MicroBatch]:
        """The samples of one micro-batch again, in parts within the limit."""
        for part in self._cut(request.indices):
            micro_batch = self._fetcher[part]  # here, not by the workers, which are reading on
            yield micro_batch._replace(batch=move(micro_batch.batch, self._context.device))

    def find_non_finite(self) -> list[int]:
        """Those of this rank's samples that hold a NaN or infinity, read again."""
        found: list[int] = []
        for index in (index for request in self._requests() for index in request.indices):
            beat()
            if len(found) <= MAX_NAMED and holds_non_finite(self._fetcher, 0, index):
                found.append(index)
        return found

    def _cut(self, indices: list[int]) -> Iterator[Request]:
        num_parts = -(-len(indices) // self.limit)
        for number, part in enumerate(cut(indices, num_parts), start=1):
            yield Request(0, part, len(part), float(len(part)), is_last=number == num_parts)

    def _requests(self) -> Iterator[Request]:
        world_size = self._context.world_size
        first, last = split_evenly(self.num_samples, world_size, self._context.rank)
        largest_part = -(-self.num_samples // world_size)
        num_batches = -(-largest_part // self.micro_batch_size)
        for piece in cut(self._order[first:last].tolist(), num_batches):
            yield from self._cut(piece) if piece else [Request(0, [0], 0, 0.0, is_last=True)]

"""Cuts a data set for evaluation and prediction: every sample once, over all ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..config import LoaderConfig
from ..launching.distributed import RankContext
from .loader import Fetcher, MicroBatch, Request, check_dataset, cut_evenly, lengths_of, read_batches, split_evenly


class EvaluationLoader:
    """Each sample of a data set once, over all ranks; all run the same number of micro-batches, as in TrainLoader."""

    def __init__(
        self, dataset: Dataset[Any], config: LoaderConfig, context: RankContext, name: str,
        max_samples: int | None = None,
    ) -> None:  # fmt: skip
        num_all = check_dataset(dataset, name)
        self.num_samples = min(num_all, max_samples or num_all)
        self._context, self._config = context, config
        # Evenly drawn if not all are wanted: the first ones may be of one class.
        self._order, lengths = torch.arange(self.num_samples) * num_all // self.num_samples, lengths_of(dataset)
        if lengths is not None:  # like lengths together, and some of each on every rank
            order = self._order[lengths[self._order].argsort(stable=True)]
            self._order = torch.cat([order[rank :: context.world_size] for rank in range(context.world_size)])
        self._fetcher = Fetcher(dataset, seed=0, is_ahead=True)  # nothing here moves the run's generators
        self._kept: dict[int, DataLoader[MicroBatch]] = {}  # by size: its workers stay from one evaluation to the next

    def read(self, micro_batch_size: int, num_parts: int | None = None) -> Iterator[MicroBatch]:
        """This rank's micro-batches, of at most so many samples; num_parts: only the first, cut in so many parts."""
        world_size = self._context.world_size
        first, last = split_evenly(self.num_samples, world_size, self._context.rank)
        largest_part = -(-self.num_samples // world_size)
        num_batches = -(-largest_part // micro_batch_size)
        pieces = cut_evenly(self._order[first:last].tolist(), num_batches)
        if num_parts is not None:
            pieces = cut_evenly(pieces[0], num_parts)
        requests = [Request(0, piece or [0], len(piece), float(len(piece)), is_last=True) for piece in pieces]
        kept = None if num_parts else self._kept
        return read_batches(self._fetcher, requests, self._config, self._context, kept, micro_batch_size)

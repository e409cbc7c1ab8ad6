"""Measures ways to copy a batch of images to the GPU beside the training of a ResNet-50. gpu.py runs it.

Today's way of the generated trainer (DECISIONS 102) copies from pinned memory on the stream that computes. A second
stream would hide the copy behind the step before. The ways take turns in one process.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from loops.common import autocast, leave, make_loader, make_model, make_optimizer
from loops.settings import Settings
from torch import Tensor
from workload.model import compute_loss

ROUNDS = 3
Way = Callable[[Iterable[list[Tensor]], str], Iterator[list[Tensor]]]


def waiting(batches: Iterable[list[Tensor]], device: str) -> Iterator[list[Tensor]]:
    for batch in batches:
        yield [tensor.to(device) for tensor in batch]


def same_stream(batches: Iterable[list[Tensor]], device: str) -> Iterator[list[Tensor]]:
    for batch in batches:
        yield [tensor.to(device, non_blocking=True) for tensor in batch]


def side_stream(batches: Iterable[list[Tensor]], device: str) -> Iterator[list[Tensor]]:
    """Yield batches whose copy began, on a second stream, before the step of the batch before."""
    if device == "cpu":  # a rehearsal
        yield from same_stream(batches, device)
        return
    computing, copying = torch.cuda.current_stream(), torch.cuda.Stream()
    held: list[tuple[list[Tensor], Any]] = []

    def take() -> list[Tensor]:
        tensors, copied = held.pop(0)
        computing.wait_event(copied)
        for tensor in tensors:
            # its memory is not given to a later copy while it is read
            tensor.record_stream(computing)
        return tensors

    for batch in batches:
        with torch.cuda.stream(copying):
            held.append(
                ([tensor.to(device, non_blocking=True) for tensor in batch], copying.record_event())
            )
        if len(held) > 1:
            yield take()
    yield take()


WAYS: dict[str, Way] = {
    "pinned, on the stream that computes": same_stream,
    "pinned, on a second stream": side_stream,
    "pinned, waiting for the copy": waiting,
}


def main() -> None:
    settings = Settings.from_environment()
    model = make_model(settings)
    optimizer = make_optimizer(model, settings)
    milliseconds: dict[str, list[float]] = {label: [] for label in WAYS}
    for number in range(1 + ROUNDS):  # the first is warm-up
        for label, way in WAYS.items():
            num_steps = settings.log_every
            batches = islice(make_loader(settings, 0, 1), 2 + num_steps)
            for step, batch in enumerate(way(batches, settings.device)):
                if step == 2:  # the first two fill the pipeline
                    synchronize(settings)
                    started = time.perf_counter()
                with autocast(settings):
                    loss = compute_loss(model, batch)[0]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronize(settings)
            if number:
                milliseconds[label].append(1000 * (time.perf_counter() - started) / num_steps)
    (settings.output / "result.json").write_text(json.dumps(milliseconds), encoding="utf-8")
    leave()


def synchronize(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

"""The bare loop, as people write it by hand. Several ranks train with DDP; mp.spawn or torchrun starts them.

The tuned variant takes whole batches from the data set and uses the fused AdamW. On a GPU, it copies batches from
pinned memory and does not wait for that.
"""
# mypy: disable-error-code="no-untyped-call, attr-defined"

from __future__ import annotations

import os

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload.model import compute_loss

from loops.common import Recorder, autocast, leave, make_loader, make_model, make_optimizer, move
from loops.settings import Settings


def train(rank: int, settings: Settings) -> None:
    model: nn.Module = make_model(settings)
    if settings.num_ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = make_optimizer(model, settings)
    loader = make_loader(settings, rank, settings.num_ranks)
    recorder = Recorder(settings, rank)
    step = 0
    while step < settings.num_steps:
        for batch in loader:
            with autocast(settings):
                loss = compute_loss(model, move(batch, settings))[0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % settings.log_every == 0:
                recorder.log(step, loss)
            if step == settings.num_steps:
                break
    recorder.finish()


def run_rank(rank: int, settings: Settings) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(settings.port))
    dist.init_process_group("gloo", rank=rank, world_size=settings.num_ranks)
    train(rank, settings)
    dist.destroy_process_group()
    leave()


def main() -> None:
    settings = Settings.from_environment()
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), settings)
    elif settings.num_ranks == 1:
        train(0, settings)
    else:
        mp.spawn(run_rank, args=(settings,), nprocs=settings.num_ranks)


if __name__ == "__main__":
    main()

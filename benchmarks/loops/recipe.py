"""The loop of DDP tutorials: each step has a barrier, an all-reduced loss, .item() and print. One rank uses DDP too."""
# mypy: disable-error-code="no-untyped-call, attr-defined"

from __future__ import annotations

import os

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from workload.model import compute_loss

from loops.common import Recorder, leave, make_loader, make_model, make_optimizer
from loops.settings import Settings


def train(rank: int, settings: Settings) -> None:
    model = DistributedDataParallel(make_model(settings))
    optimizer = make_optimizer(model, settings)
    loader = make_loader(settings, rank, settings.num_ranks)
    recorder = Recorder(settings, rank)
    step = 0
    while step < settings.num_steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = compute_loss(model, batch)[0]
            loss.backward()
            optimizer.step()
            dist.barrier()
            reduced = loss.detach().clone()
            dist.all_reduce(reduced)
            value = reduced.item() / settings.num_ranks
            step += 1
            if rank == 0:
                print(f"step {step}: loss {value:.4f}", flush=True)
            if step % settings.log_every == 0:
                recorder.log(step, loss)
            if step == settings.num_steps:
                break
    recorder.finish()


def run_rank(rank: int, settings: Settings) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(settings.port)
    dist.init_process_group("gloo", rank=rank, world_size=settings.num_ranks)
    train(rank, settings)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    own_settings = Settings.from_environment()
    mp.spawn(run_rank, args=(own_settings,), nprocs=own_settings.num_ranks)

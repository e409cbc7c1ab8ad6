"""Horovod (Sergeev and Del Balso 2018, arXiv:1802.05799), whose DistributedOptimizer averages gradients while backward
still runs.

Its ranks have connections of their own, beside the process group, which evaluation, metrics and checkpoints use.
"""

from __future__ import annotations

import math
import os
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from ..config import DdpConfig, TrainingConfig
from ..launching.distributed import RankContext, barrier, before_leaving, broadcast_object, changed_environment
from ..validation import ConfigError, is_loopback
from .base import BuildOptimizer
from .ddp import DistributedDataParallelStrategy

REDUCED_TYPES = (torch.float64, torch.float32, torch.float16)
"""Of gradients that Horovod 0.28 can add up."""


class HorovodStrategy(DistributedDataParallelStrategy):
    """Whole weights on each rank, as with DDP; Horovod's hooks in place of DDP's."""

    model: Any

    def __init__(self, config: TrainingConfig, context: RankContext, options: DdpConfig) -> None:
        if options.gradient_compression == "bf16":  # before torch's own rule for it
            raise ConfigError("ddp.gradient_compression=bf16: Horovod has none or fp16. Set one of these.")
        super().__init__(config, context, options)
        self._horovod = _import_horovod()
        _meet(self._horovod, context)
        if self._horovod.size() != context.world_size:
            raise RuntimeError(f"Horovod connected {self._horovod.size()} ranks instead of {context.world_size}")
        self._is_last_micro_batch = self._is_rehearsal = True
        self._unused: list[str] = []

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """As the base, with Horovod's optimizer beside the user's, which alone steps: of the other only the reduction
        is used. Torch's checkpoint functions do not get on with it.
        """
        for name, parameter in model.named_parameters():
            if parameter.dtype not in REDUCED_TYPES or not parameter.is_contiguous():
                raise ConfigError(
                    f"strategy=horovod: the parameter {name} is of a type or memory format that Horovod does not add "
                    "up. Build the model in float32, without channels_last, or set strategy=ddp."
                )
        super().prepare(model, build_optimizer)
        if build_optimizer is None:
            return
        self._trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._reducer = self._horovod.DistributedOptimizer(
            SGD([parameter for _, parameter in self._trained]),
            named_parameters=self._trained,
            compression=getattr(self._horovod.Compression, self._options.gradient_compression),
            gradient_predivide_factor=self.context.world_size,  # before the sum, as DDP: in fp16 it might overflow
        )

    def wrap(self, module: nn.Module) -> Any:
        """The module, with rank 0's weights and buffers."""
        self._horovod.broadcast_parameters([*module.named_parameters()], root_rank=0)
        self.synchronize_buffers()
        return module

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Horovod begins to share a gradient in the pass that it counts as the last."""
        self._is_last_micro_batch = is_last_micro_batch
        self._reducer.set_backward_passes_per_step(1 if is_last_micro_batch else 2)  # counted anew with each call
        return nullcontext()

    @property
    def wrapper(self) -> str:
        """Horovod's optimizer."""
        name: str = self._horovod.DistributedOptimizer.__name__  # what it returns has the class's name of the user's
        return name

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """As the base; after the last micro-batch's the gradients are the ranks' mean."""
        super().backward(loss, weight)
        if self._is_last_micro_batch:
            self._unused = [name for name, parameter in self._trained if parameter.grad is None]
            if not self._is_rehearsal:  # which asks when all ranks have gone through it
                self.check_gradients()
            self._reducer.synchronize()  # gives zeros to those without

    def check_gradients(self) -> None:
        """ConfigError that names the parameters without a gradient on this rank: their weights would decay all the
        same. Called after the rehearsal; from then on each step is looked at.
        """
        self._is_rehearsal = False
        if self._unused:
            raise ConfigError(
                f"strategy=horovod: {', '.join(self._unused)} got no gradient in this step, and Horovod takes that for "
                "zeros. Freeze them (requires_grad=False), use them in every loss, or set strategy=ddp and "
                "ddp.find_unused_parameters=true."
            )


def _import_horovod() -> Any:
    try:
        import horovod.torch
    except ImportError as error:  # also if it was built for another version of torch
        raise ConfigError(
            f"strategy=horovod: it cannot be imported ({str(error).splitlines()[0]}). Type: "
            "scripts/install_horovod.sh, which builds it here (minutes)."
        ) from None
    return horovod.torch


def _meet(hvd: Any, context: RankContext) -> None:
    """Connect Horovod's ranks, once a process: ours, whoever has started them; horovodrun's own meeting is not used."""
    if hvd.is_initialized():
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    server, meeting = None, ("", 0)
    if context.is_main and context.world_size > 1:
        from horovod.runner.http.http_server import RendezvousServer
        from horovod.runner.util.network import get_driver_ip

        server = RendezvousServer()
        address = get_driver_ip([interface]) if interface else socket.gethostbyname(socket.gethostname())
        meeting = address, server.start()
        server.init([])
    host, port = broadcast_object(meeting)
    _check_name(host)
    place: dict[str, str | None] = {  # each rank as a host of its own: which share one is only NCCL's business
        "HOROVOD_HOSTNAME": str(context.rank),
        "HOROVOD_RANK": str(context.rank),
        "HOROVOD_SIZE": str(context.world_size),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(context.rank),
        "HOROVOD_CROSS_SIZE": str(context.world_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host or None,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port) if host else None,
        "HOROVOD_GLOO_IFACE": interface or None,
    }
    if context.store is not None:  # otherwise a rank that is held up for 30 seconds counts as lost
        store: Any = context.store
        place["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(math.ceil(store.timeout.total_seconds()))
    with changed_environment(place):
        hvd.init()
    barrier()
    if server is not None:
        server.stop()
    before_leaving(hvd.shutdown)  # one rank's shutdown is everybody's


def _check_name(meeting: str) -> None:
    """ConfigError if the others would look for this rank where it is not: Horovod 0.28 tells them the address of the
    host's name, whatever interface it is given, and aborts the process if that fails.
    """
    name = socket.gethostname()
    try:
        own = socket.gethostbyname(name)
    except OSError:
        own = ""
    if not own or (is_loopback(own) and meeting and not is_loopback(meeting)):
        raise ConfigError(
            f"strategy=horovod: this host's name, {name}, leads to {own or 'no address'}, and Horovod lets the others "
            f"connect there. Name its own address in /etc/hosts: a line with the address and {name}."
        )

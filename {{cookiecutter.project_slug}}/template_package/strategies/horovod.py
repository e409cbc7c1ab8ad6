"""Trains with Horovod (Sergeev and Del Balso 2018, arXiv:1802.05799), whose DistributedOptimizer averages gradients.

Horovod opens its own connections between ranks. Evaluation, metrics and checkpoints use the process group.
"""

import math
import os
import socket
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from ..config import Config
from ..core.ranks import Rank, from_main
from ..errors import ConfigError
from .base import BuildOptimizer, share_from_main
from .ddp import DistributedDataParallelStrategy
from .library_environment import changed_environment

# of gradients that Horovod 0.28 can add up
REDUCED_TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
)


class HorovodStrategy(DistributedDataParallelStrategy):
    """Keeps the whole model on each rank, like DDP, but Horovod averages the gradients."""

    can_rebuild = False

    model: Any

    def __init__(self, config: Config, rank: Rank) -> None:
        if config.ddp.gradient_compression == "bf16":
            raise ConfigError(
                "ddp.gradient_compression=bf16: Horovod has none or fp16. Set one of these."
            )
        super().__init__(config, rank)
        self._horovod = _import_horovod()
        if not self._horovod.is_initialized():
            _connect(self._horovod, rank)
        self._is_last_micro_batch = True

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Prepare as on one device. The user's optimizer takes the steps. Horovod's only averages the gradients."""
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
            compression=getattr(self._horovod.Compression, self.config.ddp.gradient_compression),
            gradient_predivide_factor=self.rank.world_size,  # before the sum, as DDP: in fp16 it might overflow
        )

    def wrap(self, module: nn.Module) -> Any:
        """Copy rank 0's weights to all ranks, and return the module itself."""
        share_from_main(module, self.rank)
        return module

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Tell Horovod whether this is the step's last micro-batch. Only its backward pass averages gradients."""
        self._is_last_micro_batch = is_last_micro_batch
        # each call starts the count again
        self._reducer.set_backward_passes_per_step(1 if is_last_micro_batch else 2)
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add this micro-batch's gradients. After the last micro-batch, average them over the ranks.

        Raise ConfigError if a parameter got no gradient. Horovod would use zeros, and weight decay would shrink it.
        """
        super().backward(loss, weight)
        if not self._is_last_micro_batch:
            return
        if unused := [name for name, parameter in self._trained if parameter.grad is None]:
            raise ConfigError(
                f"strategy=horovod: {', '.join(unused)} got no gradient in this step, and Horovod takes that for zeros."
                " Freeze them (requires_grad=False), use them in every loss, or set strategy=ddp and "
                "ddp.find_unused_parameters=true."
            )
        self._reducer.synchronize()

    def close(self) -> None:
        """Disconnect all ranks from Horovod together, since one rank's shutdown ends the connections of the others."""
        if dist.is_initialized():
            dist.barrier()
        self._horovod.shutdown()


def _import_horovod() -> Any:
    try:
        import horovod.torch
    except ImportError as error:  # also if it was built for another version of torch
        raise ConfigError(
            f"strategy=horovod: it cannot be imported ({str(error).splitlines()[0]}). Type: "
            "scripts/install_horovod.sh, which builds it here (minutes)."
        ) from None
    return horovod.torch


def _connect(hvd: Any, rank: Rank) -> None:
    """Connect Horovod's ranks, numbered as in `rank`, through a server on rank 0 instead of horovodrun's server."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    server, meeting = None, ("", 0)
    if rank.is_main and rank.world_size > 1:
        from horovod.runner.http.http_server import RendezvousServer
        from horovod.runner.util.network import get_driver_ip

        server = RendezvousServer()
        address = (
            get_driver_ip([interface]) if interface else socket.gethostbyname(socket.gethostname())
        )
        meeting = address, server.start()
        server.init([])
    host, port = from_main(lambda: meeting)
    _check_host_name(host)
    variables: dict[
        str, Any
    ] = {  # each rank as a host of its own: only NCCL needs to know which ones share a host
        **dict.fromkeys(("HOSTNAME", "RANK", "CROSS_RANK"), rank.rank),
        **dict.fromkeys(("SIZE", "CROSS_SIZE"), rank.world_size),
        **{"LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"},
        **{
            "GLOO_RENDEZVOUS_ADDR": host,
            "GLOO_RENDEZVOUS_PORT": port or "",
            "GLOO_IFACE": interface,
        },
    }
    if rank.world_size > 1:  # otherwise a rank that is held up for 30 seconds counts as lost
        store: Any = rank.store
        variables["GLOO_TIMEOUT_SECONDS"] = math.ceil(store.timeout.total_seconds())
    with changed_environment(
        {f"HOROVOD_{name}": str(value) or None for name, value in variables.items()}
    ):
        hvd.init()
    if dist.is_initialized():
        dist.barrier()
    if server is not None:
        server.stop()


def _check_host_name(meeting: str) -> None:
    """Raise ConfigError if this host's name does not lead to an address that other hosts can use.

    Horovod 0.28 sends that address to the other hosts. `meeting` is the address of rank 0's server.
    """
    name, own = socket.gethostname(), ""
    with suppress(OSError):
        own = socket.gethostbyname(name)
    if not own or (own.startswith("127.") and meeting and not meeting.startswith("127.")):
        raise ConfigError(
            f"strategy=horovod: this host's name, {name}, leads to {own or 'no address'}, and Horovod lets the others "
            f"connect there. Name its own address in /etc/hosts: a line with the address and {name}."
        )


STRATEGY = HorovodStrategy

"""Trains with Hugging Face Accelerate, which wraps the model, averages gradients and runs the backward passes.

All settings come from config.yaml and the launcher. `accelerate launch` may start the ranks, but ConfigError is raised
if its own settings contradict config.yaml. The base class clips the gradients and steps the optimizer, in the same way
as Accelerate would.
"""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..config import Config, DdpConfig
from ..core.ranks import Rank
from ..core.strategies import Wrapper
from ..errors import ConfigError
from .ddp import DistributedDataParallelStrategy
from .library_environment import changed_environment, launch_variables


class AccelerateStrategy(DistributedDataParallelStrategy):
    """Trains with an Accelerator, which uses the existing process group."""

    can_rebuild = False

    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__(config, rank)
        precision = config.training.precision.replace("auto", "fp32")
        if precision == "fp16" and rank.device.type == "cpu":
            raise ConfigError(
                "training.precision=fp16: Accelerate would compute in fp32 on CPU ranks. Set it to bf16 or fp32."
            )
        _check_launcher(precision)
        self._accelerator = _create_accelerator(precision, rank, config.ddp)
        self.scaler = self._accelerator.scaler or self.scaler

    def wrap(self, module: nn.Module) -> Any:
        """Let Accelerate wrap the module in DDP. With only one rank, return the module itself."""
        model = self._accelerator.prepare_model(module)
        if isinstance(model, DistributedDataParallel):
            model.__class__ = Wrapper
            model.broadcast_buffers = self.config.ddp.broadcast_buffers
        return model

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Return no_sync(), except for the last micro-batch. Accelerator.accumulate() would weight them all equally."""
        if is_last_micro_batch:
            return super().accumulate(is_last_micro_batch=True)
        context: AbstractContextManager[None] = self._accelerator.no_sync(self.model)
        return context

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        self._accelerator.backward(loss * weight)


def _create_accelerator(precision: str, rank: Rank, options: DdpConfig) -> Accelerator:
    ddp = DistributedDataParallelKwargs(
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=True,
        static_graph=options.static_graph,
        comm_hook=DDPCommunicationHookType(options.gradient_compression.replace("none", "no")),
    )
    variables: dict[str, str | None] = dict(launch_variables(rank))
    if rank.world_size == 1:  # with these it would join a group of its own
        variables = dict.fromkeys(variables)
    variables["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # it would choose another number
    variables |= {name: None for name in os.environ if name.startswith("ACCELERATE_")}
    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run in this process
    GradientState._reset_state()
    try:
        with changed_environment(variables):
            return Accelerator(
                mixed_precision=precision.replace("fp32", "no"),
                cpu=rank.device.type == "cpu",
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=1
                ),  # the weights hold the division
                kwargs_handlers=[ddp],
            )
    except NotImplementedError as error:  # Accelerate knows GPUs and drivers on which it fails
        raise ConfigError(f"strategy=accelerate: {' '.join(str(error).split())}") from None


def _check_launcher(precision: str) -> None:
    """Raise ConfigError if the settings of `accelerate launch` or `accelerate config` contradict config.yaml."""
    asked = {
        name: value.lower() for name, value in os.environ.items() if name.startswith("ACCELERATE_")
    }
    mixed = asked.pop("ACCELERATE_MIXED_PRECISION", "no")
    prefix, is_cpu = "ACCELERATE_USE_", "ACCELERATE_USE_CPU"
    plugins = [
        name
        for name in asked
        if name.startswith(prefix) and name != is_cpu and asked[name] == "true"
    ]
    names = ", ".join(name.removeprefix(prefix).lower() for name in plugins)
    refused = {
        f"training.precision={precision}: accelerate launch asks for {mixed}. Start it with --mixed_precision no, or "
        f"set training.precision={mixed}.": mixed not in ("no", precision),
        "training.compile: accelerate launch asks for torch.compile. Start it with --dynamo_backend no, and set "
        "training.compile=true.": asked.get("ACCELERATE_DYNAMO_BACKEND", "no") != "no",
        f"strategy=accelerate: accelerate launch asks for {names}. Start it with --multi_gpu, or set strategy=fsdp or "
        "strategy=deepspeed.": bool(plugins),
    }
    for message, is_asked in refused.items():
        if is_asked:
            raise ConfigError(message)


STRATEGY = AccelerateStrategy

"""Hugging Face Accelerate: its Accelerator wraps the model, scales, clips and steps.

What it decides elsewhere is decided before it here: the ranks by the launcher, micro-batches by the loader, the rest by
config.yaml. So `accelerate launch` starts processes and no more: what it asks for beyond that is refused.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import Tensor, nn

from ..config import DdpConfig, TrainingConfig
from ..launching.distributed import RankContext, changed_environment, launch_variables
from ..validation import ConfigError
from .base import BuildOptimizer, weighted
from .ddp import DistributedDataParallelStrategy


class AccelerateStrategy(DistributedDataParallelStrategy):
    """An Accelerator over the process group that is there."""

    def __init__(self, config: TrainingConfig, context: RankContext, options: DdpConfig) -> None:
        super().__init__(config, context, options)
        if self.precision == "fp16" and context.device.type == "cpu":
            raise ConfigError(
                "training.precision=fp16: Accelerate would compute in fp32 on CPU ranks. Set it to bf16 or fp32."
            )
        _check_launcher(self.precision)
        self._accelerator = _create_accelerator(self.precision, context, options)
        self.scaler = self._accelerator.scaler or self.scaler

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """As the base; Accelerate steps the optimizer, which stays torch's for all else."""
        super().prepare(model, build_optimizer)
        if build_optimizer is not None:
            self._stepper = self._accelerator.prepare_optimizer(self.optimizer)

    def wrap(self, module: nn.Module) -> Any:
        """The module in Accelerate's DDP; with one rank the module itself."""
        with warnings.catch_warnings():  # torch has renamed an argument
            warnings.filterwarnings("ignore", ".*broadcast_buffers. is deprecated", FutureWarning)
            return self._accelerator.prepare_model(module)

    def autocast(self) -> AbstractContextManager[Any]:
        """Accelerate's precision."""
        context: AbstractContextManager[Any] = self._accelerator.autocast()
        return context

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Its no_sync() on all but the last: Accelerator.accumulate() would count equal micro-batches."""
        if is_last_micro_batch:
            return super().accumulate(is_last_micro_batch=True)
        context: AbstractContextManager[None] = self._accelerator.no_sync(self.model)
        return context

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add this micro-batch's gradients, scaled for fp16."""
        self._accelerator.backward(weighted(loss, weight))

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """As the base's."""
        self._check_averaged()
        norm: Tensor | None = None
        if max_gradient_norm is not None:
            norm = self._accelerator.clip_grad_norm_(self.module.parameters(), max_gradient_norm)
        if self.scaler.is_enabled():  # Accelerate does not see that a fused optimizer has skipped a step
            self._step_scaled()
        else:
            self._stepper.step()
        self._stepper.zero_grad()
        return norm

    def _step_and_update(self) -> None:
        self._stepper.step()


def _create_accelerator(precision: str, context: RankContext, options: DdpConfig) -> Accelerator:
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False,  # at each forward; before evaluating and saving it is done all the same
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=True,
        static_graph=options.static_graph,
        comm_hook=DDPCommunicationHookType(options.gradient_compression.replace("none", "no")),
    )
    place: dict[str, str | None] = dict(launch_variables(context))
    if context.world_size == 1:  # it would join a group of its own
        place = dict.fromkeys(place)
    place["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # it would choose another number
    place |= {name: None for name in os.environ if name.startswith("ACCELERATE_")}
    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run in this process
    GradientState._reset_state()
    try:
        with changed_environment(place):
            return Accelerator(
                mixed_precision=precision.replace("fp32", "no"),
                cpu=context.device.type == "cpu",
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # the weights hold the division
                kwargs_handlers=[ddp],
            )
    except NotImplementedError as error:  # GPUs and drivers that it knows to fail
        raise ConfigError(f"strategy=accelerate: {' '.join(str(error).split())}") from None


def _check_launcher(precision: str) -> None:
    """ConfigError if `accelerate launch`, or the file that `accelerate config` wrote, asks for what is set here."""
    asked = {name: value.lower() for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    mixed = asked.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed not in ("no", precision):
        raise ConfigError(
            f"training.precision={precision}: accelerate launch asks for {mixed}. Start it with --mixed_precision no, "
            f"or set training.precision={mixed}."
        )
    if asked.get("ACCELERATE_DYNAMO_BACKEND", "no") != "no":
        raise ConfigError(
            "training.compile: accelerate launch asks for torch.compile. Start it with --dynamo_backend no, and set "
            "training.compile=true."
        )
    plugins = [name for name, value in asked.items() if name.startswith("ACCELERATE_USE_") and value == "true"]
    if plugins := [name.removeprefix("ACCELERATE_USE_").lower() for name in plugins if not name.endswith("_CPU")]:
        raise ConfigError(
            f"strategy=accelerate: accelerate launch asks for {', '.join(plugins)}. Start it with --multi_gpu, or "
            "set strategy=fsdp or strategy=deepspeed."
        )

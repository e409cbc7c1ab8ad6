"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), with settings made from config.yaml.

Of what each rank holds under DDP, stage 1 cuts the optimizer's state over the ranks, 2 the gradients too, 3 the weights
too; 0 cuts nothing. Weights stay fp32, and forward passes run in autocast, as under the other strategies.
zero/ holds DeepSpeed's settings, and turns the ranks' parts into the state of checkpoints and back.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..config import DdpConfig, DeepspeedConfig, TrainingConfig
from ..launching.distributed import RankContext, changed_environment, join_alone, launch_variables
from ..validation import ConfigError
from .base import BuildOptimizer, weighted
from .ddp import DistributedDataParallelStrategy
from .numerics import check_step, checkpoint_activations, synchronize_batchnorm
from .sharding.gradients import GradientWatch
from .zero.settings import build_settings, check_optimizer
from .zero.state import Groups, OptimizerParts, gather_weights, scatter_weights


class DeepSpeedStrategy(DistributedDataParallelStrategy):
    """An engine of DeepSpeed's over the process group that is there."""

    model: Any
    optimizer: Any

    def __init__(self, config: TrainingConfig, context: RankContext, options: DeepspeedConfig) -> None:
        super().__init__(config, context, DdpConfig())
        self._zero, self._stage = options, options.zero_stage
        self.has_collective_forward = self._stage > 0  # or a backward that has one, before the last micro-batch
        self._deepspeed = _import_deepspeed(context)

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Cut what the stage cuts, which for evaluation alone is nothing below stage 3."""
        if build_optimizer is None and self._stage < 3:
            return super().prepare(model)
        join_alone(self.context)
        self._check(model)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        if self.config.sync_batchnorm and self.context.world_size > 1:
            model = synchronize_batchnorm(model, self.context.device)
        if self.config.activation_checkpointing:
            checkpoint_activations(model)
        if self.config.compile:
            model.compile()
        if self._stage < 3:
            model.to(self.context.device)
        self._parameters = list(model.parameters())
        optimizer = None
        if build_optimizer is not None:
            optimizer = check_step(build_optimizer(model))  # it looks at whole weights
            check_optimizer(optimizer, self._zero)
        groups = Groups(model, optimizer)
        self._watch = GradientWatch(chain.from_iterable(groups.trained), "deepspeed", "DeepSpeed takes that for zeros")
        for name, parameter in model.named_parameters():
            self._watch.listen(name, parameter)
        num_elements = sum(parameter.numel() for parameter in self._parameters)
        settings = build_settings(self._zero, self.config.max_gradient_norm, self.precision, num_elements)
        if self._stage == 3:  # one weight after the other: the device never holds all of them
            self._deepspeed.zero.Init(module=model, config_dict_or_path=settings)
            model.to(self.context.device)  # the buffers
        if optimizer is not None and self._stage > 0:
            groups.leave_trained(optimizer)
        # mpirun's number of this rank on its node is not LOCAL_RANK, which names the device: DeepSpeed would refuse it.
        with changed_environment({"OMPI_COMM_WORLD_LOCAL_RANK": None}):
            parts = self._deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        self.model, self.optimizer = parts[:2]
        self.module = model
        if optimizer is not None:
            self._parts = OptimizerParts(self.optimizer, self.module, groups, self.context)
            self._take_over_scaling()

    def wrap(self, module: nn.Module) -> Any:
        """The module itself, for evaluation alone."""
        return module

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Stages 0 and 1 share gradients in the last backward of a step, 2 and 3 in each."""
        self._is_last_micro_batch = is_last_micro_batch
        self.model.set_gradient_accumulation_boundary(is_last_micro_batch)
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add this micro-batch's gradients, scaled for fp16. ConfigError if a parameter has none after the last."""
        loss = weighted(loss, weight)
        if self._stage == 0 and self.scaler.is_enabled():
            loss = self.scaler.scale(loss)
        if self._is_last_micro_batch:
            self._watch.look_after(loss)
        self.model.backward(loss, scale_wrt_gas=False)

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """As the base's, which it is in stage 0: DeepSpeed has averaged the gradients, and that is all."""
        if self._stage == 0:
            return super().optimizer_step(max_gradient_norm)
        self.model.step()
        is_skipped = bool(self.optimizer.overflow)
        if self.scaler.is_enabled():
            self._update_scale(is_skipped)
        elif is_skipped:
            raise RuntimeError(
                "a gradient is not finite, and DeepSpeed has left out the step. Lower optimizer.learning_rate, or set "
                "training.max_gradient_norm=1."
            )
        if max_gradient_norm is None:
            return None
        return torch.as_tensor(self.model.get_global_grad_norm(), device=self.context.device)

    def check_gradients(self) -> None:
        """Each step's last backward does."""

    @property
    def evaluation_model(self) -> nn.Module:
        """The bare module; in stage 3 the engine, which gathers its weights."""
        model: nn.Module = self.model if self._stage == 3 else self.module
        return model

    def replicas(self, *, with_buffers: bool) -> dict[str, Tensor]:
        """As DDP's; none in stage 3, where each rank holds a part."""
        return {} if self._stage == 3 else super().replicas(with_buffers=with_buffers)

    def shapes(self) -> dict[str, torch.Size]:
        """As the base's: stage 3 leaves empty tensors there."""
        return self._shapes

    def local_weights(self) -> list[Tensor]:
        """As the base's; in stage 3 this rank's parts."""
        return self._parts.local_weights() if self._stage == 3 else super().local_weights()

    def get_weights(self) -> dict[str, Tensor]:
        """As the base's; in stage 3 gathered one by one."""
        return gather_weights(self.module, self.context) if self._stage == 3 else super().get_weights()

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """As the base's; in stage 3 rank 0 hands each its part."""
        scatter_weights(self.module, weights, self.context)
        if self._stage > 0:
            self.optimizer.refresh_fp32_params()

    def state_dict(self) -> dict[str, Any]:
        """As the base's, gathered from the ranks."""
        if self._stage == 0:
            return super().state_dict()
        self.synchronize_buffers()
        return {"model": self.get_weights(), "optimizer": self._parts.gather(), "scaler": self._scaler_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the base's, cut over the ranks."""
        if self._stage == 0:
            return super().load_state_dict(state)
        self.set_weights(state["model"])
        if state["optimizer"]:
            self._parts.scatter(state["optimizer"])
        self._load_scaler_state(state["scaler"])
        if self.scaler.is_enabled():
            self.optimizer.override_loss_scale(self.scaler.get_scale())

    def _check(self, model: nn.Module) -> None:
        if self.config.compile and self._stage == 3:
            raise ConfigError(
                "training.compile=true: stage 3 of DeepSpeed fetches weights around each layer, where torch.compile "
                "gives up. Set it to false, or deepspeed.zero_stage=2."
            )
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"strategy=deepspeed: parameter {name} is {parameter.dtype}. Build the model in float32; "
                    "training.precision says what it computes in."
                )
            if parameter.dim() == 0:
                raise ConfigError(
                    f"strategy=deepspeed: parameter {name} is a scalar, which DeepSpeed cannot send. Give it the shape "
                    "(1,) in model.py, or set strategy=ddp."
                )

    def _take_over_scaling(self) -> None:
        # DeepSpeed's scaler for autocast clips scaled gradients, and lets each rank skip its part of a step alone.
        self.model.torch_autocast_z0_gradscaler = None
        if self._stage > 0:
            self.optimizer.torch_autocast_gradscaler = None
            if self.scaler.is_enabled():
                self.optimizer.override_loss_scale(self.scaler.get_scale())

    def _update_scale(self, is_skipped: bool) -> None:
        """As GradScaler.update()."""
        self.num_skipped_steps += is_skipped
        state = self.scaler.state_dict()
        num_good = 0 if is_skipped else state["_growth_tracker"] + 1
        factor = state["backoff_factor"] if is_skipped else 1.0
        if num_good == state["growth_interval"]:
            num_good, factor = 0, state["growth_factor"]
        self.scaler.load_state_dict({**state, "scale": state["scale"] * factor, "_growth_tracker": num_good})
        self.optimizer.override_loss_scale(self.scaler.get_scale())


def _import_deepspeed(context: RankContext) -> Any:
    """The library, told which device to compute on (with a GPU in sight it would not take the CPU), and not to compile
    a module for CPU ranks at its first start, which takes a minute.
    """
    os.environ |= {"DS_ACCELERATOR": context.device.type, "LOCAL_RANK": launch_variables(context)["LOCAL_RANK"]}
    warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor). is deprecated", FutureWarning)
    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    return deepspeed

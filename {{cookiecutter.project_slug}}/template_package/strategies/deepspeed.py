"""Trains with DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), with settings made from config.yaml.

Stage 0 keeps everything on each rank, like DDP. Stage 1 shards the optimizer state, stage 2 also the gradients, and
stage 3 also the weights. Weights are kept in fp32, and forward passes use autocast. The folder zero/ has helpers.
"""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config
from ..core.ranks import Rank, from_main, pack, unpack
from ..errors import ConfigError, FailureError
from .base import BuildOptimizer, join_alone, share_from_main
from .ddp import DistributedDataParallelStrategy
from .library_environment import changed_environment, launch_variables
from .zero.gradients import GradientWatch
from .zero.settings import build_settings, check_optimizer
from .zero.state import Groups, OptimizerParts, gather_weights, scatter_weights


class DeepSpeedStrategy(DistributedDataParallelStrategy):
    """Trains with a DeepSpeed engine, which uses the existing process group."""

    can_rebuild = False

    model: Any
    optimizer: Any

    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__(config, rank)
        self._zero: Any = vars(config)["deepspeed"]  # of options_deepspeed.py
        self._stage, self._precision = self._zero.zero_stage, config.training.precision
        self.has_gradients = self._stage == 0
        if (decay := config.training.ema_decay) is not None:
            raise ConfigError(
                f"training.ema_decay={decay}: not under DeepSpeed. Set strategy=ddp or fsdp."
            )
        # asked in the last backward of every step: ZeRO drops gradients after it
        self.needs_all_gradients = False
        # or a collective backward, before the last micro-batch
        self.has_collective_forward = self._stage > 0
        self._deepspeed = _import_deepspeed(rank)

    def prepare(self, model: nn.Module, build_optimizer: BuildOptimizer | None = None) -> None:
        """Build the DeepSpeed engine from the model and the optimizer. For evaluation, only stage 3 needs an engine."""
        super().prepare(model)
        share_from_main(self.module, self.rank)
        if build_optimizer is None and self._stage < 3:
            return
        self._check()
        join_alone(self.rank)
        optimizer = None
        if build_optimizer is not None:
            optimizer = build_optimizer(self.module)  # it looks at whole weights
            check_optimizer(optimizer, self._zero)
        groups = Groups(self.module, optimizer)
        self._watch = GradientWatch(self.module, groups.trained)
        num_elements = sum(parameter.numel() for parameter in self.module.parameters())
        settings = build_settings(
            self._zero, self.config.training.max_gradient_norm, self._precision, num_elements
        )
        if self._stage == 3:  # one weight after the other: the device never holds all of them
            self._deepspeed.zero.Init(module=self.module, config_dict_or_path=settings)
            self.module.to(self.rank.device)  # the buffers
        if optimizer is not None and self._stage > 0:
            groups.leave_trained(optimizer)
        # LOCAL_RANK names the device. DeepSpeed would refuse that mpirun's number of this rank on its node differs.
        with changed_environment({"OMPI_COMM_WORLD_LOCAL_RANK": None}):
            parts = self._deepspeed.initialize(
                model=self.module, optimizer=optimizer, config=settings
            )
        self.model, self.optimizer = parts[:2]
        if self._stage == 3:
            self.evaluation_model = self.model  # which gathers the weights
        if optimizer is not None:
            self._parts = OptimizerParts(self.optimizer, self.module, groups, self.rank)
            # DeepSpeed's own scaler clips scaled gradients, and lets each rank skip its part of a step alone.
            self.model.torch_autocast_z0_gradscaler = self.optimizer.torch_autocast_gradscaler = (
                None
            )
            if self._stage > 0 and self.scaler.is_enabled():
                self.optimizer.override_loss_scale(self.scaler.get_scale())

    def move(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, except in stage 3, where the whole model may not fit on one device."""
        return model if self._stage == 3 else super().move(model)

    def wrap(self, module: nn.Module) -> Any:
        """Return the module itself. prepare() lets DeepSpeed wrap it together with the optimizer."""
        return module

    def accumulate(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Tell DeepSpeed which micro-batch is the last. Stages 0 and 1 average gradients only in its backward pass."""
        self._is_last_micro_batch = is_last_micro_batch
        self.model.set_gradient_accumulation_boundary(is_last_micro_batch)
        return nullcontext()

    def backward(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add this micro-batch's gradients. Raise ConfigError if a parameter still has none at the end of the step."""
        loss = loss * weight
        if self._stage == 0 and self.scaler.is_enabled():
            loss = self.scaler.scale(loss)
        if self._is_last_micro_batch:
            self._watch.check_after(loss)
        self.model.backward(loss, scale_wrt_gas=False)

    def unscale(self) -> None:
        if self._stage == 0:
            super().unscale()

    def optimizer_step(self, max_gradient_norm: float | None) -> Tensor | None:
        """Update the weights and clear the gradients. Return the gradients' norm, or None if max_gradient_norm is None.

        In stages 1 to 3, raise FailureError if gradients are not finite, except with fp16. Stage 0 does not check.
        """
        if self._stage == 0:
            return super().optimizer_step(max_gradient_norm)
        self.model.step()
        if self.scaler.is_enabled():
            self._update_scale(is_skipped=bool(self.optimizer.overflow))
        elif self.optimizer.overflow:
            raise FailureError(
                "a gradient is not finite, and DeepSpeed has left out the step. Lower optimizer.learning_rate, or set "
                "training.max_gradient_norm=1. The last checkpoint is sound."
            )
        if max_gradient_norm is None:
            return None
        return torch.as_tensor(self.model.get_global_grad_norm(), device=self.rank.device)

    def local_weights(self) -> list[Tensor]:
        return self._parts.local_weights() if self._stage == 3 else super().local_weights()

    def get_weights(self) -> dict[str, Tensor]:
        return gather_weights(self.module, self.rank) if self._stage == 3 else super().get_weights()

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        weights = unpack(from_main(lambda: pack(weights)))
        scatter_weights(self.module, weights, self.rank)

    def state_dict(self) -> dict[str, Any]:
        if self._stage == 0:
            return super().state_dict()
        return {
            "model": self.get_weights(),
            "optimizer": self._parts.gather(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._stage == 0:
            return super().load_state_dict(state)
        self.set_weights(state["model"])
        self.optimizer.refresh_fp32_params()
        if state["optimizer"]:  # each rank takes its parts of the whole
            self._parts.scatter(unpack(from_main(lambda: pack(state["optimizer"]))))
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
            self.optimizer.override_loss_scale(self.scaler.get_scale())

    def _check(self) -> None:
        if self.config.training.compile and self._stage == 3:
            raise ConfigError(
                "training.compile=true: stage 3 of DeepSpeed fetches weights around each layer, which torch.compile "
                "cannot follow. Set it to false, or deepspeed.zero_stage=2."
            )
        for name, parameter in self.module.named_parameters():
            if parameter.dtype != torch.float32 or parameter.dim() == 0:
                raise ConfigError(
                    f"strategy=deepspeed: parameter {name} is {parameter.dtype} of shape {tuple(parameter.shape)}. "
                    "Build the model in float32 (training.precision: what it computes in); give scalars the shape (1,)."
                )

    def _update_scale(self, *, is_skipped: bool) -> None:
        """Update the loss scale as GradScaler.update() does. That method cannot be called without GradScaler.step()."""
        state = self.scaler.state_dict()
        num_good = 0 if is_skipped else state["_growth_tracker"] + 1
        factor = state["backoff_factor"] if is_skipped else 1.0
        if num_good == state["growth_interval"]:
            num_good, factor = 0, state["growth_factor"]
        self.scaler.load_state_dict(
            {**state, "scale": state["scale"] * factor, "_growth_tracker": num_good}
        )
        self.optimizer.override_loss_scale(self.scaler.get_scale())


def _import_deepspeed(rank: Rank) -> Any:
    """Import DeepSpeed for this rank's device. On a machine with a GPU, DeepSpeed itself would never choose the CPU."""
    os.environ |= {
        "DS_ACCELERATOR": rank.device.type,
        "LOCAL_RANK": launch_variables(rank)["LOCAL_RANK"],
    }
    warnings.filterwarnings(
        "ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor). is deprecated", FutureWarning
    )
    import deepspeed

    # it would compile a module for CPU ranks, in a minute
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    return deepspeed


STRATEGY = DeepSpeedStrategy

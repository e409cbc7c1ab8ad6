"""DeepSpeed's settings, made from config.yaml: there is no second file to keep in step."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from omegaconf import OmegaConf
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from ...config import DeepspeedConfig
from ...validation import ConfigError, one_line

BUCKET_SIZE = 50_000_000
"""Elements reduced at once at most: DeepSpeed's own 500 million take 2 GB of each GPU, whatever the model."""
OWNED = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.micro_batch_size",
    "gradient_clipping": "training.max_gradient_norm",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "torch_autocast.enabled": "training.precision",
    "torch_autocast.dtype": "training.precision",
    "optimizer": "optimizer.name",
    "scheduler": "schedule.name",
    "zero_optimization.stage": "deepspeed.zero_stage",
}
"""DeepSpeed's keys that a key of config.yaml decides."""


def build_settings(
    options: DeepspeedConfig, max_gradient_norm: float | None, precision: str, num_elements: int
) -> dict[str, Any]:
    """DeepSpeed's settings, `deepspeed.extra` among them, for a model of `num_elements` parameters.

    ConfigError for a key that config.yaml decides elsewhere, and for what DeepSpeed refuses.
    """
    import deepspeed

    for key in ("zero_optimization", "torch_autocast"):
        if not isinstance(options.extra.get(key, {}), dict):
            raise ConfigError(
                f"deepspeed.extra.{key}={one_line(options.extra[key])}: must be a mapping of DeepSpeed's keys. "
                f"Set deepspeed.extra.{key}.KEY=VALUE, or leave it out."
            )
    extra = OmegaConf.create(options.extra)
    for key, owner in OWNED.items():
        if OmegaConf.select(extra, key) is not None:
            raise ConfigError(f"deepspeed.extra.{key}: is made from {owner}. Set that instead.")
    own = {
        "train_micro_batch_size_per_gpu": 1,  # asked for, and not used: the loader cuts them
        "gradient_clipping": max_gradient_norm or 0.0,
        "zero_optimization": {"stage": options.zero_stage, "reduce_bucket_size": min(num_elements, BUCKET_SIZE)},
        "zero_allow_untested_optimizer": True,  # check_optimizer() says which
        "zero_force_ds_cpu_optimizer": False,  # which would be compiled at the first start
        "torch_autocast": {
            "enabled": precision != "fp32",
            "dtype": "float16" if precision == "fp16" else "bfloat16",
            "lower_precision_safe_modules": [],  # all gradients are averaged in fp32, as under DDP
        },
    }
    settings: Any = OmegaConf.to_container(OmegaConf.merge(own, extra))
    try:
        deepspeed.DeepSpeedConfig(deepcopy(settings))
    except Exception as error:  # of several kinds
        words = " ".join(str(error).split())[:200]
        raise ConfigError(f"deepspeed.extra={one_line(options.extra)}: DeepSpeed refuses it: {words}") from None
    return dict(settings)


def check_optimizer(optimizer: Optimizer, options: DeepspeedConfig) -> None:
    """ConfigError if the optimizer may not come to the same on flat pieces of the weights, which ZeRO gives it."""
    is_elementwise = type(optimizer) in (Adam, AdamW, SGD, RMSprop)
    if options.zero_stage > 0 and not is_elementwise and not options.extra.get("zero_allow_untested_optimizer"):
        raise ConfigError(
            f"deepspeed.zero_stage={options.zero_stage}: {type(optimizer).__name__} would see the weights as flat "
            "pieces. If it treats each element alone, add deepspeed.extra.zero_allow_untested_optimizer=true; "
            "otherwise set stage 0."
        )

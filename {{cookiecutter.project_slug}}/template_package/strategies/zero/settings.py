"""Builds DeepSpeed's settings from config.yaml, so that the user needs no second file."""

from copy import deepcopy
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from ...errors import ConfigError, one_line
from ...options_deepspeed import Options

# elements reduced at once: DeepSpeed's own 500 million take 2 GB of each GPU
BUCKET_SIZE = 50_000_000
OWNERS = {  # the key of config.yaml that decides a key of DeepSpeed's
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.micro_batch_size",
    "gradient_clipping": "training.max_gradient_norm",
    **dict.fromkeys(
        ("fp16", "bf16", "torch_autocast.enabled", "torch_autocast.dtype"), "training.precision"
    ),
    "optimizer": "optimizer.name",
    "scheduler": "schedule.name",
    "zero_optimization.stage": "deepspeed.zero_stage",
}


def build_settings(
    options: Options, max_norm: float | None, precision: str, num_elements: int
) -> dict[str, Any]:
    """Return DeepSpeed's settings for a model of `num_elements` parameters, with `deepspeed.extra` merged in.

    Raise ConfigError if `deepspeed.extra` contains a setting that another key of config.yaml decides, or if
    DeepSpeed refuses the settings.
    """
    import deepspeed

    sections = [
        (name, section) for name, section in options.extra.items() if isinstance(section, dict)
    ]
    for key in [
        *options.extra,
        *(f"{name}.{key}" for name, section in sections for key in section),
    ]:
        if key in OWNERS:
            raise ConfigError(
                f"deepspeed.extra.{key}: is made from {OWNERS[key]}. Set that instead."
            )
    own: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed wants a number and does not use it: the loader cuts batches
        "gradient_clipping": max_norm or 0.0,
        "zero_optimization": {
            "stage": options.zero_stage,
            "reduce_bucket_size": min(num_elements, BUCKET_SIZE),
        },
        "zero_allow_untested_optimizer": True,  # check_optimizer() tests it
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled at the first start
        "torch_autocast": {
            "enabled": precision != "fp32",
            "dtype": "float16" if precision == "fp16" else "bfloat16",
            "lower_precision_safe_modules": [],  # all gradients are averaged in fp32, as under DDP
        },
    }
    settings = (
        own | options.extra | {name: own.get(name, {}) | section for name, section in sections}
    )
    try:
        deepspeed.DeepSpeedConfig(deepcopy(settings))
    except Exception as error:  # of several kinds
        message = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"deepspeed.extra={one_line(options.extra)}: DeepSpeed refuses it: {message}"
        ) from None
    return settings


def check_optimizer(optimizer: Optimizer, options: Options) -> None:
    """Raise ConfigError if the optimizer may compute different results on ZeRO's flat shards and on whole weights."""
    is_elementwise = type(optimizer) in (Adam, AdamW, SGD, RMSprop)
    if (
        options.zero_stage > 0
        and not is_elementwise
        and not options.extra.get("zero_allow_untested_optimizer")
    ):
        raise ConfigError(
            f"deepspeed.zero_stage={options.zero_stage}: {type(optimizer).__name__} would see the weights as flat "
            "pieces. Set 0, or deepspeed.extra.zero_allow_untested_optimizer=true if it treats each element alone."
        )

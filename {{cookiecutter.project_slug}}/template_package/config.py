"""The sections of config.yaml as dataclasses. config.yaml explains the keys, config_loading.py reads them,
config_rules.py says which values they may have."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import model as user_model
from .config_loading import load, to_plain
from .config_rules import check_values
from .dataset import DataConfig
from .model import ModelConfig
from .validation import ConfigError, one_line, parse_device_ids


@dataclass
class LaunchConfig:
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    network_interface: str | None = None
    backend: str = "auto"
    start_method: str = "auto"
    min_free_memory_gib: float = 2.0
    share_gpus: bool = False
    wait_minutes: float = 0.0
    timeout_minutes: float = 10.0
    debug: bool = False


@dataclass
class DdpConfig:
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_compression: str = "none"


@dataclass
class FsdpConfig:
    cpu_offload: bool = False
    reshard_after_forward: bool = True


@dataclass
class DeepspeedConfig:
    zero_stage: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoaderConfig:
    num_workers: int | str = "auto"
    prefetch_factor: int = 2


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])


@dataclass
class ScheduleConfig:
    name: str = "cosine"
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    milestones: list[float] = field(default_factory=lambda: [0.5, 0.75])
    decay_factor: float = 0.1


@dataclass
class TrainingConfig:
    epochs: int = 10
    max_steps: int | None = None
    global_batch_size: int = 64
    micro_batch_size: int | str = "auto"
    precision: str = "auto"
    tf32: bool = True
    cudnn_benchmark: bool = True
    deterministic: bool = False
    compile: bool = False
    activation_checkpointing: bool = False
    max_gradient_norm: float | None = None
    sync_batchnorm: bool = False
    early_stopping_epochs: int | None = None
    check_replicas_every_steps: int | None = None


@dataclass
class EvaluationConfig:
    every_epochs: int | None = 1
    every_steps: int | None = None
    metric: str = "accuracy"
    mode: str = "max"
    micro_batch_size: int | str = "auto"
    checkpoint: list[str] = field(default_factory=lambda: ["best"])
    split: str = "validation"


@dataclass
class CheckpointConfig:
    every_epochs: int | None = 1
    every_steps: int | None = None
    keep_last: int | None = 3
    resume: str = "auto"
    initial_weights: str | None = None


@dataclass
class LoggingConfig:
    every_steps: int = 50
    tracker: str = "tensorboard"
    progress_bar: bool | str = "auto"
    profile_steps: list[int] | None = None


@dataclass
class BenchmarkConfig:
    steps: int = 50
    rounds: int = 3


@dataclass(kw_only=True)
class Config:
    name: str = "baseline"
    seed: int = 42
    device_ids: Any = "auto"
    """"auto", "auto:N", or one entry a rank: list[int] or ["cpu", …] (OmegaConf types no union that holds a list)."""
    strategy: str = "ddp"
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    deepspeed: DeepspeedConfig = field(default_factory=DeepspeedConfig)
    data: DataConfig  # no defaults for yours: their fields need not have any either
    model: ModelConfig
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The defaults above, then the YAML file, then `key=value` overrides, checked. Raises ConfigError."""
    config = load(Config, path, overrides)
    config.device_ids = parse_device_ids(config.device_ids)
    try:
        getattr(user_model, "complete_config", lambda *_: None)(config.model, config.data)
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from None
    check_values(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The config as dicts, lists, text and numbers, for YAML, JSON and checkpoints; load_config reads it back."""
    plain: dict[str, Any] = to_plain(config)
    return plain


def differing_keys(stored: dict[str, Any], present: dict[str, Any], prefix: str = "") -> list[str]:
    """ "key: stored value -> present value" for each dotted key in which two plain configs differ."""
    lines: list[str] = []
    for key in [*stored, *(key for key in present if key not in stored)]:
        former, now, dotted = stored.get(key), present.get(key), f"{prefix}{key}"
        if isinstance(former, dict) and isinstance(now, dict):
            lines += differing_keys(former, now, f"{dotted}.")
        elif former != now:
            lines.append(f"{dotted}: {one_line(former)} -> {one_line(now)}")
    return lines

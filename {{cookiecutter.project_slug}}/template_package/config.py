"""Declares the keys that size=full adds to those of core/config.py: fields, sections and rules.

The sections are subclasses of core's, so that core's functions take them. A file options_<section>.py adds a section.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, dataclass_transform

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from .core import config as core
from .core.config import BelowOne, build_config
from .core.settings import read_command_line
from .optional_files import available_files


def check_name(folder: str, name: object) -> object:
    """Return the name of a module of this folder, or "none" for no tracker. Raise an error for another name."""
    names = ["none"] * (folder == "tracking") + available_files(folder)
    if name not in names:
        remedy = "Others come with the template: copy their file."
        raise ValueError(f"must be one of {', '.join(map(repr, names))}. {remedy}")
    return name


StrategyName = Annotated[str, BeforeValidator(partial(check_name, "strategies"))]
TrackerName = Annotated[str, BeforeValidator(partial(check_name, "tracking"))]
ScheduleName = Literal["constant", "linear", "cosine", "step", "plateau", "one_cycle"]


@dataclass
class LaunchConfig(core.LaunchConfig):
    nodes: PositiveInt = 1  # machines; with more than one, the same command is typed on each
    node_rank: NonNegativeInt = 0  # this machine, counted from 0
    master_addr: str = "127.0.0.1"  # name or address of node 0, as the other nodes reach it
    # a free port of node 0; 0: the system chooses (one node)
    master_port: Annotated[int, Field(ge=0, le=65535)] = 0
    # such as eth0; null: gloo takes the one to master_addr, NCCL chooses itself
    network_interface: str | None = None
    start_method: Literal["auto", "spawn", "forkserver"] = (
        "auto"  # has no effect any more: each rank is a process of its own
    )
    debug: bool = False  # messages of torch.distributed and NCCL, in the logs of the ranks


@dataclass
class DdpConfig(core.DdpConfig):
    static_graph: bool = False  # all steps use the same parameters in the same order
    # of exchanged gradients; not exact
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"


@dataclass
class FsdpConfig:
    cpu_offload: bool = False  # parameters wait in host memory, where the optimizer steps
    # false keeps weights gathered until backward: faster, more memory
    reshard_after_forward: bool = True
    # 2: half of the ranks hold all weights together, and so does the other half
    replicas: PositiveInt = 1
    meta_build: bool = False  # true: ranks above 0 build the model without memory


@dataclass
class ScheduleConfig(core.ScheduleConfig):
    name: ScheduleName = "cosine"  # type: ignore[assignment]  # wider than core's
    # for step: fractions of the run
    milestones: list[BelowOne] = field(
        default_factory=[0.5, 0.75].copy, metadata={"schedules": "step"}
    )
    # for step and plateau: factor of each drop
    decay_factor: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.1, metadata={"schedules": "step plateau"}
    )
    # for plateau: evaluations without a better metric that are tolerated before a drop
    patience: NonNegativeInt = field(default=3, metadata={"schedules": "plateau"})


@dataclass
class TrainingConfig(core.TrainingConfig):
    # 0.999: evaluate and keep an average of the weights
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    # less memory, more time (Chen et al. 2016, arXiv:1604.06174)
    activation_checkpointing: bool = False
    sync_batchnorm: bool = False  # BatchNorm's statistics over all ranks
    # stop after that many epochs without a better metric
    early_stopping_epochs: PositiveInt | None = None
    # compare the weights of the ranks, besides in the first step
    check_replicas_every_steps: PositiveInt | None = None


@dataclass
class CheckpointConfig(core.CheckpointConfig):
    # a file of weights to begin with: .pt, .pth, .bin or .safetensors
    initial_weights: str | None = None
    sharded: bool = False  # fsdp: each rank writes its part, while the next steps run


@dataclass
class LoggingConfig(core.LoggingConfig):
    tracker: list[TrackerName] = field(default_factory=["tensorboard"].copy)  # files of tracking/
    report: bool = True  # at the end of a run, report.html; needs the command `report`
    # first and last step
    profile_steps: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None


@dataclass_transform(kw_only_default=True)
def _with_chosen_sections(config: Any) -> Any:
    """Make the class `config` a dataclass, with a field for each options_<section>.py file in this folder."""
    for path in sorted(Path(__file__).parent.glob("options_*.py")):
        options = import_module(f".{path.stem}", __package__).Options
        config.__annotations__[path.stem.removeprefix("options_")] = options
    return dataclass(kw_only=True)(config)


@_with_chosen_sections
class Config(core.Config):
    strategy: StrategyName = "ddp"  # type: ignore[assignment]  # a file of strategies/
    launch: LaunchConfig
    ddp: DdpConfig
    fsdp: FsdpConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        launch, devices = self.launch, self.device_ids
        if self.strategy == "data_parallel" and devices[1:].count(devices[0]):
            rule = "drives one CPU, or GPUs named once. Set device_ids=cpu"
            raise ValueError(f"strategy=data_parallel: {rule}.")
        if launch.node_rank >= launch.nodes:
            problem = f"launch.node_rank={launch.node_rank}: must be below launch.nodes"
            raise ValueError(f"{problem}. Set both.")


def load_config(path: Path, words: Sequence[str] = ()) -> Config:
    """Read the file, apply `key=value` words and return the Config. Raise ConfigError for a wrong key or value."""
    return build_config(read_command_line(words, path), Config)

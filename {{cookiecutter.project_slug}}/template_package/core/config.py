"""Declares the keys of config.yaml, each with its type, its limits and its default.

pydantic checks them. The sections `data` and `model` are the dataclasses in dataset.py and model.py.
"""

import os
import re
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import to_jsonable_python

from ..dataset import DataConfig
from ..errors import ConfigError, one_line
from ..files import run_directory
from ..model import ModelConfig
from .settings import (
    NEEDS_FULL,
    CommandLine,
    Settings,
    lab_settings,
    merge,
    nested,
    parse_device_ids,
    read_file,
    read_words,
    value_at,
)
from .task import find_task

BelowOne = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]

OF_THE_START = ("name", "device_ids", "launch", "loader", "evaluation")
"""What `evaluate` takes from config.yaml; the rest is the run's own."""
IN_FULL = """
launch.nodes launch.node_rank launch.master_addr launch.master_port launch.network_interface
launch.start_method launch.debug ddp.static_graph ddp.gradient_compression
fsdp.cpu_offload fsdp.reshard_after_forward fsdp.replicas fsdp.meta_build schedule.milestones schedule.decay_factor
schedule.patience training.ema_decay training.activation_checkpointing training.sync_batchnorm
training.early_stopping_epochs training.check_replicas_every_steps checkpoint.initial_weights checkpoint.sharded
logging.report logging.profile_steps benchmark.steps benchmark.rounds
""".split()


@dataclass
class LaunchConfig:
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl for GPUs, gloo for CPU
    min_free_memory_gib: NonNegativeFloat = 2.0  # auto leaves out GPUs with less
    share_gpus: bool = False  # true: auto also takes GPUs where others compute
    wait_minutes: NonNegativeFloat = 0.0  # how long to wait for GPUs that others use
    timeout_minutes: PositiveFloat = 10.0  # no progress: the end


@dataclass
class DdpConfig:
    find_unused_parameters: bool = False  # needed if some parameters get no gradient in some steps
    broadcast_buffers: bool = False  # for buffers, besides BatchNorm's, that training changes


@dataclass
class LoaderConfig:
    num_workers: NonNegativeInt | Auto = "auto"  # reading processes a rank
    prefetch_factor: PositiveInt = 2  # micro-batches that each prepares


@dataclass
class OptimizerConfig:
    name: Literal["adamw", "sgd", "adam"] = "adamw"
    learning_rate: NonNegativeFloat = 3e-3  # the peak of the schedule
    weight_decay: NonNegativeFloat = 0.01  # not applied to biases and normalization
    betas: Annotated[list[BelowOne], Field(min_length=2, max_length=2)] = field(
        default_factory=lambda: [0.9, 0.999]
    )


@dataclass
class ScheduleConfig:
    name: Literal["constant", "linear", "cosine"] = "cosine"
    # linear warm-up (arXiv:1706.02677); below 1: a fraction
    warmup_steps: NonNegativeInt | BelowOne = 0
    # the end of linear and cosine; metadata: which schedules read the key, if not all
    min_learning_rate: NonNegativeFloat = field(
        default=0.0, metadata={"schedules": "linear cosine step plateau"}
    )


@dataclass
class TrainingConfig:
    # passes over the training set; null: max_steps alone ends the run
    epochs: PositiveInt | None = 10
    max_steps: PositiveInt | None = None  # optimizer steps; the run ends here, or after its epochs
    global_batch_size: PositiveInt = 64  # samples of one optimizer step, over all ranks
    drop_last: bool = False  # leave out an epoch's last global batch if it has fewer samples
    # samples that a rank takes at once; auto: its share
    micro_batch_size: PositiveInt | Auto = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    tf32: bool = True  # GPUs multiply float32 numbers with 10 bits of mantissa
    cudnn_benchmark: bool = True  # cuDNN tries its convolution algorithms first
    deterministic: bool = False  # the same run gives the same bits, on GPUs too
    compile: bool = False  # torch.compile
    max_gradient_norm: PositiveFloat | None = None


@dataclass
class EvaluationConfig:
    every_epochs: PositiveInt | None = 1  # both null: never
    every_steps: PositiveInt | None = None
    # so many global batches, evenly spread; null: all samples
    max_batches: PositiveInt | None = None
    metric: str = "accuracy"  # decides which checkpoint is the best
    mode: Literal["max", "min"] = "max"  # which values of the metric are better
    micro_batch_size: PositiveInt | Auto = "auto"  # auto: that of training
    checkpoint: str = "best"  # for evaluate and predict: best, last or a path
    split: Literal["train", "validation", "test"] = "validation"  # for evaluate


@dataclass
class CheckpointConfig:
    every_epochs: PositiveInt | None = 1
    every_steps: PositiveInt | None = None
    keep_last: PositiveInt | None = 3  # how many, besides best.pt; null: all
    # auto (continue runs/<name>), never, or a path (a new run from that file)
    resume: str = "auto"


@dataclass
class LoggingConfig:
    every_steps: PositiveInt = 50  # optimizer steps between two lines of metrics.jsonl
    tracker: list[str] = field(default_factory=lambda: ["tensorboard"])  # files of tracking/
    progress_bar: bool | Auto = "auto"  # auto: if a person watches


@with_config(ConfigDict(extra="forbid"))  # the sections and the classes below them follow it
@dataclass(kw_only=True)
class Config:
    data: DataConfig
    model: ModelConfig
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "baseline"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    device_ids: Annotated[Any, BeforeValidator(parse_device_ids)] = "auto"
    strategy: Literal["ddp", "fsdp"] = "ddp"
    launch: LaunchConfig
    ddp: DdpConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    def __post_init__(self) -> None:
        if "cpu" in self.device_ids and self.launch.backend == "nccl":
            raise ValueError("launch.backend=nccl: NCCL has no CPU ranks. Set it to auto.")
        if not (self.training.epochs or self.training.max_steps):
            problem = "needs an end of the run. Set it, or training.max_steps"
            raise ValueError(f"training.epochs=null: {problem}.")


AnyConfig = TypeVar("AnyConfig", bound=Config)


def find_config() -> type[Config]:
    """Return the Config of config.py, which size=full has, or the one of this file."""
    name = f"{__package__.rpartition('.')[0]}.config"
    found = getattr(import_module(name), "Config", None) if find_spec(name) else None
    return found if isinstance(found, type) and issubclass(found, Config) else Config


def build_config(line: CommandLine, kind: type[AnyConfig]) -> AnyConfig:
    """Check the settings of a command. Raise ConfigError with a line for each wrong key or value.

    `kind` is this file's Config, or a subclass with more keys.
    """
    settings = line.settings
    stored = run_directory(line.get("name", "baseline")) / "config.yaml"
    is_trained = line.command in ("evaluate", "predict", "export") and stored.exists()
    if is_trained and not line.config_paths:  # a run is evaluated with its own settings
        here = {key: settings.get(key) for key in OF_THE_START}
        settings = {}
        for key, value in values_of(read_file(stored), kind).items():  # without keys of the past
            merge(settings, nested(key, value))
        settings = merge(settings | here, read_words(line.words))
    config = _check(settings, kind)
    try:
        find_task().complete_config(config.model, config.data)
    except (ValueError, OSError) as error:  # complete_config() may read a file
        raise ConfigError(" ".join(str(error).split())) from None
    return config


def to_dict(config: Config) -> Settings:
    """Convert the config to plain dicts, lists and values, as files hold them."""
    return dict(to_jsonable_python(config))


def all_keys(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return {key: its dataclass field}, with keys such as `training.epochs`."""
    keys, types = dict[str, Any](), get_type_hints(section)
    for item in fields(section):
        key, inner = prefix + item.name, types[item.name]
        keys |= all_keys(inner, f"{key}.") if is_dataclass(inner) else {key: item}
    return keys


def unread_keys(config: Config) -> list[str]:
    """Return the keys of a schedule that the chosen one, or learning_rate() in model.py, does not read."""
    name, keys = config.schedule.name, all_keys(type(config))
    if find_task().learning_rate is not None:
        return [key for key in keys if key.startswith("schedule.")]
    return [key for key, item in keys.items() if name not in item.metadata.get("schedules", name)]


def values_of(stored: Settings, kind: type[Config]) -> Settings:
    """Return {key: value} of a stored config. For a key that it lacks, the default counts."""
    values = {}
    for key, item in all_keys(kind).items():
        default = item.default_factory() if callable(item.default_factory) else item.default
        # as files hold it: a tuple is a list, and a Path is text
        default = default if default is MISSING else to_jsonable_python(default)
        values[key] = value_at(key, stored, default)
    return values


def differing_keys(stored: Settings, config: Config) -> dict[str, str]:
    """Return {key: "stored -> present"} for each key of this project whose two values differ."""
    former, now = (values_of(values, type(config)) for values in (stored, to_dict(config)))
    keys = [key for key in now if former[key] != now[key]]
    return {key: f"{one_line(former[key])} -> {one_line(now[key])}" for key in keys}


def _check(settings: Settings, kind: type[AnyConfig]) -> AnyConfig:
    sections: Settings = {item.name: {} for item in fields(kind) if is_dataclass(item.type)}
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        return TypeAdapter(kind).validate_python(sections | given)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    defaults, lines = values_of({}, kind), dict[str, str]()
    for problem in problems:
        place, value = ".".join(map(str, problem["loc"])), problem["input"]
        key = next((key for key in defaults if f"{place}.".startswith(f"{key}.")), place)
        needs_list = key == place and problem["type"] in ("list_type", "tuple_type")
        if needs_list and isinstance(value, str):  # text like 0.9,0.95
            return _check(merge(settings, nested(key, re.split(" *, *", value))), kind)
        # A key whose type is a union has several problems. The first one is told.
        line = _explain(key, value, problem, defaults)
        if value_at(key, lab_settings(), MISSING) == value_at(key, settings):
            line += f" DDP_CONFIG={os.environ['DDP_CONFIG']} sets it."
        lines.setdefault(key, line)
    raise ConfigError("\n".join(lines.values()))


def _explain(key: str, value: Any, problem: Any, defaults: Settings) -> str:
    """Return a line on a mistake: the key, the value, the rule that it breaks, a remedy."""
    cause = problem["type"]
    rule = re.sub("^Value error, |, unable.*", "", " ".join(problem["msg"].split()))
    rule = re.sub("(Input|List|String) should", "must", rule)
    if cause == "missing":
        return f"{key}: has no value and no default. Set {key}=VALUE."
    if cause == "unexpected_keyword_argument":
        while isinstance(value, dict) and value:  # a misspelt section: look at the first key in it
            name, value = next(iter(value.items()))
            key = f"{key}.{name}"
        last = {other: other.rpartition(".")[2] for other in defaults}
        section, _, name = key.rpartition(".")
        name = {"lr": "learning_rate", "wd": "weight_decay"}.get(name, name)
        own = {last[other] for other in defaults if other.startswith(f"{section}.")}
        names = get_close_matches(name, own, 2, 0.7)
        alike = [f"{section}.{other}" for other in names]
        if not names:
            found = get_close_matches(name, {*last.values()}, 2, 0.7)
            names = [name] if name in found else found
            alike = [other for other in defaults if last[other] in names]
        meant = " or ".join(f"{other}={one_line(value)}" for other in alike[:2])
        remedy = "Delete it, or add a field to ModelConfig or DataConfig."
        remedy = f"Did you mean {meant}?" if meant else remedy
        rule = f"this key {NEEDS_FULL}" if key in IN_FULL else f"there is no such key. {remedy}"
    elif cause == "dataclass_type":
        rule = f"{key} is a section. Set {key}.KEY=…"
    elif key not in defaults:  # raised by the __post_init__ of a section, which names its key
        return f"{key}.{rule}".lstrip(".")
    elif cause != "value_error" and defaults[key] is not MISSING:
        rule += f". The default is {one_line(defaults[key])}."
    return f"{one_line(key)}={one_line(value)}: {rule}"

"""Declares the keys of config.yaml, each with its type, its limits and its default.

pydantic checks them. The sections `data` and `model` are the dataclasses in dataset.py and model.py.
"""

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic import Field as Limits

from ..dataset import DataConfig
from ..errors import ConfigError, one_line
from ..model import ModelConfig
from .launch import parse_device_ids
from .settings import NEEDS_FULL, CommandLine, set_words
from .task import find_task

Count = Annotated[int, Limits(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Limits(ge=1, le=2**63 - 1)]
NotNegative = Annotated[float, Limits(ge=0, allow_inf_nan=False)]
BelowOne = Annotated[float, Limits(ge=0, lt=1)]
Text = Annotated[str, Limits(min_length=1)]
Auto = Literal["auto"]

OF_THE_START = ("name", "device_ids", "launch", "loader", "evaluation")
"""What `evaluate` takes from config.yaml; the rest is the run's own."""
IN_FULL = """
launch.nodes launch.node_rank launch.master_addr launch.master_port launch.network_interface
launch.start_method launch.wait_minutes launch.debug ddp.static_graph ddp.gradient_compression
fsdp.cpu_offload fsdp.reshard_after_forward schedule.milestones schedule.decay_factor
schedule.patience training.ema_decay training.activation_checkpointing training.sync_batchnorm
training.early_stopping_epochs training.check_replicas_every_steps checkpoint.initial_weights
logging.report logging.profile_steps benchmark.steps benchmark.rounds deepspeed.zero_stage
deepspeed.extra
""".split()


@dataclass
class LaunchConfig:
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl for GPUs, gloo for CPU
    min_free_memory_gib: NotNegative = 2.0  # auto leaves out GPUs with less
    share_gpus: bool = False  # true: auto also takes GPUs where others compute
    timeout_minutes: Annotated[float, Limits(ge=0.02, le=525_600)] = 10.0  # no progress: the end


@dataclass
class DdpConfig:
    find_unused_parameters: bool = False  # needed if some parameters get no gradient in some steps
    broadcast_buffers: bool = False  # for buffers, besides BatchNorm's, that training changes


@dataclass
class LoaderConfig:
    num_workers: Annotated[int, Limits(ge=0, le=256)] | Auto = "auto"  # reading processes a rank
    prefetch_factor: Annotated[int, Limits(ge=1, le=1000)] = 2  # micro-batches that each prepares


@dataclass
class OptimizerConfig:
    name: Literal["adamw", "sgd", "adam"] = "adamw"
    learning_rate: NotNegative = 3e-3  # the peak of the schedule
    weight_decay: NotNegative = 0.01  # not applied to biases and normalization
    betas: Annotated[list[BelowOne], Limits(min_length=2, max_length=2)] = field(
        default_factory=lambda: [0.9, 0.999]
    )


@dataclass
class ScheduleConfig:
    name: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Count | BelowOne = 0  # linear warm-up (arXiv:1706.02677); below 1: a fraction
    min_learning_rate: NotNegative = 0.0  # the end of linear and cosine


@dataclass
class TrainingConfig:
    epochs: Positive | None = 10  # passes over the training set; null: max_steps alone ends the run
    max_steps: Positive | None = None  # optimizer steps; the run ends here, or after its epochs
    global_batch_size: Positive = 64  # samples of one optimizer step, over all ranks
    micro_batch_size: Positive | Auto = "auto"  # samples that a rank takes at once; auto: its share
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    tf32: bool = True  # GPUs multiply float32 numbers with 10 bits of mantissa
    cudnn_benchmark: bool = True  # cuDNN tries its convolution algorithms first
    deterministic: bool = False  # the same run gives the same bits, on GPUs too
    compile: bool = False  # torch.compile
    max_gradient_norm: Annotated[float, Limits(gt=0, allow_inf_nan=False)] | None = None


@dataclass
class EvaluationConfig:
    every_epochs: Positive | None = 1  # both null: never
    every_steps: Positive | None = None
    max_batches: Positive | None = None  # so many global batches, evenly spread; null: all samples
    metric: Text = "accuracy"  # decides which checkpoint is the best
    mode: Literal["max", "min"] = "max"  # which values of the metric are better
    micro_batch_size: Positive | Auto = "auto"  # auto: that of training
    checkpoint: Text = "best"  # for evaluate and predict: best, last or a path
    split: Literal["train", "validation", "test"] = "validation"  # for evaluate


@dataclass
class CheckpointConfig:
    every_epochs: Positive | None = 1
    every_steps: Positive | None = None
    keep_last: Positive | None = 3  # how many, besides best.pt; null: all
    # auto (continue runs/<name>), never, or a path (a new run from that file)
    resume: Text = "auto"


@dataclass
class LoggingConfig:
    every_steps: Positive = 50  # optimizer steps between two lines of metrics.jsonl
    tracker: list[str] = field(default_factory=lambda: ["tensorboard"])  # files of tracking/
    progress_bar: bool | Auto = "auto"  # auto: if a person watches


@dataclass(kw_only=True)
class Config:
    data: DataConfig
    model: ModelConfig
    name: Annotated[str, Limits(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "baseline"
    seed: Annotated[int, Limits(ge=0, lt=2**32)] = 42
    device_ids: Annotated[Any, BeforeValidator(parse_device_ids)] = "auto"
    strategy: Literal["ddp", "fsdp"] = "ddp"
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if "cpu" in self.device_ids and self.launch.backend == "nccl":
            raise ValueError("launch.backend=nccl: NCCL has no CPU ranks. Set it to auto.")
        if not (self.training.epochs or self.training.max_steps):
            problem = "needs an end of the run. Set it, or training.max_steps"
            raise ValueError(f"training.epochs=null: {problem}.")


def build_config(line: CommandLine) -> Config:
    """Check the settings of a command. Raise ConfigError with a line for each wrong key or value."""
    settings = {"data": {}, "model": {}, **line.settings}
    if line.stored is not None:
        settings = {key: value for key, value in settings.items() if key in OF_THE_START}
        for key, value in values_of(line.stored).items():  # a key that is gone since is left out
            section, _, name = key.rpartition(".")
            if section not in OF_THE_START and key not in OF_THE_START and value is not MISSING:
                (settings.setdefault(section, {}) if section else settings)[name] = value
        set_words(settings, line.words)
    if problems := [*_wrong_keys(settings, Config)]:
        raise ConfigError("\n".join(problems))
    try:
        config = TypeAdapter(Config).validate_python(settings)
        find_task().complete_config(config.model, config.data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None
    except (ValueError, OSError) as error:  # raised by complete_config, which may read a file
        raise ConfigError(" ".join(str(error).split())) from None
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Convert the config to plain dicts, lists and values, as files hold them."""
    return dict(TypeAdapter(Config).dump_python(config, mode="json", warnings=False))


def all_keys(section: Any = Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield each key, such as `training.epochs`, with its dataclass field."""
    types = get_type_hints(section)
    for item in fields(section):
        if is_dataclass(types[item.name]):
            yield from all_keys(types[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def values_of(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the value of each key in a stored config. Where it holds none: the default."""
    values = {}
    for key, item in all_keys():
        value: Any = stored
        for part in key.split("."):
            value = value.get(part, default_of(item)) if isinstance(value, dict) else value
        values[key] = value
    return values


def differing_keys(stored: dict[str, Any], present: dict[str, Any]) -> dict[str, str]:
    """Return {key: "stored -> present"} for each key of this project whose two values differ."""
    former, now = values_of(stored), values_of(present)
    keys = [key for key in now if former[key] != now[key]]
    return {key: f"{one_line(former[key])} -> {one_line(now[key])}" for key in keys}


def default_of(item: Any) -> Any:
    return item.default_factory() if callable(item.default_factory) else item.default


def _wrong_keys(settings: dict[str, Any], section: Any, prefix: str = "") -> Iterator[str]:
    """Yield a message for each wrong key. In `settings`, turn text like 0.9,0.95 into a list."""
    types = get_type_hints(section)
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if name not in types:
            yield _unknown_key(key, value)
        elif is_dataclass(types[name]):
            inner = settings[name] = {} if value is None else value
            if isinstance(inner, dict):
                yield from _wrong_keys(inner, types[name], f"{key}.")
            else:
                yield f"{key}={one_line(value)}: {key} is a section. Set {key}.KEY=…"
        elif "${" in str(value):
            yield f"{key}={one_line(value)}: ${{…}} is not replaced. Write the value itself."
        elif isinstance(value, str) and _takes_list(types[name]):
            settings[name] = [part.strip() for part in value.split(",")]


def _takes_list(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    inner = () if origin in (dict, Literal) else get_args(kind)
    return origin in (list, tuple) or any(map(_takes_list, inner))


def _unknown_key(key: str, value: Any) -> str:
    while isinstance(value, dict) and value:  # a misspelt section: look at the first key in it
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    typed = f"{one_line(key)}={one_line(value)}"
    if key in IN_FULL:
        return f"{typed}: this key {NEEDS_FULL}"
    known = {other: other.rpartition(".")[2] for other, _ in all_keys()}
    alike = get_close_matches(key.rpartition(".")[2], known.values(), n=1, cutoff=0.7)
    close = get_close_matches(key, [k for k, name in known.items() if name in alike], n=1, cutoff=0)
    own = "Delete it; or, for one of your own, add a field to ModelConfig or DataConfig."
    meant = f"Did you mean {close[0]}={one_line(value)}?" if close else own
    return f"{typed}: there is no such key. {meant}"


def _explain(error: ValidationError) -> Iterator[str]:
    """Yield a line for each wrong value: the key, the value, the rule that it breaks, a remedy."""
    known, found = dict(all_keys()), dict[str, list[Any]]()
    for problem in error.errors(include_url=False):  # several of one key, if its type is a union
        location = ".".join(map(str, problem["loc"]))
        key = next((key for key in known if f"{location}.".startswith(f"{key}.")), location)
        found.setdefault(key, []).append(problem)
    for key, problems in found.items():
        kind, value = problems[0]["type"], problems[0]["input"]
        rules = [re.sub("^Value error, |, unable.*", "", problem["msg"]) for problem in problems]
        rule = " or ".join(dict.fromkeys(rules))
        rule = re.sub("(Input|List|String) should ", "must ", rule).replace(" or must be", " or")
        if key not in known:  # raised by the __post_init__ of a section, which names its key itself
            yield f"{key}.{rule}".lstrip(".")
        elif kind == "missing":
            yield f"{key}: has no value and no default. Set {key}=VALUE."
        elif kind == "value_error":
            yield f"{key}={one_line(value)}: {rule}"
        else:
            default = default_of(known[key])
            remedy = "" if default is MISSING else f" The default is {one_line(default)}."
            allowed = re.findall(r"'(\w+)'", rule)
            if close := get_close_matches(str(value).lower(), allowed, n=1):
                remedy = f" Did you mean {key}={close[0]}?"
            yield f"{key}={one_line(value)}: {rule}.{remedy}"

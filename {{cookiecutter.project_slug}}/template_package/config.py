"""Declares the keys of config.yaml as dataclasses, with the type, the limits and the default of each key.

pydantic checks the types and limits. The sections `data` and `model` are dataclasses in dataset.py and model.py.
Their `__post_init__` may raise ValueError if values conflict. config_file.py reads config.yaml.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from .config_file import available_files, dotted, read_settings
from .core.task import Task, find_task
from .dataset import DataConfig
from .errors import ConfigError, one_line
from .model import ModelConfig


def parse_device_ids(value: object) -> str | list[int | str]:
    """Return `auto`, `auto:N`, or a list with one device per rank, for example [0, 2] for two GPUs, or ["cpu", "cpu"].

    `value` has one of these forms, or is text such as "0,2" or "cpu". Raise ValueError if it names no devices.
    """
    entries = value if isinstance(value, list) else str(value).split(",")
    text = ",".join(str(entry).strip() for entry in entries).replace("，", ",")  # noqa: RUF001 - of a Chinese keyboard
    if re.fullmatch("auto(:[1-9][0-9]{0,3})?", text):
        return text
    if re.fullmatch("mps|cpu(,cpu){0,255}|[0-9]{1,9}(,[0-9]{1,9}){0,255}", text):
        return [int(entry) if entry.isdigit() else entry for entry in text.split(",")]
    numbers = re.sub("(cuda|gpu):", "", text)
    devices = numbers if re.fullmatch("[0-9]+(,[0-9]+)*", numbers) else "0,2 or device_ids=cpu,cpu"
    raise ValueError(
        f"must be auto, auto:N, or GPU ids or cpu, one per rank. Set device_ids={devices}."
    )


def check_name(folder: str, name: object) -> object:
    """Return the name of a module of this folder, or "none" for no tracker. Raise an error for another name."""
    names = ["none"] * (folder == "tracking") + available_files(folder)
    if name not in names:
        choices = " or ".join(str(names).strip("[]").rsplit(", ", 1))
        raise PydanticCustomError("name", f"must be {choices}")
    return name


Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**63 - 1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Auto = Literal["auto"]
OF_RUN = {"remedy": "Write fractions of the run: epoch 30 of 90 is 0.3333."}
OTHERS = {"remedy": "Others come with the template: copy their file."}
StrategyName = Annotated[str, BeforeValidator(partial(check_name, "strategies"))]
TrackerName = Annotated[str, BeforeValidator(partial(check_name, "tracking"))]
# of (unknown key, value) or (key, wrong value, allowed values): what was meant
Suggest = Callable[..., str | None]


@dataclass
class LaunchConfig:
    nodes: Positive = 1  # machines; with more than one, the same command is typed on each
    node_rank: Count = 0  # this machine, counted from 0
    master_addr: Text = "127.0.0.1"  # name or address of node 0, as the other nodes reach it
    # a free port of node 0; 0: the system chooses (one node)
    master_port: Annotated[int, Field(ge=0, le=65535)] = 0
    # such as eth0; null: gloo takes the one to master_addr, NCCL chooses itself
    network_interface: str | None = None
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl for GPUs, gloo for CPU
    start_method: Literal["auto", "spawn", "forkserver"] = "auto"  # how Python starts several ranks
    min_free_memory_gib: NotNegative = 2.0  # auto leaves out GPUs with less
    share_gpus: bool = False  # true: auto also takes GPUs where others compute
    # how long to wait for GPUs that others use
    wait_minutes: Annotated[float, Field(ge=0, le=525_600)] = 0.0
    # a run without progress ends after this time
    timeout_minutes: Annotated[float, Field(ge=0.02, le=525_600)] = 10.0
    debug: bool = False  # messages of torch.distributed and NCCL, in the logs of the ranks


@dataclass
class DdpConfig:
    find_unused_parameters: bool = False  # needed if some parameters get no gradient in some steps
    static_graph: bool = False  # all steps use the same parameters in the same order
    # of exchanged gradients; not exact
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"
    # for buffers, besides BatchNorm's, that forward changes in training
    broadcast_buffers: bool = False


@dataclass
class FsdpConfig:
    cpu_offload: bool = False  # parameters wait in host memory, where the optimizer steps
    # false keeps weights gathered until backward: faster, more memory
    reshard_after_forward: bool = True


@dataclass
class LoaderConfig:
    # reading processes per rank; 0: the rank itself
    num_workers: Annotated[int, Field(ge=0, le=256)] | Auto = "auto"
    # micro-batches that each worker prepares ahead
    prefetch_factor: Annotated[int, Field(ge=1, le=1000)] = 2


@dataclass
class OptimizerConfig:
    name: Literal["adamw", "sgd", "adam"] = "adamw"
    learning_rate: NotNegative = 3e-3  # the peak of the schedule
    weight_decay: NotNegative = 0.01  # not applied to biases and normalization
    betas: Annotated[list[BelowOne], Field(min_length=2, max_length=2)] = field(
        default_factory=lambda: [0.9, 0.999]
    )


@dataclass
class ScheduleConfig:
    name: Literal["constant", "linear", "cosine", "step", "plateau", "one_cycle"] = "cosine"
    # of linear warm-up from 0 (Goyal et al. 2017, arXiv:1706.02677), or a fraction
    warmup_steps: Count | BelowOne = 0
    min_learning_rate: NotNegative = 0.0  # the end of linear and cosine
    # for step: parts of the run
    milestones: list[BelowOne] = field(default_factory=[0.5, 0.75].copy, metadata=OF_RUN)
    # for step and plateau: factor of each drop
    decay_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    # for plateau: evaluations without a better metric that are tolerated before a drop
    patience: Count = 3


@dataclass
class TrainingConfig:
    epochs: Positive | None = 10  # passes over the training set; null: max_steps alone ends the run
    # optimizer steps; the run ends here, or after its epochs if they have fewer
    max_steps: Positive | None = None
    # 0.999: evaluate and keep an average of the weights
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    global_batch_size: Positive = 64  # samples of one optimizer step, over all ranks
    micro_batch_size: Positive | Auto = "auto"  # samples that a rank takes at once
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    tf32: bool = True  # GPUs multiply float32 numbers with 10 bits of mantissa
    cudnn_benchmark: bool = True  # cuDNN tries its convolution algorithms first
    deterministic: bool = False  # the same run gives the same bits, on GPUs too
    compile: bool = False  # torch.compile
    # less memory, more time (Chen et al. 2016, arXiv:1604.06174)
    activation_checkpointing: bool = False
    # clip to this global norm
    max_gradient_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    sync_batchnorm: bool = False  # BatchNorm's statistics over all ranks
    # stop after that many epochs without a better metric
    early_stopping_epochs: Positive | None = None
    # compare the weights of the ranks, besides in the first step
    check_replicas_every_steps: Positive | None = None


@dataclass
class EvaluationConfig:
    every_epochs: Positive | None = 1  # both null: never
    every_steps: Positive | None = None
    # evaluate that many global batches' worth of samples, evenly spread; null: all
    max_batches: Positive | None = None
    # decides which checkpoint is the best: loss, or a metric of build_metrics()
    metric: Text = "accuracy"
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
    # a file of weights to begin with: .pt, .pth, .bin or .safetensors
    initial_weights: str | None = None


@dataclass
class LoggingConfig:
    # optimizer steps between two lines of metrics.jsonl and of the console
    every_steps: Positive = 50
    # files of tracking/
    tracker: list[TrackerName] = field(default_factory=lambda: ["tensorboard"], metadata=OTHERS)
    report: bool = True  # at the end of a run, report.html; needs the command `report`
    progress_bar: bool | Auto = "auto"  # auto: if a person watches
    # first and last step
    profile_steps: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None


@dataclass_transform(kw_only_default=True)
def _with_chosen_sections(config: Any) -> Any:
    """Make the class `config` a dataclass, with a field for each options_<section>.py file in this folder."""
    for path in sorted(Path(__file__).parent.glob("options_*.py")):
        name, options = (
            path.stem.removeprefix("options_"),
            import_module(f".{path.stem}", __package__).Options,
        )
        config.__annotations__[name] = options
        setattr(config, name, field(default_factory=options))
    return dataclass(kw_only=True)(config)


@_with_chosen_sections
class Config:
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "baseline"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42  # NumPy accepts no other seed
    device_ids: Annotated[Any, BeforeValidator(parse_device_ids)] = "auto"
    strategy: StrategyName = field(default="ddp", metadata=OTHERS)  # a file of strategies/
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    data: DataConfig  # no default: the user's fields need not have one either
    model: ModelConfig
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        launch, devices = self.launch, self.device_ids
        is_doubled = (
            isinstance(devices, list) and "cpu" not in devices and len(set(devices)) < len(devices)
        )
        if is_doubled and launch.backend != "gloo":
            rule = "only gloo runs two ranks on one GPU. Name each once or set launch.backend=gloo."
            raise ValueError(f"device_ids={one_line(devices).strip('[]')}: {rule}")
        if "cpu" in devices and launch.backend == "nccl":
            raise ValueError("launch.backend=nccl: NCCL has no CPU ranks. Set it to auto.")
        if launch.node_rank >= launch.nodes:
            raise ValueError(
                f"launch.node_rank={launch.node_rank}: must be below launch.nodes. Set both."
            )
        if not (self.training.epochs or self.training.max_steps):
            raise ValueError(
                "training.epochs=null: needs an end of the run. Set it, or training.max_steps."
            )


_adapter = TypeAdapter(Config)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the file, apply `key=value` overrides and return the Config. Raise ConfigError for a wrong key or value."""
    return build_config(read_settings(path, overrides))


def build_config(settings: dict[str, Any], suggest: Suggest | None = None) -> Config:
    """Build the Config from nested dicts of settings. Raise ConfigError for a wrong key or value."""
    suggest = suggest or (lambda *_: None)
    settings = {"data": {}, "model": {}, **settings}
    if problems := [*_check_keys(settings, Config, "", suggest)]:
        raise ConfigError("\n".join(problems))
    try:
        config: Config = _adapter.validate_python(settings)
        find_task().complete_config(config.model, config.data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, suggest))) from None
    except (ValueError, OSError) as error:  # raised by complete_config, which may read a file
        raise ConfigError(" ".join(str(error).split())) from None
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Convert the config to plain dicts, lists and values that YAML, JSON and checkpoints can store."""
    return dict(_adapter.dump_python(config, mode="json", warnings=False))


def differing_keys(stored: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return "key: stored value -> present value" for each key (such as training.epochs) whose two values differ."""
    former, now = dotted(stored), dotted(present)
    values = {key: (former.get(key, "(none)"), now.get(key, "(none)")) for key in former | now}
    return [
        f"{key}: {one_line(old)} -> {one_line(new)}"
        for key, (old, new) in values.items()
        if old != new
    ]


def as_today(stored: dict[str, Any], section: Any = Config) -> dict[str, Any]:
    """Adapt a stored config to this version of the project: add new keys with their defaults, and drop unknown keys."""
    types, today = get_type_hints(section), dict[str, Any]()
    for item in fields(section):
        if is_dataclass(types[item.name]):
            today[item.name] = as_today(stored.get(item.name) or {}, types[item.name])
        elif (value := stored.get(item.name, default_of(item))) is not MISSING:
            today[item.name] = value
    return today


def default_of(item: Any) -> Any:
    return item.default_factory() if callable(item.default_factory) else item.default


def all_keys(section: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of the config, for example `training.epochs`, together with its dataclass field."""
    types = get_type_hints(section)
    for item in fields(section):
        if is_dataclass(types[item.name]):
            yield from all_keys(types[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def settings_without_effect(config: Config, task: Task) -> Iterator[str]:
    """Yield a line for each setting that is no default and that another one, or a function of model.py, overrides."""
    schedule, section = (
        config.schedule.name,
        config.strategy if hasattr(config, config.strategy) else "ddp",
    )
    is_evaluated = config.evaluation.every_epochs or config.evaluation.every_steps
    rules = (
        (
            "schedule[.]",
            task.learning_rate is not None,
            "learning_rate() in model.py takes its place",
        ),
        (
            "optimizer[.](?!l)",
            task.build_optimizer is not None,
            "build_optimizer() in model.py may ignore it",
        ),
        ("schedule[.]milestones", schedule != "step", f"schedule.name={schedule}"),
        (
            "schedule[.]decay_factor",
            schedule not in ("step", "plateau"),
            f"schedule.name={schedule}",
        ),
        ("schedule[.]patience", schedule != "plateau", f"schedule.name={schedule}"),
        (
            "schedule[.]min_learning_rate",
            schedule in ("constant", "one_cycle"),
            f"schedule.name={schedule}",
        ),
        (
            "schedule[.]name=plateau|training[.]early_stopping",
            not is_evaluated,
            "there are no evaluations",
        ),
        (f"(?!{section})(ddp|fsdp|deepspeed)[.]", True, f"strategy={config.strategy}"),
        ("loader[.]prefetch_factor", config.loader.num_workers == 0, "loader.num_workers=0"),
    )
    values = (
        (key, reduce(getattr, key.split("."), config), default_of(item)) for key, item in all_keys()
    )
    for setting in [
        f"{key}={one_line(value)}" for key, value, default in values if value != default
    ]:
        if reasons := [
            reason for rule, is_true, reason in rules if is_true and re.match(rule, setting)
        ]:
            yield f"{setting} has no effect: {reasons[0]}"


def _check_keys(
    settings: dict[str, Any], section: Any, prefix: str, suggest: Suggest
) -> Iterator[str]:
    """Yield a message for each invalid key. In `settings`, turn text like "0.9,0.95" into a list if needed."""
    types = get_type_hints(section)
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if name not in types:
            yield _unknown_key(key, value, suggest)
        elif is_dataclass(types[name]):
            # all its keys may be commented out
            section_settings = settings[name] = {} if value is None else value
            if isinstance(section_settings, dict):
                yield from _check_keys(section_settings, types[name], f"{key}.", suggest)
            else:
                meant = suggest(key, str(value)) or f"{key}.KEY=…"
                yield f"{key}={one_line(value)}: {key} is a section. Set {meant}"
        elif "${" in str(value):
            yield f"{key}={one_line(value)}: ${{…}} is not replaced by anything. Write the value itself."
        elif isinstance(value, str) and _takes_list(types[name]):
            settings[name] = [part.strip() for part in value.split(",")]


def _takes_list(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return origin in (list, tuple) or (
        origin not in (dict, Literal) and any(map(_takes_list, get_args(kind)))
    )


def _unknown_key(key: str, value: Any, suggest: Suggest) -> str:
    while isinstance(value, dict) and value:  # a misspelt section: look at the first key in it
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    last, typed = key.rpartition(".")[2], one_line(value)
    known = {other: other.rpartition(".")[2] for other, _ in all_keys()}
    alike = get_close_matches(last, known.values(), n=1, cutoff=0.7)  # epoch=3
    close = get_close_matches(
        key, [other for other, name in known.items() if name in alike], n=1, cutoff=0
    )
    meant = suggest(key, typed) or (f"{close[0]}={typed}" if close else None)
    own = "Delete it; or, for one of your own, add a field to ModelConfig or DataConfig."
    return f"{one_line(key)}={typed}: there is no such key. {f'Did you mean {meant}?' if meant else own}"


def _explain(error: ValidationError, suggest: Suggest) -> Iterator[str]:
    """Yield one line for each wrong value. The line names the key, the value, the rule that it breaks, and a remedy."""
    known, found = dict(all_keys()), dict[str, list[Any]]()
    for problem in error.errors(include_url=False):  # several of one key, if its type is a union
        location = ".".join(map(str, problem["loc"]))
        key = next((key for key in known if f"{location}.".startswith(f"{key}.")), location)
        found.setdefault(key, []).append(problem)
    for key, problems in found.items():
        kind, value = problems[0]["type"], problems[0]["input"]
        rule = " or ".join(
            dict.fromkeys(problem["msg"].split(", unable")[0] for problem in problems)
        )
        rule = re.sub("(Input|List|String) should ", "must ", rule).replace(" or must be", " or")
        rule = " ".join(rule.removeprefix("Value error, ").split())
        # raised by the __post_init__ of a section, whose message names its key itself
        if key not in known:
            yield f"{key}.{rule}".lstrip(".")
        elif kind == "missing":
            yield f"{key}: has no value and no default. Set {key}=VALUE, or write it in config.yaml."
        elif kind == "value_error":
            yield f"{key}={one_line(value)}: {rule}"
        else:
            # torch.nn.DataParallel
            typed, values = (
                str(value).lower().rpartition(".")[2],
                re.findall(r"'(\w+)'", rule),
            )
            close, default = get_close_matches(typed, values, n=1), default_of(known[key])
            meant = suggest(key, typed, values) or (f"{key}={close[0]}" if close else None)
            remedy = (
                "See its type in config.py."
                if default is MISSING
                else f"The default is {one_line(default)}."
            )
            remedy = (
                f"Did you mean {meant}?" if meant else known[key].metadata.get("remedy", remedy)
            )
            yield f"{key}={one_line(value)}: {rule}. {remedy}"

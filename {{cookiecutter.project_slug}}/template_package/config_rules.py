"""Which values config.yaml may hold. Unknown keys and wrong types are config_loading.py's; `data` and `model` check
themselves: a `__post_init__` that raises ValueError."""

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from .validation import ConfigError, is_loopback, one_line


def check_values(config: Any) -> None:
    """Raise ConfigError, one line a problem and at most three, if values of `config` (a Config) break a rule."""
    rules = {**RULES, "strategy": _one_of(*available_strategies())}
    problems = [problem for key, rule in rules.items() if (problem := _problem(key, attrgetter(key)(config), rule))]
    if not problems:
        problems = [
            f"{key}={one_line(attrgetter(key)(config))}: {words}"
            for key, is_possible, words in _relations(config)
            if not is_possible
        ]
    if problems:
        raise ConfigError("\n".join(problems[:3]))


def available_strategies() -> list[str]:
    """The files in strategies/: one is added by adding its file and removed by deleting it."""
    files = (Path(__file__).parent / "strategies").glob("[a-z]*.py")
    return sorted({file.stem for file in files} - {"base", "numerics"} | {"ddp"})


class Rule(NamedTuple):
    """What a value must be, apart from null: whether that is allowed is a matter of type."""

    words: str
    is_met: Callable[[Any], bool]
    example: str
    choices: tuple[str, ...] = ()


def _problem(key: str, value: Any, rule: Rule) -> str | None:
    if value is None or rule.is_met(value):
        return None
    close = get_close_matches(one_line(value).lower(), rule.choices, n=1)
    remedy = f"Did you mean {key}={close[0]}?" if close else f"Set {key}={rule.example}."
    if key == "strategy" and value in ("data_parallel", "fsdp", "accelerate", "deepspeed", "horovod"):
        remedy = f"This project was made without strategies/{value}.py: bring that file, or set strategy=ddp."
    return f"{key}={one_line(value)}: must be {rule.words}. {remedy}"


def _at_least(lowest: int) -> Rule:
    return Rule(f"at least {lowest}", lambda value: value >= lowest, f"{lowest} or more")


def _within(lowest: float, highest: int) -> Rule:
    return Rule(f"from {lowest} to {highest}", lambda value: lowest <= value <= highest, f"{lowest} or more")


def _above_zero(highest: float = float("inf")) -> Rule:
    words = "above 0" if highest == float("inf") else f"above 0, and at most {highest}"
    return Rule(words, lambda value: 0 < value <= highest, "1, for example")


def _auto_or(number: Rule) -> Rule:
    return Rule(
        f"auto or an integer, {number.words}",
        lambda value: value == "auto" or (not isinstance(value, str) and number.is_met(value)),
        "auto",
    )


def _one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices, choices[0], choices)


def _text(pattern: str, words: str, example: str) -> Rule:
    return Rule(words, lambda value: re.fullmatch(pattern, value) is not None, example)


_PATH = r".*\S.*"
_YEAR_IN_MINUTES = 365 * 24 * 60

RULES: dict[str, Rule] = {
    "name": _text(
        "[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "letters, digits, . _ - (at most 100, a letter or digit first)", "run1"
    ),
    "seed": _within(0, 2**32 - 1),  # NumPy takes no other
    "launch.nodes": _within(1, 10_000),
    "launch.node_rank": _at_least(0),
    "launch.master_addr": _text(r"\S+", "a host name or an address", "127.0.0.1"),
    "launch.master_port": _within(0, 65535),
    "launch.network_interface": _text(r"\S+", "null or an interface's name", "eth0"),
    "launch.backend": _one_of("auto", "nccl", "gloo"),
    "launch.start_method": _one_of("auto", "spawn", "forkserver"),
    "launch.min_free_memory_gib": _at_least(0),
    "launch.wait_minutes": _within(0, _YEAR_IN_MINUTES),
    "launch.timeout_minutes": _within(0.02, _YEAR_IN_MINUTES),  # in less, ranks may not even connect
    "ddp.gradient_compression": _one_of("none", "fp16", "bf16"),
    "deepspeed.zero_stage": _within(0, 3),
    "loader.num_workers": _auto_or(_within(0, 256)),
    "loader.prefetch_factor": _within(1, 1000),
    "optimizer.name": _one_of("adamw", "sgd", "adam"),
    "optimizer.learning_rate": _at_least(0),
    "optimizer.weight_decay": _at_least(0),
    "optimizer.betas": Rule(
        "two numbers from 0 to below 1", lambda b: len(b) == 2 and 0 <= min(b) <= max(b) < 1, "0.9,0.999"
    ),
    "schedule.name": _one_of("constant", "linear", "cosine", "step"),
    "schedule.warmup_steps": _at_least(0),
    "schedule.min_learning_rate": _at_least(0),
    "schedule.milestones": Rule(
        "fractions between 0 and 1 of the run, in rising order",
        lambda parts: all(0 < part < 1 for part in parts) and parts == sorted(set(parts)),
        "0.5,0.75",
    ),
    "schedule.decay_factor": _above_zero(1),
    "training.epochs": _at_least(1),
    "training.max_steps": _at_least(1),
    "training.global_batch_size": _at_least(1),
    "training.micro_batch_size": _auto_or(_at_least(1)),
    "training.precision": _one_of("auto", "fp32", "bf16", "fp16"),
    "training.max_gradient_norm": _above_zero(),
    "training.early_stopping_epochs": _at_least(1),
    "training.check_replicas_every_steps": _at_least(1),
    "evaluation.every_epochs": _at_least(1),
    "evaluation.every_steps": _at_least(1),
    "evaluation.metric": _text(r"\S+", "loss or the name of a metric", "loss"),
    "evaluation.mode": _one_of("max", "min"),
    "evaluation.micro_batch_size": _auto_or(_at_least(1)),
    "evaluation.checkpoint": Rule(
        "best, last, a path, or a list of them",
        lambda paths: paths != [] and all(re.fullmatch(_PATH, path) for path in paths),
        "best",
    ),
    "evaluation.split": _one_of("validation", "test"),
    "checkpoint.every_epochs": _at_least(1),
    "checkpoint.every_steps": _at_least(1),
    "checkpoint.keep_last": _at_least(1),
    "checkpoint.resume": _text(_PATH, "auto, never or a path", "auto"),
    "checkpoint.initial_weights": _text(_PATH, "null or a path", "null"),
    "logging.every_steps": _at_least(1),
    "logging.tracker": _one_of("tensorboard", "wandb", "none"),
    "logging.progress_bar": Rule("auto, true or false", lambda value: value in ("auto", True, False), "auto"),
    "logging.profile_steps": Rule(
        "the first and the last step, from 1", lambda s: len(s) == 2 and 1 <= s[0] <= s[1], "10,15"
    ),
    "benchmark.steps": _at_least(1),
    "benchmark.rounds": _at_least(1),
}


def _relations(config: Any) -> Iterator[tuple[str, bool, str]]:
    """(key, whether it agrees with the other keys, rule and remedy); each value is right by itself."""
    launch, devices = config.launch, config.device_ids
    names_gpus = isinstance(devices, list) and "cpu" not in devices

    is_possible = not names_gpus or launch.backend == "gloo" or len(set(devices)) == len(devices)
    yield "device_ids", is_possible, "only gloo runs two ranks on one GPU. Name each once or set launch.backend=gloo."

    is_one_process = config.strategy == "data_parallel"
    is_possible = not is_one_process or isinstance(devices, str) or len(set(devices)) == len(devices)
    remedy = "Set device_ids=cpu, or strategy=ddp."
    yield "device_ids", is_possible, f"data_parallel drives one CPU or several GPUs, each named once. {remedy}"

    remedy = "Set launch.nodes=1, or strategy=ddp."
    yield "launch.nodes", not is_one_process or launch.nodes == 1, f"data_parallel is a single process. {remedy}"

    is_possible = launch.backend != "nccl" or "cpu" not in devices
    yield "launch.backend", is_possible, "NCCL has no CPU ranks. Set launch.backend=auto."

    remedy = f"Set a number from 0 to {launch.nodes - 1}, another on each node."
    yield "launch.node_rank", launch.node_rank < launch.nodes, f"must be below launch.nodes={launch.nodes}. {remedy}"

    meets = launch.nodes == 1 or not is_loopback(launch.master_addr)
    words = "other nodes cannot reach this name. Add launch.master_addr=ADDRESS launch.master_port=29500 on each node, "
    yield "launch.master_addr", meets, f"{words}ADDRESS being that of the node with launch.node_rank=0."

    meets = launch.nodes == 1 or launch.master_port > 0
    yield "launch.master_port", meets, "several nodes must know it. Add launch.master_port=29500 on each of them."

    yield from _relations_of_training(config)


def _relations_of_training(config: Any) -> Iterator[tuple[str, bool, str]]:
    is_possible = config.schedule.min_learning_rate <= config.optimizer.learning_rate
    remedy = "Set schedule.min_learning_rate=0."
    yield "schedule.min_learning_rate", is_possible, f"must not be above optimizer.learning_rate. {remedy}"

    is_possible = config.ddp.gradient_compression == "none" or config.strategy in ("ddp", "accelerate", "horovod")
    yield "ddp.gradient_compression", is_possible, f"strategy={config.strategy} has none. Set it to none."

    is_possible = config.strategy in ("ddp", "accelerate", "data_parallel")  # the last one needs neither
    remedy = f"strategy={config.strategy} has no such setting. Set it to false, or strategy=ddp."
    for key in ("find_unused_parameters", "static_graph"):
        yield f"ddp.{key}", is_possible or not getattr(config.ddp, key), remedy

    evaluation = config.evaluation
    is_possible = evaluation.metric != "loss" or evaluation.mode == "min"
    yield "evaluation.mode", is_possible, "the smaller a loss, the better. Set evaluation.mode=min."

    has_evaluation = bool(evaluation.every_epochs or evaluation.every_steps)
    is_possible = config.training.early_stopping_epochs is None or has_evaluation
    yield "training.early_stopping_epochs", is_possible, "needs evaluations. Set evaluation.every_epochs=1."

    has_number = config.training.micro_batch_size != "auto"
    remedy = "cannot do with trial micro-batches. Set training.micro_batch_size to a number."
    yield "training.sync_batchnorm", has_number or not config.training.sync_batchnorm, remedy
    yield "ddp.static_graph", has_number or not config.ddp.static_graph, remedy

    is_possible = config.checkpoint.initial_weights is None or config.checkpoint.resume in ("auto", "never")
    yield "checkpoint.initial_weights", is_possible, "checkpoint.resume=PATH brings weights too. Set only one of them."

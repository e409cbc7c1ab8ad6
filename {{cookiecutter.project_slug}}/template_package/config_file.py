"""Reads config.yaml and `key=value` words into nested dicts of text. config.py turns the text into typed values.

It needs neither torch nor the user's files, so that run.py can start the fork server before those are imported.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, one_line

OTHER_WORDS = {
    "training.global_batch_size": "batch_size bs train_batch_size per_device_train_batch_size",
    "training.micro_batch_size=N": "accumulate_grad_batches accumulate_step gradient_accumulation_steps grad_accum",
    "training.epochs": "num_epochs max_epochs n_epochs num_train_epochs",
    "training.max_steps": "max_iters num_steps total_steps num_iterations",
    "training.precision=bf16": "amp use_amp fp16 bf16 mixed_precision",
    "training.max_gradient_norm": "gradient_clip_val max_grad_norm grad_clip clip_grad",
    "training.sync_batchnorm": "sync_bn",
    "training.activation_checkpointing": "gradient_checkpointing grad_checkpointing",
    "training.ema_decay": "ema",
    "training.early_stopping_epochs": "early_stopping",
    "optimizer.learning_rate": "lr base_lr max_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.name": "optim opt",
    "schedule.name": "scheduler sched lr_scheduler lr_scheduler_type",
    "schedule.warmup_steps": "warmup warmup_ratio num_warmup_steps",
    "device_ids": "gpu gpu_id gpu_ids device cuda_visible_devices",
    "device_ids=auto:{}": "gpus num_gpus n_gpu ngpu devices nproc nproc_per_node local_world_size world_size",
    "launch.nodes": "nnodes num_nodes n_nodes",
    "launch.node_rank": "nr machine_rank",
    "launch.master_addr": "dist_url main_process_ip",
    "launch.master_port": "port main_process_port",
    "loader.num_workers": "workers dataloader_num_workers",
    "checkpoint.resume": "resume_from resume_from_checkpoint ckpt_path",
    "checkpoint.initial_weights": "pretrained init_from",
    "logging.tracker": "logger report_to",
    "logging.every_steps": "log_interval log_every_n_steps logging_steps print_freq",
    "seed": "seed_everything random_seed manual_seed",
    "name": "run_name exp_name experiment output_dir",
}
"""Our key, with a value if that differs too: the words that other tools use for it."""
OTHER_VALUES = {
    "data_parallel": "dp", "ddp": "ddp_spawn ddp_notebook ddp_find_unused_parameters_true distributed",
    "fsdp": "zero zero2 zero3 full_shard deepspeed_stage_2 deepspeed_stage_3", "fp16": "16 16-mixed half float16",
    "bf16": "bf16-mixed bfloat16", "fp32": "32 32-true float32", "auto": "cuda gpu all -1",
}  # fmt: skip


def available_files(folder: str, besides: tuple[str, ...] = ()) -> list[str]:
    """The modules of a folder of this package: a feature is added by adding its file and removed by deleting it."""
    paths = (Path(__file__).parent / folder).glob("[a-z]*")
    return sorted({path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()} - {*besides})


def our_word(key: str, value: str) -> str | None:
    """`key=value` as config.yaml would have it, for a key that other tools use; None if we know of none."""
    name = key.lower().rpartition(".")[2]
    ours = next((ours for ours, others in OTHER_WORDS.items() if name in others.split()), None)
    return None if ours is None else ours.format(value) if "=" in ours else f"{ours}={value}"


class _TextLoader(yaml.BaseLoader):
    """PyYAML's loader that leaves numbers and booleans as text, with null as None and a check for doubled keys."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        return _null(super().construct_scalar(node), is_quoted=node.style is not None)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if doubled := {key for key in keys if keys.count(key) > 1}:
            raise ConfigError(f"{', '.join(doubled)}: this key is set twice. Delete one of its lines.")
        return super().construct_mapping(node, deep=True)


def read_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Read the settings of the file, changed by the `key=value` words: nested dicts and lists of text and None."""
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path)) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({one_line(error)}). Name the config file: --config PATH.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds no settings. Write each as a line of the form key: value.")
    return set_words(settings, overrides)


def set_words(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`settings`, changed by the `key=value` words."""
    for position, word in enumerate(overrides):
        key, equals, text = word.partition("=")
        if not equals or not key or key[0] in "-+~":
            value = text if equals else "".join(w for w in overrides[position + 1 : position + 2] if "=" not in w)
            key, value = key.lstrip("-+~").replace("-", "_") or "KEY", value or "VALUE"
            remedy = our_word(key, value) or f"{key}={value}"
            raise ConfigError(f"{one_line(word)}: a setting is key=value. Write {remedy}.")
        *sections, name = key.split(".")
        section = settings
        for inner in sections:
            section[inner] = section = section[inner] if isinstance(section.get(inner), dict) else {}
        section[name] = parse_yaml(text, key) if text[:1] in ("[", "{") else _null(text)
    return settings


def parse_yaml(text: str, source: str) -> Any:
    """Read a YAML text, and leave numbers and booleans as text. ConfigError names the source and the line."""
    try:
        return yaml.load(text, _TextLoader)  # it builds nothing but dicts, lists and text
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: not readable as YAML ({one_line(error)}). Correct it there.") from None


def _null(text: str, is_quoted: bool = False) -> str | None:
    if "${" in text:
        raise ConfigError(f"{one_line(text)}: ${{…}} is not replaced by anything. Write the value itself.")
    return None if text.lower() in ("null", "~", "") and not is_quoted else text

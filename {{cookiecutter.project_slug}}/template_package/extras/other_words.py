"""Translates other tools' keys and values, and flags such as `--lr 1e-3`, into this project's settings.

The words are in other_words.yaml. Delete both files if you like: core/config.py then suggests similar names only.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from ..core.config import all_keys, find_config


def translate(line: str) -> str:
    """Return a line of an error message about settings. If it names another tool's words, answer with ours."""
    typed, flags_are_refused, _ = line.partition(": a setting is key=value. ")
    if flags_are_refused:
        return f"{typed}{flags_are_refused}Write {' '.join(as_settings(typed))}."
    wrong = re.match(r"([^=]+)=(.*): (there is no such key|\S+ is a section|must be .*?)[.] ", line)
    if wrong is None:
        return line
    key, value, rule = wrong.groups()
    if rule.startswith("must"):
        # torch.nn.DataParallel
        value = value.lower().rpartition(".")[2]
        ours = suggest(key, value, re.findall(r"'(\w+)'", rule))
    else:
        ours = suggest(key, value)
    return f"{wrong[0]}Did you mean {ours}?" if ours else line


def suggest(key: str, value: str, allowed: Sequence[str] | None = None) -> str | None:
    """Return the setting that was meant, or None. `allowed` is None if the key is unknown, not the value."""
    if allowed is not None:
        own = read_words("values").get(value)
        return f"{key}={own}" if own in allowed else None
    ours = read_words("keys").get(key.lower().rpartition(".")[2])
    if ours is None:
        return None
    if re.search(r"[\[,]|^(0|-1|cuda|gpu)$", value):
        # gpus=0,2 and gpus=[2] are ids, gpus=2 is their number
        ours = re.sub("=auto:{}.*", "", ours)
    # cuda:2, [0, 2]
    value = "auto" if value in ("cuda", "gpu", "-1") else re.sub(r"cuda:|[\[\] ]", "", value)
    return ours.format(value) if "=" in ours else f"{ours}={value}"


def as_settings(flags: str) -> list[str]:
    """Return flags such as `--lr 1e-3 --amp` as settings."""
    # the first key that has the name
    full = {key.rpartition(".")[2]: key for key in reversed(all_keys(find_config()))}
    # --key value, --key=value, --key value value, --key
    pairs = re.findall(r"([A-Za-z][\w.-]*)[ =]*((?:(?!-+[A-Za-z])\S+ ?)*)", flags) or [("KEY", "")]
    ours = []
    for typed, values in pairs:
        key, value = typed.replace("-", "_"), ",".join(values.split()) or "VALUE"
        own = full.get(key, key if "." in key else f"model.{key}")
        ours.append(suggest(key, value) or f"{own}={value}")
    return ours


def read_words(kind: str) -> dict[str, str]:
    """Return {another tool's word: ours} for `keys` or `values`."""
    words = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_bytes())[kind]
    return {other: ours for ours, others in words.items() for other in others.split()}

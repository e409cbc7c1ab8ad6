"""The mistakes that users make, and how they are told. This file imports nothing of ours, so that all may use it."""

import re

MAX_RANKS_PER_NODE = 256


class ConfigError(ValueError):
    """The user's mistake, in one line: key, value, rule, remedy."""

    exit_code = 2


class FailureError(ConfigError):
    """A failure, not a mistake, that one line tells better than a traceback."""

    exit_code = 1


def parse_device_ids(value: object) -> str | list[int] | list[str]:
    """`auto`, `auto:2`, or a list with one entry a rank: [0, 2] (GPUs), ["cpu", "cpu"].

    value: as in config.yaml or on the command line: 0, "0,2", [0, 2], "cpu" … Whether a GPU exists is not asked here.
    """
    entries = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    texts = [str(entry).strip() for entry in entries]
    if len(texts) == 1 and re.fullmatch("auto(:[1-9][0-9]{0,3})?", texts[0]):
        return texts[0]
    is_list = 0 < len(texts) <= MAX_RANKS_PER_NODE
    if is_list and all(text == "cpu" for text in texts):
        return texts
    if is_list and all(re.fullmatch("[0-9]{1,9}", text) for text in texts):
        return [int(text) for text in texts]
    rule = f"must be auto, auto:N, or at most {MAX_RANKS_PER_NODE} GPU ids or cpu, one a rank, the two not mixed"
    remedy = "Set device_ids=auto, device_ids=0,2 or device_ids=cpu,cpu."
    raise ConfigError(f"device_ids={one_line(value)}: {rule}. {remedy}")


def one_line(value: object) -> str:
    """The value as config.yaml would show it, on one line of at most 80 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = "[" + ", ".join(map(one_line, value[:20])) + "]" if isinstance(value, list) else str(value)
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:81])
    return text if len(text) <= 80 else text[:79] + "…"


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it under that name."""
    return address in ("localhost", "::1") or address.startswith("127.")

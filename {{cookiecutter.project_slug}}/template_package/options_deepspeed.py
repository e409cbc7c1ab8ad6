"""Declares the `deepspeed:` section of config.yaml."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _typed(value: Any) -> Any:
    """Convert strings in nested dicts and lists to the values that they spell in JSON, for example "5e8" to 5e8."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    with suppress(ValueError):
        return (
            json.loads(value.lower() if value in ("True", "False") else value)
            if isinstance(value, str)
            else value
        )
    return value


@dataclass
class Options:
    # 1 cuts the optimizer's state, 2 gradients too, 3 weights too
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    # keys of DeepSpeed's own
    extra: Annotated[dict[str, Any], BeforeValidator(_typed)] = field(default_factory=dict)

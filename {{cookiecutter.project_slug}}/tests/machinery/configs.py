"""Makes a Config without a command line."""

from __future__ import annotations

import json
from typing import Any

from template_package.config import Config, load_config

from conftest import ROOT


def config_of(**training: Any) -> Config:
    """Return the Config of config.yaml with these values of its section `training`."""
    values = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in training.items()
    }
    return load_config(ROOT / "config.yaml", [f"training.{key}={values[key]}" for key in values])

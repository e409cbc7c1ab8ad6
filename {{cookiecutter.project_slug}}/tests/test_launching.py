"""What a launcher says in the environment is checked before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from template_package.config import Config, load_config
from template_package.launching.launcher import find_devices, find_world_size
from template_package.validation import ConfigError

from conftest import ROOT

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}


def config(device_ids: object) -> Config:
    return replace(load_config(Path(ROOT / "config.yaml")), device_ids=device_ids)


def test_world_size_is_the_number_of_devices_or_what_the_launcher_says() -> None:
    devices = find_devices(config(["cpu", "cpu", "cpu"]), {})
    assert devices == ["cpu"] * 3 and find_world_size(devices, {}) == 3
    devices = find_devices(config(["cpu", "cpu"]), TORCHRUN)
    assert devices == ["cpu"] * 2 and find_world_size(devices, TORCHRUN) == 4


def test_list_that_is_not_the_launchers_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names 3 devices, but the launcher started 2 ranks .*--nproc-per-node=3"):
        find_devices(config(["cpu"] * 3), TORCHRUN)


def test_half_set_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"half set: WORLD_SIZE, MASTER_PORT missing"):
        find_devices(config("cpu"), {k: v for k, v in TORCHRUN.items() if k not in ("WORLD_SIZE", "MASTER_PORT")})

"""Tests of config.yaml and of its one-line errors."""

from pathlib import Path

import pytest
import yaml

from template_package.core.config import Config, all_keys, to_dict
from template_package.errors import ConfigError

from conftest import ROOT, load_config

CONFIG_YAML = ROOT / "config.yaml"


def test_config_yaml_names_each_key_with_its_default() -> None:
    written = yaml.safe_load(CONFIG_YAML.read_text(encoding="utf-8"))
    keys = {
        f"{name}.{key}"
        for name, section in written.items()
        if isinstance(section, dict)
        for key in section
    }
    keys |= {name for name, value in written.items() if not isinstance(value, dict)}
    # Your sections may have fields that complete_config() fills in.
    assert keys <= (known := all_keys(Config).keys())
    assert all(key.startswith(("data.", "model.")) for key in known - keys)


def test_words_override_the_file() -> None:
    config = load_config(CONFIG_YAML, ["training.epochs=7", "optimizer.betas=0.8,0.9", "name=1e3"])
    assert (config.training.epochs, config.optimizer.betas) == (7, [0.8, 0.9])
    assert config.name == "1e3", "text stays as it was typed"


def test_stored_config_gives_the_same_config(tmp_path: Path) -> None:
    config = load_config(CONFIG_YAML, ["optimizer.learning_rate=3e-4"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml", ["name=baseline"]) == config


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("training.epoch=3", ["there is no such key", "Did you mean training.epochs=3?"]),
        ("lr=0.1", ["lr=0.1", "there is no such key"]),
        ("batch_size=8", ["micro_batch_size=8", " or ", "global_batch_size=8"]),
        ("training.epochs=-1", ["training.epochs=-1", "must be greater than 0"]),
        ("optimizer=adam", ["optimizer is a section"]),
        ("strategy=dpp", ["must be 'ddp' or 'fsdp'"]),
        ("training.ema_decay=0.9", ["needs size=full"]),
        ("device_ids=gpu", ["device_ids=gpu", "device_ids=0,2"]),
        ("--training.epochs=3", ["a setting is key=value", "training.epochs=3"]),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(word: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG_YAML, [word])
    assert "\n" not in str(caught.value) and all(part in str(caught.value) for part in parts)

"""Tests of config.yaml and the command line: correct values are read, and wrong values give a one-line error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from template_package import model as user_model
from template_package.config import Config, load_config
from template_package.core.config import to_dict
from template_package.core.settings import parse_device_ids
from template_package.errors import ConfigError

CONFIG_YAML = Path(__file__).parents[1] / "config.yaml"
OWN_SECTIONS = ("data", "model")

Refuse = Callable[..., str]


@pytest.fixture(autouse=True)
def nothing_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove complete_config() from model.py, because it might read data that this machine does not have."""
    monkeypatch.delattr(user_model, "complete_config", raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a config file with the `data` and `model` sections of your config.yaml, but no tracker. Return its path."""
    file, written = tmp_path / "設定.yaml", yaml.safe_load(CONFIG_YAML.read_text(encoding="utf-8"))
    own = {name: written[name] for name in OWN_SECTIONS if written.get(name)}
    file.write_text(yaml.safe_dump({**own, "logging": {"tracker": "none"}}), encoding="utf-8")
    return file


@pytest.fixture
def refuse(path: Path) -> Refuse:
    def refuse(*overrides: str) -> str:
        """Return the message of the ConfigError that these arguments raise. Fail if the message is not one line."""
        with pytest.raises(ConfigError) as refusal:
            load_config(path, overrides)
        assert str(refusal.value).isprintable() and len(str(refusal.value)) < 500
        return str(refusal.value)

    return refuse


def test_config_yaml_is_accepted() -> None:
    assert isinstance(load_config(CONFIG_YAML), Config)


def test_a_config_that_was_written_down_is_read_back_equal(path: Path) -> None:
    words = [
        "name=1e3",
        "device_ids=0,2",
        "optimizer.learning_rate=1e-5",
        "logging.profile_steps=3,4",
    ]
    config = load_config(path, words)
    path.write_text(yaml.safe_dump(to_dict(config)), encoding="utf-8")
    assert load_config(path) == config
    assert (config.name, config.device_ids, config.logging.profile_steps) == ("1e3", [0, 2], [3, 4])


def test_overrides_beat_the_file_and_the_file_beats_the_defaults(path: Path) -> None:
    own, default = path.read_text(encoding="utf-8"), load_config(path)
    path.write_text(
        f"{own}training: {{epochs: 5, max_steps: 7}}\nddp:\n  # all defaults\n", encoding="utf-8"
    )
    config = load_config(path, ["training.epochs=6", "training.epochs=1000"])
    assert (config.training.epochs, config.training.max_steps, config.ddp) == (1000, 7, default.ddp)
    assert config.training.global_batch_size == default.training.global_batch_size


def test_every_key_names_itself_when_it_refuses_a_value(path: Path) -> None:
    sections = {
        name: value
        for name, value in to_dict(load_config(path)).items()
        if name not in OWN_SECTIONS
    }
    plain = [name for name, value in sections.items() if not isinstance(value, dict)]
    refused = []
    for key in [
        *plain,
        *(f"{name}.{key}" for name in sections.keys() - set(plain) for key in sections[name]),
    ]:
        try:
            load_config(path, [f"{key}=a b?"])
        except ConfigError as error:
            message = str(error)
            assert message.startswith(f"{key}=a b?: must ") and message.isprintable(), message
            refused.append(key)
    assert len(refused) > 40 and {"seed", "name", "strategy", "training.epochs"} <= set(refused)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("training.epochs=0", "training.epochs=0: must be greater than 0"),
        ("training.epochs=1.5", "training.epochs=1.5: must be a valid integer"),
        ("training.epochs=", "training.epochs=null: needs an end of the run"),
        ("training.epochs=[3]", "training.epochs=[3]: must be a valid integer"),
        ("launch.timeout_minutes=0", "launch.timeout_minutes=0: must be greater than 0"),
        ("optimizer.learning_rate=nan", "must be greater than or equal to 0"),
        ("optimizer.betas=0.9,x", "optimizer.betas=x: must be a valid number"),
        ("optimizer.name=adamm", "must be 'adamw', 'sgd' or 'adam'"),
        (
            "training.epoch=3",
            "training.epoch=3: there is no such key. Did you mean training.epochs=3?",
        ),
        ("trainig.epochs=3", "Did you mean training.epochs=3?"),
        ("learning_rate=1", "Did you mean optimizer.learning_rate=1?"),
        ("training.weight_decay=1", "Did you mean optimizer.weight_decay=1?"),
        ("strategy=dpp", "strategy=dpp: must be one of '"),
        ("ddp=fast", "ddp is a section"),
        ("--training.epochs 3", "Write training.epochs=3"),
        ("--training.epochs=3", "Write training.epochs=3"),
        ("training.epochs 3", "Write training.epochs=3"),
        ("training.epochs=${x}", "${x}: ${…} is not replaced"),
        ("launch.backend=nccl device_ids=cpu", "launch.backend=nccl: NCCL has no CPU ranks"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_the_remedy(
    words: str, rule: str, refuse: Refuse
) -> None:
    assert rule in refuse(*words.split())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("- a", "holds no settings"),
        ("training: 3", "training is a section"),
        ("name: a\nname: b", "one of name is set twice"),
        ("{name: a", "line 1"),
        ("name: a\n\tseed: 1", "line 2"),
        ("name: '${oc.env:HOME}'", "${oc.env:HOME}: ${…} is not replaced"),
        (b"name: caf\xe9", "cannot be read"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    text: str | bytes, rule: str, path: Path, refuse: Refuse
) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert rule in refuse()


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("auto", "auto"),
        ("auto:2", "auto:2"),
        ("0", [0]),
        ("0,2", [0, 2]),
        ("[0, 2]", [0, 2]),
        ("cpu", ["cpu"]),
        ("cpu,cpu", ["cpu", "cpu"]),
        ("[cpu, cpu]", ["cpu", "cpu"]),
    ],
)
def test_device_ids_mean_the_same_in_the_file_and_on_the_command_line(
    text: str, devices: Any, path: Path
) -> None:
    assert load_config(path, [f"device_ids={text}"]).device_ids == devices
    path.write_text(f"{path.read_text(encoding='utf-8')}device_ids: {text}", encoding="utf-8")
    assert load_config(path).device_ids == devices
    assert parse_device_ids(devices) == devices


@pytest.mark.parametrize(
    "value",
    [
        "-1",
        "cpu,0",
        "[]",
        "1.5",
        "true",
        "auto:0",
        "auto,auto",
        "0,",
        "gpu",
        "cpu," * 256 + "cpu",
    ],
)
def test_device_ids_that_mean_nothing_are_refused(value: str, refuse: Refuse) -> None:
    assert refuse(f"device_ids={value}").startswith("device_ids=")


def test_your_own_sections_may_complete_each_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(model: Any, data: Any) -> None:
        model.filled_in = type(data).__name__

    def refuse(model: Any, data: Any) -> None:
        raise ValueError("model.size=7:\n does not fit.")

    monkeypatch.setattr(user_model, "complete_config", complete, raising=False)
    assert vars(load_config(path).model)["filled_in"] == "DataConfig"
    monkeypatch.setattr(user_model, "complete_config", refuse)
    with pytest.raises(ConfigError, match=r"^model\.size=7: does not fit\.$"):
        load_config(path)

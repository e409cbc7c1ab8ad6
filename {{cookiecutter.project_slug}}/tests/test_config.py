"""config.yaml and the command line: what is read, what is refused, and that each refusal is a line that helps."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from template_package import config_rules
from template_package import model as user_model
from template_package.config import Config, load_config, to_dict
from template_package.config_rules import RULES
from template_package.validation import ConfigError, parse_device_ids

CONFIG_YAML = Path(__file__).parents[1] / "config.yaml"


Refuse = Callable[..., str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "設定.yaml"
    file.write_text("", encoding="utf-8")
    return file


@pytest.fixture
def refuse(path: Path) -> Refuse:
    def refuse(*overrides: str) -> str:
        """The message for these words, which must be one line."""
        with pytest.raises(ConfigError) as refusal:
            load_config(path, overrides)
        assert str(refusal.value).isprintable() and len(str(refusal.value)) < 500
        return str(refusal.value)

    return refuse


def test_config_yaml_shows_every_key_and_the_defaults_of_the_code(path: Path) -> None:
    written = yaml.safe_load(CONFIG_YAML.read_text(encoding="utf-8"))
    config, defaults = to_dict(load_config(CONFIG_YAML)), to_dict(load_config(path))
    assert list(written) == list(config)
    sections = [key for key, value in config.items() if isinstance(value, dict)]
    assert len(sections) >= 12
    for section in sections:
        assert list(written[section]) == list(config[section])
    for section in ["launch", "ddp", "loader", "schedule", "checkpoint", "benchmark"]:  # alike in all examples
        assert config[section] == defaults[section]


def test_what_to_dict_writes_is_read_back_equal(path: Path) -> None:
    words = ["name=1e3", "device_ids=0,2", "optimizer.learning_rate=1e-5", "logging.profile_steps=3,4"]
    config = load_config(CONFIG_YAML, words)
    path.write_text(yaml.safe_dump(to_dict(config)), encoding="utf-8")
    assert load_config(path) == config
    assert isinstance(config, Config) and config.device_ids == [0, 2] and config.name == "1e3"


def test_overrides_beat_the_file_and_the_file_beats_the_defaults(path: Path) -> None:
    path.write_text("training: {epochs: 5, max_steps: 7}\nddp:\n  # all defaults\n", encoding="utf-8")
    training = load_config(path, ["training.epochs=6", "training.epochs=8"]).training
    assert (training.epochs, training.max_steps, training.global_batch_size) == (8, 7, 64)


def test_every_rule_refuses_something_and_following_its_remedy_helps(path: Path) -> None:
    refused = set()
    for key in (*RULES, "strategy", "device_ids"):
        others = ["evaluation.mode=min", "launch.master_addr=node0", "launch.master_port=29500"]
        for value in ("-1", "1e18", "nonsense", "2,1,3", "a b", " ", "cpu,0"):
            try:
                load_config(path, [*others, f"{key}={value}"])
            except ConfigError as error:
                refused.add(re.split("[=[]", str(error))[0])
                remedies = [] if "for example" in str(error) else re.findall(rf"{key}=\S*", str(error))[1:]
                for remedy in remedies:
                    load_config(path, [*others, remedy.rstrip(".,?")])
    assert refused == {*RULES, "strategy", "device_ids"}


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("training.epochs=0", "training.epochs=0: must be at least 1. Set training.epochs=1 or more."),
        ("training.epochs=1.5", "must be an integer"),
        ("launch.timeout_minutes=1e-5", "must be from 0.02 to 525600. Set launch.timeout_minutes=0.02 or more."),
        ("training.epochs=99999999999999999999", "must be an integer"),
        ("training.epochs=", "must be an integer"),
        ("training.epochs=[3]", "must be an integer"),
        ("training.tf32=1", "must be true or false"),
        ("optimizer.learning_rate=nan", "must be a finite number"),
        ("optimizer.learning_rate=-inf", "must be a finite number"),
        ("optimizer.betas=0.9,x", "optimizer.betas[1]=x: must be a finite number"),
        ("optimizer.name=adamm", "Did you mean optimizer.name=adam?"),
        ("training.epoch=3", "Did you mean training.epochs=3?"),
        ("trainig.epochs=3", "Did you mean training.epochs=3?"),
        ("learning_rate=1", "Did you mean optimizer.learning_rate=1?"),
        ("trainer.learning_rat=1", "Did you mean optimizer.learning_rate=1?"),
        ("training.weight_decay=1", "Did you mean optimizer.weight_decay=1?"),
        ("ddp.x=1", "Its keys are: find_unused_parameters, static_graph, gradient_compression."),
        ("ddp=fast", "ddp is a section"),
        ("seed.x=1", "must be an integer"),
        ("--training.epochs 3", "Write training.epochs=3"),
        ("--training.epochs=3", "Write training.epochs=3"),
        ("training.epochs 3", "Write training.epochs=3"),
        ("--launch.share-gpus name=a", "Write launch.share_gpus=VALUE"),
        ("=3", "Write KEY=3"),
        ("name=${oc.env:HOME}", "name=${oc.env:HOME}: ${…} is not replaced"),
        ("seed=${x}", "is not replaced"),
        ("optimizer.betas=0,${x}", "is not replaced"),
        ("name=???", "is no value"),
        ("name=" + "x" * 101, "at most 100"),
        ("launch.backend=nccl device_ids=cpu", "NCCL has no CPU ranks"),
        ("device_ids=[0,0]", "launch.backend=gloo"),
        ("training.sync_batchnorm=true", "Set training.micro_batch_size to a number"),
        ("ddp.static_graph=true", "Set training.micro_batch_size to a number"),
        (
            "strategy=fsdp ddp.static_graph=true training.micro_batch_size=4",
            "ddp.static_graph=true: strategy=fsdp has no such setting. Set it to false, or strategy=ddp.",
        ),
        ("strategy=fsdp ddp.find_unused_parameters=true", "strategy=fsdp has no such setting"),
        ("schedule.min_learning_rate=1", "must not be above optimizer.learning_rate"),
        ("schedule.milestones=0.7,0.5", "in rising order"),
        ("schedule.milestones=0.5,1.5", "fractions between 0 and 1"),
        ("logging.profile_steps=15,10", "the first and the last step"),
        ("evaluation.metric=loss", "Set evaluation.mode=min"),
        ("training.early_stopping_epochs=1 evaluation.every_epochs=null", "needs evaluations"),
        ("checkpoint.initial_weights=a.pt checkpoint.resume=b.pt", "only one of them"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_the_remedy(words: str, rule: str, refuse: Refuse) -> None:
    assert rule in refuse(*words.split())


def test_several_mistakes_are_reported_together_and_at_most_three(path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(path, ["seed=-1", "training.epochs=0", "logging.every_steps=0", "benchmark.steps=0"])
    keys = [line.partition("=")[0] for line in str(refusal.value).split("\n")]
    assert keys == ["seed", "training.epochs", "logging.every_steps"]


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("auto", "auto"),
        ("auto:2", "auto:2"),
        ("0", [0]),
        ("0,2", [0, 2]),
        ("[0, 2]", [0, 2]),
        ("'0, 2'", [0, 2]),
        ("cpu", ["cpu"]),
        ("cpu,cpu", ["cpu", "cpu"]),
        ("[cpu, cpu]", ["cpu", "cpu"]),
    ],
)
def test_device_ids_mean_the_same_in_the_file_and_on_the_command_line(text: str, devices: Any, path: Path) -> None:
    assert load_config(path, [f"device_ids={text.strip(chr(39))}"]).device_ids == devices
    path.write_text(f"device_ids: {text}", encoding="utf-8")
    assert load_config(path).device_ids == devices
    assert parse_device_ids(devices) == devices


@pytest.mark.parametrize(
    "value",
    [
        "-1",
        "cpu,0",
        "[]",
        "[[0]]",
        "1.5",
        "true",
        "null",
        "auto:0",
        "auto,auto",
        "0,",
        "gpu",
        "³",
        "cpu," * 256 + "cpu",
    ],
)
def test_device_ids_that_mean_nothing_are_refused(value: str, refuse: Refuse) -> None:
    assert "device_ids=" in refuse(f"device_ids={value}")


def test_two_ranks_on_one_gpu_are_allowed_with_gloo(path: Path) -> None:
    assert load_config(path, ["device_ids=[0, 0]", "launch.backend=gloo"]).device_ids == [0, 0]


def test_a_strategy_is_offered_exactly_when_its_file_is_there(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strategies").mkdir()
    monkeypatch.setattr(config_rules, "__file__", str(tmp_path / "config_rules.py"))
    with pytest.raises(ConfigError, match=r"strategy=fsdp: must be one of ddp\. .* without strategies/fsdp\.py"):
        load_config(path, ["strategy=fsdp"])
    for name in ("fsdp", "base", "__init__"):
        (tmp_path / "strategies" / f"{name}.py").touch()
    assert load_config(path, ["strategy=fsdp"]).strategy == "fsdp"
    with pytest.raises(ConfigError, match="must be one of ddp, fsdp"):
        load_config(path, ["strategy=base"])


def test_the_users_own_sections_may_complete_each_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(model: Any, data: Any) -> None:
        model.filled_in = type(data).__name__

    def refuse(model: Any, data: Any) -> None:
        raise ValueError("model.size=7:\n does not fit.")

    monkeypatch.setattr(user_model, "complete_config", complete, raising=False)
    assert vars(load_config(path).model)["filled_in"] == "DataConfig"
    monkeypatch.setattr(user_model, "complete_config", refuse)
    with pytest.raises(ConfigError, match=r"^model\.size=7: does not fit\.$"):
        load_config(path)

"""Tests of the template's config.yaml, and of how text becomes values in a DataConfig with fields of every type."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from template_package.config import Config, load_config
from template_package.core.config import differing_keys, to_dict
from template_package.core.settings import COMMANDS, read_command_line
from template_package.errors import ConfigError

from conftest import PACKAGE, ROOT, Project, clean_environment, copy_project
from run import in_our_words

TEXTS = [
    *"1e3 yes null? 0x10 010 1:30 1.0 2026-01-01 true a,b ~/data 試験".split(),
    "é x",
    "# [a]: {b}",
]
DATA = '''
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import Literal


class Color(Enum):
    RED = 1
    GREEN = "green"


@dataclass
class Inner:
    path: str = ""
    size: int = 1


@dataclass
class DataConfig:
    """The kinds of fields that a user may think of."""

    root: str
    note: str | None = "x"
    names: list[str] = field(default_factory=list)
    size: int | Literal["auto"] = "auto"
    scale: int | float = 1
    pair: tuple[int, int] = (1, 2)
    weights: dict[str, float] = field(default_factory=dict)
    folder: Path = Path("data")
    color: Color = Color.GREEN
    inner: Inner = field(default_factory=Inner)
    spare: Inner | None = None

    def __post_init__(self) -> None:
        if self.root == "nowhere":
            raise ValueError("root=nowhere: there is no such folder.\\nSet another.")
'''
READER = f"""
import json, sys
from pathlib import Path
from {PACKAGE}.config import load_config
from {PACKAGE}.core.config import to_dict
from {PACKAGE}.errors import ConfigError
for line in sys.stdin:
    case = json.loads(line)
    Path("config.yaml").write_text(case["text"], encoding="utf-8")
    try:
        config = load_config(Path("config.yaml"), case["words"])
        print(json.dumps([repr(config.data), to_dict(config)["data"]]), flush=True)
    except ConfigError as error:
        print(json.dumps([str(error), None]), flush=True)
"""
Read = Callable[..., tuple[str, dict[str, Any] | None]]


def load_typed(words: list[str]) -> Config:
    """Load config.yaml with settings as a command does, which knows other tools' words."""
    try:
        config: Config = read_command_line(words, ROOT / "config.yaml").load_config()
        return config
    except ConfigError as error:
        raise ConfigError(in_our_words(error)) from None


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    """Yield a function that reads settings (`words`) and a config.yaml (`text`) with the DataConfig above.

    The function returns (the repr of the DataConfig, its plain values), or (the error message, None).
    """
    folder = copy_project(tmp_path_factory.mktemp("project"))
    with (folder / PACKAGE / "dataset.py").open("a", encoding="utf-8") as file:
        file.write(DATA)
    pipes: Any = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "encoding": "utf-8",
    }
    with subprocess.Popen(
        [sys.executable, "-c", READER], cwd=folder, env=clean_environment(), **pipes
    ) as process:

        def read(*words: str, text: str = "") -> tuple[str, dict[str, Any] | None]:
            print(json.dumps({"words": words, "text": text}), file=process.stdin, flush=True)
            shown, values = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            assert str(shown).isprintable() and len(shown) < 500
            return shown, values

        yield read
        process.kill()


def test_config_yaml_shows_every_key_and_the_defaults_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    written = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    config, defaults = (
        to_dict(load_config(ROOT / "config.yaml")),
        to_dict(load_config(tmp_path / "empty.yaml")),
    )
    sections = [key for key, value in config.items() if isinstance(value, dict)]
    assert set(written) == set(config) and len(sections) >= 12
    for section in sections:
        assert set(written[section]) == set(config[section])
    message = "write the same value into config.yaml and the dataclass, by which the report and a deleted line go"
    assert config == defaults, message


@pytest.mark.parametrize(
    "example", sorted(path.parent.name for path in ROOT.glob("examples/*/config.yaml"))
)
def test_config_of_an_example_names_keys_that_there_are(example: str) -> None:
    written = yaml.safe_load(
        (ROOT / "examples" / example / "config.yaml").read_text(encoding="utf-8")
    )
    known = to_dict(load_config(ROOT / "config.yaml"))
    for section in written.keys() - {"data", "model"}:
        assert section in known
        if isinstance(known[section], dict):
            assert written[section].keys() <= known[section].keys()


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_as_it_was_typed(text: str, read: Read) -> None:
    _, typed = read(f"data.root={text}", f"data.inner.path={text}", f"data.spare.path={text}")
    assert typed is not None
    assert (typed["root"], typed["inner"]["path"], typed["spare"]["path"]) == (text, text, text)
    plain = text if text[0] != "#" else f"'{text}'"
    content = f"data:\n  root: {plain}\n  inner:\n    path: {plain}\n  names:\n  - {plain}\n  note: '{text}'"
    _, in_file = read(text=content)
    assert in_file is not None
    assert (in_file["root"], in_file["inner"]["path"], in_file["names"], in_file["note"]) == (
        text,
        text,
        [text],
        text,
    )


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("note", "null", "None"),
        ("note", "none", "'none'"),
        ("names", "1e3,yes", "['1e3', 'yes']"),
        ("names", "[yes, 1e3]", "['yes', '1e3']"),
        ("names", "one", "['one']"),
        ("names", "[]", "[]"),
        ("size", "12", "12"),
        ("size", "auto", "'auto'"),
        ("scale", "2", "2"),
        ("scale", "2e-3", "0.002"),
        ("pair", "3,4", "(3, 4)"),
        ("weights", "{a: 3e-3, b: 1}", "{'a': 0.003, 'b': 1.0}"),
        ("folder", "a b", "PosixPath('a b')"),
        ("color", "green", "<Color.GREEN: 'green'>"),
        ("spare", "{size: 3}", "Inner(path='', size=3)"),
        ("inner.size", "010", "10"),
    ],
)
def test_fields_of_any_type_are_read_alike_from_file_and_command_line(
    key: str, text: str, value: str, read: Read
) -> None:
    outer, _, inner = key.rpartition(".")
    text_in_file = f"[{text}]" if "," in text and text[0] not in "[{" else text
    in_file = (
        f"{{{outer}: {{{inner}: {text_in_file}}}}}" if outer else f"{{{inner}: {text_in_file}}}"
    )
    for shown, _ in (
        read("data.root=here", f"data.{key}={text}"),
        read("data.root=here", text=f"data: {in_file}"),
    ):
        assert f"{inner}={value}" in shown


def test_a_users_fields_are_written_plainly_and_read_back_equal(read: Read) -> None:
    words = [
        "data.root=yes",
        "data.note='",
        "data.folder=a/b",
        "data.pair=3,4",
        "data.spare.size=3",
    ]
    shown, values = read(*words)
    assert read(text=yaml.safe_dump({"data": values})) == (shown, values)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["data.root=nowhere"], "data.root=nowhere: there is no such folder. Set another."),
        (["data.root=a", "data.color=BLUE"], "data.color=BLUE: must be"),
        (["data.root=a", "data.pair=1,2,3"], "data.pair=[1, 2, 3]: "),
        (["data.root=a", "data.weights={a: b}"], "data.weights=b: must be a valid number"),
        (["data.root=a", "data.rot=b"], "Did you mean data.root=b?"),
        (["data.root=a", "data.inner.siz=3"], "Did you mean data.inner.size=3?"),
        ([], "data.root: has no value and no default. Set data.root=VALUE"),
    ],
)
def test_values_that_the_users_own_sections_refuse_are_one_line(
    words: list[str], rule: str, read: Read
) -> None:
    message, values = read(*words)
    assert rule in message and values is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ddp: {static_graph: true, static_graph: true}", "one of static_graph is set twice"),
        ("training.epochs: 3", "training.epochs=3: there is no such key"),
        ("name: !!python/object/apply:os.abort []", "name=[]: must be a valid string"),
        ("<<: {name: a}", "there is no such key"),
        ("name: ok\n? [a]\n: b", "line 2"),
        ("name: a\n---\nname: b", "cannot be read (expected a single document"),
        ("name: [a]", "must be a valid string"),
        ("seed: .nan", "must be a valid integer"),
        ("schedule: {decay_factor: .inf}", "schedule.decay_factor=.inf: must be"),
        ("x" * 1000 + ": 1", "no such key"),
    ],
)
def test_a_file_that_is_broken_is_refused_in_one_line(text: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        load_config(tmp_path / "config.yaml")
    assert (
        rule in str(refusal.value)
        and str(refusal.value).isprintable()
        and len(str(refusal.value)) < 500
    )


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("logging.tracker=wand", "must be one of 'none', 'mlflow', "),
        ("logging.tracker=aim", "must be one of 'none', 'mlflow', "),
        (
            "logging.tracker=[tensorboard,wand]",
            "logging.tracker=wand: must be one of 'none', 'mlflow', ",
        ),
        ("--launch.share-gpus name=a", "Write launch.share_gpus=VALUE"),
        ("=3", "a setting is key=value"),
        ("launch.node_rank=1", "launch.node_rank=1: must be below launch.nodes"),
        (
            "--batch_size 64 --lr 1e-3 --amp",
            "together) optimizer.learning_rate=1e-3 training.precision=bf16.",
        ),
        ("--gpus 0,2", "Write device_ids=0,2."),
        ("--gpus=[0,2]", "Write device_ids=0,2."),
        ("optimizer.betas=0.9", "The default is [0.9, 0.999]."),
        ("gpus=[0,2]", "Did you mean device_ids=0,2?"),
        ("optimizer.betas=0,${x}", "0,${x}: ${…} is not replaced"),
        ("name=" + "x" * 101, "name=xxx"),
        ("schedule.milestones=0.5,1.5", "schedule.milestones=1.5: must be"),
    ],
)
def test_settings_that_do_not_go_together_are_one_line(words: str, rule: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_typed(words.split())
    assert (
        rule in str(refusal.value)
        and str(refusal.value).isprintable()
        and len(str(refusal.value)) < 500
    )


@pytest.mark.parametrize(
    "words",
    [
        "batch_size=8 lr=0.1 training.epoch=3",  # no such keys
        "seed=x ddp.static_graph=maybe training.micro_batch_size=-1 training.precision=fp8",  # values
    ],
)
def test_all_mistakes_are_told_at_once_each_in_its_line(words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(ROOT / "config.yaml", words.split())
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(words.split())
    for line, word in zip(sorted(lines), sorted(words.split()), strict=True):
        assert line.startswith(f"{word}: ")


def test_keys_that_one_side_does_not_know_count_as_their_defaults() -> None:
    config = load_config(ROOT / "config.yaml", ["training.epochs=3"])
    stored = to_dict(config) | {"gone": 1}
    del stored["optimizer"]["betas"], stored["fsdp"]
    stored["training"] = {"epochs": 4, "gone": 2}
    assert differing_keys(stored, config) == {"training.epochs": "4 -> 3"}


def test_key_that_the_schedule_does_not_read_refuses_nothing_when_a_run_goes_on(
    project: Project,
) -> None:
    words = ["training.max_steps=2", "schedule.name=constant"]
    project.run(*words)
    words[0] = "training.max_steps=3"
    read = [*words, "schedule.warmup_steps=1"]
    assert "schedule.warmup_steps: 0 -> 1" in project.run(*read, code=2)
    unread = ["schedule.patience=9", "schedule.min_learning_rate=0.001"]
    output = project.run(*words, *unread)
    assert "resuming after step 2 of 3" in output and "schedule.patience: 3 -> 9" in output
    plateau = ["name=plateau", "schedule.name=plateau"]
    project.run(words[0], *plateau)
    output = project.run("training.max_steps=4", *plateau, *unread, code=2)
    assert "schedule.patience: 3 -> 9" in output and "min_learning_rate: 0.0 -> 0.001" in output


def test_two_ranks_on_one_gpu_are_allowed_with_gloo() -> None:
    assert load_config(
        ROOT / "config.yaml", ["device_ids=[0, 0]", "launch.backend=gloo"]
    ).device_ids == [0, 0]


def test_strategy_or_tracker_is_offered_exactly_when_its_file_is_there(project: Project) -> None:
    for file in ("strategies/horovod.py", "tracking/wandb.py"):
        (project.folder / PACKAGE / file).unlink()
    shutil.copy(
        project.folder / PACKAGE / "strategies" / "ddp.py",
        project.folder / PACKAGE / "strategies" / "own.py",
    )
    missing = project.run("strategy=horovod", code=2)
    assert (
        missing.startswith("error: strategy=horovod: must be one of 'accelerate', ")
        and "template" in missing
    )
    assert "'own'" in missing and "base" not in missing and "common" not in missing
    missing = project.run("logging.tracker=wandb", code=2)
    assert (
        "logging.tracker=wandb: must be one of 'none', 'mlflow', 'tensorboard', 'trackio'."
        in missing
    )
    assert "template" in missing
    project.run("strategy=own", "device_ids=cpu,cpu", "training.max_steps=1")


def test_help_tells_what_each_command_does(project: Project) -> None:
    (project.folder / "template_package" / "commands" / "own.py").write_text(
        "# no docstring\n", encoding="utf-8"
    )
    printed = project.run("--help")
    for name in ("benchmark", "doctor", "evaluate", "predict", "report", "smoke", "sweep"):
        assert re.search(rf"^{name}\b.* .+$", printed, re.MULTILINE)
    shutil.rmtree(project.folder / PACKAGE / "commands" / "sweep")
    (project.folder / PACKAGE / "commands" / "sweep" / "__pycache__").mkdir(parents=True)
    assert "sweep: this command needs size=full." in project.run("sweep", "a.yaml", code=2)
    others = [line for line in printed.splitlines() if not line.startswith("sweep")]
    assert others == project.run("--help").splitlines() and "own" not in printed


def test_each_command_begins_with_its_line_of_the_help() -> None:
    commands = ROOT / PACKAGE / "commands"
    files = {
        path.name: path / "__init__.py"
        for path in commands.iterdir()
        if (path / "__init__.py").exists()
    }
    files |= {path.stem: path for path in commands.glob("[a-z]*.py") if path.stem != "common"}
    usages = COMMANDS.keys() - {"train"}
    assert {usage.split()[0] for usage in usages} == files.keys()
    for usage in usages:
        source = files[usage.split()[0]].read_text(encoding="utf-8")
        assert source.startswith(f'"""`python run.py {usage}`: {COMMANDS[usage]}')


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for name in ("none.yaml", ".", "x" * 999):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("batch_size=32", "training.global_batch_size=32"),
        ("training.batch_size=32", "training.global_batch_size=32"),
        ("lr=1e-3", "optimizer.learning_rate=1e-3"),
        ("epoch=3", "training.epochs=3"),
        ("device=cuda:2", "device_ids=2"),
        ("MASTER_PORT=29500", "launch.master_port=29500"),
        ("optimizer.lr=1e-3", "optimizer.learning_rate=1e-3"),
        ("gpus=2", "device_ids=auto:2"),
        ("num_gpus=2", "device_ids=auto:2"),
        ("gpu_ids=0,1", "device_ids=0,1"),
        ("nr=1", "launch.node_rank=1"),
        ("node_rank=1", "launch.node_rank=1"),
        ("nodes=2", "launch.nodes=2"),
        ("num_nodes=2", "launch.nodes=2"),
        ("accumulate_grad_batches=4", "training.micro_batch_size=N"),
        ("accumulate_step=4", "training.micro_batch_size=N"),
        ("amp=true", "training.precision=bf16"),
        ("fp16=true", "training.precision=bf16"),
        ("resume_from_checkpoint=last.pt", "checkpoint.resume=last.pt"),
        ("resume=never", "checkpoint.resume=never"),
        ("seed_everything=1", "seed=1"),
        ("num_epochs=3", "training.epochs=3"),
        ("max_epochs=3", "training.epochs=3"),
        ("max_iters=100", "training.max_steps=100"),
        ("wd=0.1", "optimizer.weight_decay=0.1"),
        ("optim=sgd", "optimizer.name=sgd"),
        ("lr_scheduler=cosine", "schedule.name=cosine"),
        ("warmup_ratio=0.1", "schedule.warmup_steps=0.1"),
        ("gradient_clip_val=1", "training.max_gradient_norm=1"),
        ("gradient_checkpointing=true", "training.activation_checkpointing=true"),
        ("ema=0.99", "training.ema_decay=0.99"),
        ("sync_bn=true", "training.sync_batchnorm=true"),
        ("workers=4", "loader.num_workers=4"),
        ("port=29500", "launch.master_port=29500"),
        ("backend=gloo", "launch.backend=gloo"),
        ("pretrained=a.pt", "checkpoint.initial_weights=a.pt"),
        ("report_to=wandb", "logging.tracker=wandb"),
        ("log_every_n_steps=5", "logging.every_steps=5"),
        ("run_name=first", "name=first"),
        ("strategy=dp", "strategy=data_parallel"),
        ("strategy=ddp_spawn", "strategy=ddp"),
        ("strategy=torch.nn.parallel.DistributedDataParallel", "strategy=ddp"),
        ("momentum=0.9", "optimizer.name=sgd optimizer.betas=0.9,0.999"),
        ("milestones=30,60", "schedule.name=step schedule.milestones=0.3333,0.6667"),
        ("strategy=zero3", "strategy=fsdp"),
        ("training.precision=16-mixed", "training.precision=fp16"),
        ("training.precision=32", "training.precision=fp32"),
        ("--local_world_size=2", "device_ids=auto:2"),
        ("world_size=2", "device_ids=auto:2"),
        ("nprocs=-1", "device_ids=auto"),
        ("rank=1", "launch.node_rank=1"),
        ("no_cuda=true", "device_ids=cpu"),
        ("dataset=char", "data.KEY=char"),
        ("nprocs=2", "device_ids=auto:2"),
        ("local_rank=0", "device_ids=auto"),
        ("--local_rank", "device_ids=auto"),
        ("--cpu", "device_ids=cpu"),
        ("use_cuda=false", "device_ids=auto"),
        ("dist_backend=gloo", "launch.backend=gloo"),
        ("--batch-size=32", "training.global_batch_size=32"),
        ("devices=[1]", "device_ids=1"),
        ("--dropout -0.5", "model.dropout=-0.5"),
        ("--betas 0.9 0.95", "optimizer.betas=0.9,0.95"),
        ("--gpus 0 1", "device_ids=0,1"),
        ("training.epochs = 3", "training.epochs=3"),
        ("--name first", "name=first"),
        ("--micro_batch_size 8", "training.micro_batch_size=8"),
    ],
)
def test_words_of_other_tools_are_answered_with_ours(word: str, ours: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_typed(word.split())
    assert re.search(
        rf"(Did you mean|Set|Write) {re.escape(ours)}( \(.*\))?[.?]$", str(error.value)
    ), str(error.value)
    assert word.partition("=")[0] in str(error.value) and "\n" not in str(error.value)
    if not re.search("=N$|auto:2|=-|KEY", ours):
        load_typed(["launch.nodes=2", *ours.split()])


def test_without_the_extra_similar_names_answer_in_one_line(project: Project) -> None:
    shutil.rmtree(project.folder / PACKAGE / "extras")
    answers = {
        "lr=1e-3": "lr=1e-3: there is no such key. Did you mean optimizer.learning_rate=1e-3?",
        "training.epoch=3": "training.epoch=3: there is no such key. Did you mean training.epochs=3?",
        "schedule=cosine": "schedule=cosine: schedule is a section. Set schedule.KEY=…",
        "--training.epochs 3": "--training.epochs 3: a setting is key=value. Write training.epochs=3.",
        "--lr 1e-3 --amp": "--lr 1e-3 --amp: a setting is key=value. Write lr=1e-3.",
        "optimizer.name=torch.optim.AdamW": "optimizer.name=torch.optim.AdamW: must be 'adamw', 'sgd' or 'adam'. "
        "The default is adamw.",
        "training.precision=16-mixed": "training.precision=16-mixed: must be 'auto', 'fp32', 'bf16' or 'fp16'. "
        "The default is auto.",
    }
    for words, answer in answers.items():
        assert project.run(*words.split(), code=2) == f"error: {answer}\n"
    assert "must be one of 'accelerate', " in project.run("strategy=dpp", code=2)
    project.run("training.max_steps=1")


def test_list_that_the_shell_has_cut_at_its_blanks_is_read_whole() -> None:
    line = read_command_line(
        ["name=a", "device_ids=[cpu,", "cpu,", "cpu]", "seed=1"], ROOT / "config.yaml"
    )
    assert line.words == ["name=a", "device_ids=[cpu,cpu,cpu]", "seed=1"]
    assert read_command_line([], ROOT / "config.yaml").words == []

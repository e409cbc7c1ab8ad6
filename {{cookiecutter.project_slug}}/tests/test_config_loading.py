"""How text becomes values: fields of every type that a DataConfig may have; files that are broken or hostile."""

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

from template_package.config import load_config
from template_package.config_loading import load, to_plain
from template_package.validation import ConfigError

from conftest import Project

TEXTS = [*"1e3 yes null 0x10 010 1:30 1.0 2026-01-01 true a,b ~/data 試験".split(), "é x", "# [a]: {b}"]


class Color(Enum):
    RED = 1


@dataclass
class Inner:
    path: str = ""
    size: int = 1


@dataclass
class Data:
    """The kinds of fields that a user may think of."""

    root: str
    note: str | None = "x"
    names: list[str] = field(default_factory=list)
    size: int | str = "auto"
    scale: int | float = 1
    pair: tuple[int, int] = (1, 2)
    weights: dict[str, float] = field(default_factory=dict)
    folder: Path = Path("data")
    color: Color = Color.RED
    anything: Any = None
    inner: Inner = field(default_factory=Inner)
    spare: Inner | None = None

    def __post_init__(self) -> None:
        if self.root == "nowhere":
            raise ValueError("root=nowhere: there is no such folder.\nSet another.")


@dataclass(kw_only=True)
class Root:
    data: Data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "設定.yaml"
    file.write_text("", encoding="utf-8")
    return file


def user_data(path: Path, *overrides: str, text: str = "") -> Data:
    path.write_text(text, encoding="utf-8")
    return load(Root, path, ["data.root=here", *overrides]).data


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_as_it_was_typed(text: str, path: Path) -> None:
    typed = user_data(path, f"data.root={text}", f"data.inner.path={text}", f"data.spare.path={text}")
    assert (typed.root, typed.inner.path, typed.spare) == (text, text, Inner(text))
    plain = text if text[0] != "#" else f"'{text}'"
    file = user_data(path, text=f"data:\n  inner:\n    path: {plain}\n  names:\n  - {plain}\n  note: '{text}'")
    assert (file.inner.path, file.names, file.note) == (text, [text], text)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("note", "null", None),
        ("note", "none", "none"),
        ("names", "1e3,yes", ["1e3", "yes"]),
        ("names", "[yes, 1e3]", ["yes", "1e3"]),
        ("names", "one", ["one"]),
        ("names", "[]", []),
        ("size", "12", 12),
        ("size", "12 cm", "12 cm"),
        ("scale", "2", 2),
        ("scale", "2e-3", 0.002),
        ("pair", "3,4", (3, 4)),
        ("weights", "{a: 3e-3, b: 1}", {"a": 0.003, "b": 1.0}),
        ("folder", "a b", Path("a b")),
        ("color", "RED", Color.RED),
        ("anything", "[1, 2.0, yes, x, null, 1.e-2, '1']", [1, 2.0, True, "x", None, 0.01, "1"]),
        ("spare", "{size: 3}", Inner(size=3)),
        ("inner.size", "010", 10),
    ],
)
def test_fields_of_any_type_are_read_alike_from_file_and_command_line(
    key: str, text: str, value: Any, path: Path
) -> None:
    outer, _, inner = key.rpartition(".")
    text_in_file = f"[{text}]" if "," in text and text[0] not in "[{" else text
    in_file = f"data: {{{outer}: {{{inner}: {text_in_file}}}}}" if outer else f"data: {{{inner}: {text_in_file}}}"
    for data in (user_data(path, f"data.{key}={text}"), user_data(path, text=in_file)):
        found = getattr(getattr(data, outer) if outer else data, inner)
        assert found == value
        assert repr(found) == repr(value)  # 2 is not 2.0, nor True 1


def test_a_users_fields_are_written_plainly_and_read_back_equal(path: Path) -> None:
    words = [
        "data.root=yes",
        "data.note='",
        "data.folder=a/b",
        "data.pair=3,4",
        "data.spare.size=1e3",
        "data.anything=[1]",
    ]
    data = user_data(path, *words)
    assert user_data(path, "data.root=yes", text=yaml.safe_dump({"data": to_plain(data)})) == data


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["data.root=nowhere"], "data.root=nowhere: there is no such folder. Set another."),
        (["data.color=BLUE"], "data.color: Invalid value 'BLUE', expected one of [RED]"),
        (["data.pair=1,2,3"], "length 3"),
        (["data.weights={a: b}"], "data.weights.a=b: must be a finite number"),
        ([], "data.root=???: has no value and no default. Set data.root=VALUE"),
    ],
)
def test_values_that_the_users_own_sections_refuse_are_one_line(words: list[str], rule: str, path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(Root, path, words)
    assert rule in str(refusal.value) and str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("- a", "holds no settings"),
        ("training: 3", "training is a section"),
        ("training.epochs: 3", "keys with a dot"),
        ("name: a\nname: b", "name=b: this key stands there twice"),
        ("ddp: {static_graph: true, static_graph: true}", "stands there twice"),
        ("name: !!python/object/apply:os.abort []", "line 1: no YAML that can be read here: anchors, aliases and tags"),
        ("a: &a [1]\nb: *a", "anchors, aliases and tags"),
        ("seed: &s 1\nname: ok", "anchors, aliases and tags"),
        ("<<: {name: a}", "no such key"),
        ("name: ok\n? [a]\n: b", "[a]=[a]: must be text"),
        ("name: a\n---\nname: b", "found another document"),
        ("name: a\n\tseed: 1", "line 2"),
        ("{name: a", "line 1"),
        ("[" * 5000, "nested too deep"),
        ("device_ids: " + "[" * 81 + "]" * 81, "device_ids[0][0][0]"),
        ("deepspeed: {extra: " + "{a: " * 200 + "1" + "}" * 201, "nested too deep. Take some levels out."),
        ("name: '${oc.env:HOME}'", "is not replaced"),
        ('name: "\\ud800"', "holds a character"),
        ("name: [a]", "must be text"),
        ("seed: .nan", "must be an integer"),
        ("schedule: {decay_factor: .inf}", "must be a finite number"),
        (b"name: caf\xe9", "byte 9 is not UTF-8"),
        ("name: a".encode("utf-16"), "byte 0 is not UTF-8"),
        (b"name: \0", "special characters"),
        ('name: "\\UFFFFFFFF"', "no YAML that can be read here"),
        ('name: "\\U00110000"', "no YAML that can be read here"),
        (f"%YAML {'9' * 5000}.1\n---\nname: a", "no YAML that can be read here"),
        ("x" * 1000 + ": 1", "no such key"),
        ("# " + "x" * 100_000, "larger than 100 kB"),
    ],
)
def test_a_file_that_is_broken_or_hostile_is_refused_in_one_line(text: str | bytes, rule: str, path: Path) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as refusal:
        load_config(path)
    assert rule in str(refusal.value) and str(refusal.value).isprintable() and len(str(refusal.value)) < 500


def test_brackets_on_the_command_line_are_refused_or_read_however_deep(path: Path) -> None:
    for depth in (27, 31, 60, 81, 150, 400, 5000):
        words = [f"deepspeed.extra.a={'[' * depth}{']' * depth}", f"deepspeed.extra{'.a' * depth}=1"]
        for word in words[: 1 + (depth < 1000)]:
            if depth < 30:
                load_config(path, [word])
                continue
            with pytest.raises(ConfigError, match="nested too deep") as refusal:
                load_config(path, [word])
            assert str(refusal.value).isprintable() and len(str(refusal.value)) < 200


def test_a_file_without_end_is_refused_by_the_command(project: Project) -> None:
    os.truncate(project.folder / "config.yaml", 10**11)
    assert "is larger than 100 kB" in project.run(code=2)


@pytest.mark.timeout(60)
def test_a_pipe_is_no_config_that_one_waits_for(project: Project) -> None:
    (project.folder / "config.yaml").unlink()
    os.mkfifo(project.folder / "config.yaml")
    with project.start("name=a") as process:
        try:
            _, errors = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 2 and "config.yaml: there is no such file" in errors


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name, rule in (
        ("none.yaml", "there is no such file"),
        (".", "there is no such file"),
        ("x" * 999, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=rule):
            load_config(tmp_path / name)


def test_no_environment_variable_is_read_by_a_default_in_code(path: Path) -> None:
    @dataclass
    class Leaky:
        home: str = "${oc.env:HOME}"

    with pytest.raises(ConfigError, match="default of a config class"):
        load(Leaky, path, [])

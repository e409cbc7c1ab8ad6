"""Tests of text_files.py: all kinds of files give the same rows, and a wrong row is reported with its file and line."""

import json
import os
from pathlib import Path

import pytest

from template_package.errors import ConfigError
from template_package.text_files import read_rows, read_texts

NAMES = ["天气", "food"]
ROWS = [("下雨了", 0), ('a "hot" soup, twice', 1), ("two\nlines", 1), ("\uff13 rolls", 0)]
FILES = {
    "list.json": json.dumps(
        [["下雨了", "天气"], ['a "hot" soup, twice', 1], ["two\nlines", "1"], ["\uff13 rolls", 0]]
    ),
    "pretty.json": json.dumps(
        [{"label": NAMES[label], "text": text, "id": 7} for text, label in ROWS], indent=2
    ),
    "lines.jsonl": "\n".join(json.dumps([text, label], ensure_ascii=False) for text, label in ROWS)
    + "\n\n",
    "plain.csv": '下雨了,0\n"a ""hot"" soup, twice",food\n"two\nlines",1\n\uff13 rolls,天气\n',
    "header.csv": '\ufeffN,Label,Text\n1,0,下雨了\n2,1,"a ""hot"" soup, twice"\n3,1,"two\nlines"\n\n4,0,\uff13 rolls\n',
    "tabs.tsv": '下雨了\t天气\r\n"a ""hot"" soup, twice"\tfood\r\n"two\nlines"\t1\r\n\uff13 rolls\t0\r\n',
}


def write(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_bytes(content.encode())
    return folder / name


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, FILES[name])
    assert read_rows(path, NAMES) == ROWS
    assert read_rows(path, NAMES, max_rows=2) == ROWS[:2]
    assert read_texts(path) == [text for text, _ in ROWS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '["one", ["two"]]'),
        ("a.jsonl", '"one"\n{"text": "two"}'),
        ("a.csv", "text\none\ntwo"),
        ("a.txt", " one\n\ntwo\n"),
    ],
)
def test_texts_are_read_without_labels(tmp_path: Path, name: str, content: str) -> None:
    assert read_texts(write(tmp_path, name, content)) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "locations"),
    [
        (
            "a.json",
            '[\n["a", 0],\n["b", 2],\n["c"], ["", 1],\n7]',
            ["line 3, row 2", "line 4, row 3", "line 4, row 4"],
        ),
        ("a.json", '[["a", 0],\n["b" 1]]', ["line 2, row 2"]),
        ("a.json", '[["a", 0],\n["b", 1]', ["line 2, row 3"]),
        ("a.json", '{"a": 0}', ["line 1"]),
        ("a.jsonl", '["a", 0]\n\n["b", "snow"]\n{"text": 3}\nsoup', ["line 3", "line 4", "line 5"]),
        ("a.json", '[["a", 0],\n' + "[" * 100_000, ["line 2, row 2"]),
        ("a.jsonl", '["a", 0]\n["b", ' + "1" * 5000 + "]\n" + "[" * 100_000, ["line 2", "line 3"]),
        (
            "a.jsonl",
            '["a", 0]\n["b", ' + 600 * "[" + 600 * "]" + ']\n["c", {"d": 1}]',
            ["line 2", "line 3"],
        ),
        ("a.jsonl", '["a", 0]\n["half \\ud83d", 1]', ["line 2"]),
        ("a.jsonl", '["a", true]\n["b", -1]\n["c", 1.5]', ["line 1", "line 2", "line 3"]),
        ("a.csv", "text,label\na,0\n,1\nb\n", ["line 3", "line 4"]),
        ("a.csv", 'a,0\n"b\nb",1\nc,1,2\n', ["line 4"]),
        ("a.csv", 'a,0\n"b,1\nc,1', ["line 2"]),
        ("a.csv", "label,text\n0,hello, world\n1,b\n", ["line 2"]),
        ("a.json", '[["a", 0]]\n[["b", 1]]', ["line 1"]),
        ("a.tsv", "a,0\n", ["line 1"]),
        ("a.txt", "a\n", ["line 1"]),
    ],
)
def test_wrong_rows_are_told_with_file_and_line(
    tmp_path: Path, name: str, content: str, locations: list[str]
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(ConfigError) as refusal:
        read_rows(path, NAMES)
    lines = str(refusal.value).split("\n")
    assert [line.rpartition(f"{path}, ")[2].partition(":")[0] for line in lines] == locations


def test_only_the_first_of_many_wrong_rows_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "a,0\n" + 20 * "a,9\n")
    with pytest.raises(ConfigError, match="20 rows are wrong") as refusal:
        read_rows(path, NAMES)
    assert str(refusal.value).count("\n") == 2 and "天气, food, 0 to 1" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.xlsx", b"", "must end in"),
        ("a.csv", b"\xff\xfe", "UTF-8"),
        ("a.csv", b"", "holds no rows"),
        ("a.json", b"[]", "no rows"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_rows(tmp_path / name, NAMES)
    with pytest.raises(ConfigError, match="No such file"):
        read_rows(tmp_path / "other.csv", NAMES)


@pytest.mark.timeout(20)
def test_what_never_ends_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    (tmp_path / "folder.json").mkdir()
    for name in ("pipe.csv", "device.txt", "folder.json"):
        with pytest.raises(ConfigError, match=rf"{name}: is no file of rows\. Name one"):
            read_texts(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_texts(tmp_path / f"{'x' * 999}.csv")

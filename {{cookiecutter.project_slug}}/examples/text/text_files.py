"""Reads rows of text and label from files. If rows are wrong, an error names the file and the first wrong lines."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError, one_line

Parsed = TypeVar("Parsed")

MAX_PROBLEMS = 3


def read_rows(
    path: Path, label_names: list[str], max_rows: int | None = None
) -> list[tuple[str, int]]:
    """Return text and class id of each row, or only of the first `max_rows`.

    Raise ConfigError if a row is wrong; its message names the file and the line.
    A .json file holds a list [[text, label], …], and each line of a .jsonl file holds [text, label]. In both, a row may
    also be {"text": …, "label": …}. A .csv or .tsv file has two columns, text and label, or any columns below a header
    that names `text` and `label`. A label is one of `label_names`, or its index in that list, counted from 0.
    """
    return _read(path, max_rows, lambda record: (_text(record), _class_id(record, label_names)))


def read_texts(path: Path) -> list[str]:
    """Return the text of each row. Labels are optional. In a .txt file, each line that is not blank is a text."""
    return _read(path, None, _text)


def _read(path: Path, max_rows: int | None, parse: Callable[[Any], Parsed]) -> list[Parsed]:
    if path.suffix not in READERS:
        raise ConfigError(
            f"{path}: must end in {', '.join(READERS)}. Give it the ending of what it holds."
        )
    try:
        if path.exists() and not path.is_file():  # a pipe or a device: reading that may never end
            raise ConfigError(f"{path}: is no file of rows. Name one, with its folder.")
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Check its name and permissions."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8."
        ) from None
    rows, problems = [], []
    for location, record in islice(READERS[path.suffix](content), max_rows):
        try:
            rows.append(parse(record))
        except ValueError as error:
            problems.append(f"{path}, {location}: {error}")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS - 1] += f" ({len(problems)} rows are wrong, these are the first)"
    if problems or not rows:
        raise ConfigError(
            "\n".join(problems[:MAX_PROBLEMS]) or f"{path}: holds no rows. Write at least one."
        )
    return rows


def _text(record: Any) -> str:
    if isinstance(record, ValueError):
        raise record
    text = record
    if isinstance(record, list | dict):
        text = record.get("text") if isinstance(record, dict) else record[0] if record else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError("there is no text. A row is a text and a label.")
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(
            f"the text holds half a character ({half[0]!a}). Escape both of its halves, or write it plainly."
        )
    return text.strip()


def _class_id(record: Any, label_names: list[str]) -> int:
    label = (
        record.get("label") if isinstance(record, dict) else record[1] if len(record) == 2 else None
    )
    # or null, a list, a section
    if isinstance(record, str) or not isinstance(label, str | int | float):
        raise ValueError("there is no label. A row is a text and a label.")
    name = str(label).strip()
    if name in label_names:
        return label_names.index(name)
    if not name.isdecimal() or int(name) >= len(label_names):
        names = one_line(", ".join(label_names))
        numbers = f"0 to {len(label_names) - 1}"
        raise ValueError(
            f"label {one_line(label)} is none of data.label_names: {names}, {numbers}. Add it there."
        )
    return int(name)


Records = Iterator[tuple[str, Any]]
"""Pairs of a position, such as "line 3", and a record. A ValueError takes the place of a record that is unreadable."""


def _read_json(content: str) -> Records:
    """Decode the rows one by one, because json.loads() would not report line numbers of rows."""
    decoder, gap = json.JSONDecoder(), re.compile(r"[\s,]*")
    opening = re.match(r"\s*\[", content)
    if opening is None:
        yield "line 1", ValueError("there is no list of rows: [[text, label], …].")
        return
    line, start, number = 1 + opening[0].count("\n"), opening.end(), 1
    while True:
        between: Any = gap.match(content, start)  # never None: it matches nothing too
        line, start = line + between[0].count("\n"), between.end()
        if content[start : start + 1] == "]":
            if rest := content[start + 1 :].strip():
                yield (
                    f"line {line}",
                    ValueError(f"there is more after the end of the list: {one_line(rest[:20])}"),
                )
            return
        location = f"line {line}, row {number}"
        try:
            record, end = decoder.raw_decode(content, start)
        except (ValueError, RecursionError) as error:
            yield location, _refusal(error)  # where the next row begins cannot be told
            return
        yield location, record
        line, start, number = line + content.count("\n", start, end), end, number + 1


def _read_json_lines(content: str) -> Records:
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = _refusal(error)
            yield f"line {number}", record


def _refusal(error: Exception) -> ValueError:
    return ValueError(
        f"{error.msg}."
        if isinstance(error, json.JSONDecodeError)
        else f"not JSON to read ({error})."
    )


def _read_table(content: str, delimiter: str) -> Records:
    reader = csv.reader(StringIO(content), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        location = f"line {reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield location, ValueError(str(error))
            return
        names = [cell.strip().lower() for cell in cells]
        if not header and {"text", "label"} & set(names) and location == "line 1":
            header = names
        elif header and len(cells) > len(header):
            yield (
                location,
                ValueError(
                    f"{len(cells)} cells, the header has {len(header)}. Put quotes around a text."
                ),
            )
        elif any(names):
            yield location, dict(zip(header, cells, strict=False)) if header else cells


def _read_lines(content: str) -> Records:
    return (
        (f"line {number}", line)
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    )


READERS: dict[str, Callable[[str], Records]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".csv": lambda content: _read_table(content, ","),
    ".tsv": lambda content: _read_table(content, "\t"),
    ".txt": _read_lines,
}

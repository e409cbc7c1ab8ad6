"""Writes docs/reference/keys.md from the config's dataclasses (types, rules, defaults) and config.yaml's comments.

`make docs` runs this file, and a test compares the page with its output.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
PAGE = ROOT / "docs" / "reference" / "keys.md"
HEAD = """# Every key of config.yaml

A key is set in `config.yaml`, or for one run on the command line: `python run.py training.epochs=3`. The sections
`data` and `model` are yours: their keys are the fields of `DataConfig` in dataset.py and `ModelConfig` in model.py.

`tools/reference.py` writes this page from the config's own types, so that it cannot age.
"""


def page() -> str:
    sys.path.insert(0, str(PROJECT))
    from pydantic import TypeAdapter

    config = import_module("template_package.config")
    schema, defaults = (
        TypeAdapter(config.Config).json_schema(),
        import_module("template_package.core.config").values_of({}, config.Config),
    )
    files = import_module("template_package.optional_files").available_files
    schema["properties"]["strategy"] = {"enum": files("strategies")}
    schema["$defs"]["LoggingConfig"]["properties"]["tracker"]["items"] = {
        "enum": ["none", *files("tracking")]
    }
    notes, parts, top = comments(), [HEAD], [["key", "default", "values", "meaning"]]
    names = [note.partition(".")[0] for note in notes]  # in the order of config.yaml
    for name, entry in sorted(schema["properties"].items(), key=lambda it: names.index(it[0])):
        reference = entry.get("$ref", "").rpartition("/")[2]
        if not reference:
            top.append(
                [
                    f"`{name}`",
                    f"`{text(defaults[name])}`",
                    values(entry) or "see right",
                    notes[name],
                ]
            )
        elif name not in ("data", "model"):
            rows = [["key", "default", "values", "meaning"]]
            section = schema["$defs"][reference]["properties"]
            for dotted in [note for note in notes if note.startswith(f"{name}.")]:
                key = dotted.removeprefix(f"{name}.")
                rows.append(
                    [
                        f"`{dotted}`",
                        f"`{text(defaults[dotted])}`",
                        values(section[key]),
                        notes[dotted],
                    ]
                )
            about = f"{notes[name][:1].upper()}{notes[name][1:]}.\n\n" if name in notes else ""
            parts.append(f"## {name}\n\n{about}{table(rows)}")
    parts.insert(1, f"## The run\n\n{table(top)}")
    return "\n".join(parts)


def comments() -> dict[str, str]:
    """Return {dotted key: its comment in config.yaml}."""
    notes, section = dict[str, str](), ""
    for line in (PROJECT / "config.yaml").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"( *)(\w+):.*?(?: # (.*))?$", line):
            indent, key, note = match.groups()
            section = section if indent else key
            dotted = f"{section}.{key}" if indent else key
            notes |= (
                {dotted: (note or "").replace("|", "\\|").replace("<", "&lt;")}
                if indent or note
                else {}
            )
    return notes


def values(entry: dict[str, Any]) -> str:
    """Describe in words the values that a key's JSON schema allows."""
    if "anyOf" in entry:
        return ", ".join(filter(None, map(values, entry["anyOf"])))
    if "enum" in entry or "const" in entry:
        return ", ".join(f"`{value}`" for value in entry.get("enum", [entry.get("const")]))
    low = f" from {entry['minimum']:g}" if "minimum" in entry else ""
    low = f" above {entry['exclusiveMinimum']:g}" if "exclusiveMinimum" in entry else low
    low = " from 1" if entry.get("type") == "integer" and low == " above 0" else low
    high = f" to {entry['maximum']:,}" if entry.get("maximum", 2**60) < 2**60 else ""
    high = (
        f" below {entry['exclusiveMaximum']:g}"
        if entry.get("exclusiveMaximum", 2**32) < 2**32
        else high
    )
    words = {
        "boolean": "`true`, `false`",
        "null": "`null`",
        "string": "text",
        "number": "number",
        "object": "keys",
    }
    if entry.get("type") == "array":
        return f"list of {values(entry['items'])}"
    kind = str(entry.get("type", ""))
    return words.get(kind, kind) + low + high


def text(value: object) -> str:
    """Return the value as config.yaml would write it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return f"[{', '.join(map(text, value))}]" if isinstance(value, list) else str(value)


def table(rows: list[list[str]]) -> str:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others, ""])


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")

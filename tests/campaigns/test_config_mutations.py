"""Tests of broken config files and command lines: each is refused in one to three lines, trains, or meets a NaN."""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from baking import PROJECT, ROOT

from .conftest import Report, Tries

SMALL = ["training.max_steps=2", "evaluation.every_epochs=null", "checkpoint.every_epochs=null"]
VALUES = [
    *"nan inf -inf -1 0 1 2 1.5 1e400 10000000000000000000000 true false null '' yes auto cpu [] [1,2]".split(),
    *"/ [1,[2,[3]]] {a:1} {} text é 日本 .. ${seed} ${oc.env:HOME} &a[*a] *b 2024-01-01 0x10 1_000 ~ | - % @".split(),
    *[
        "a b",
        "!!python/object/apply:os.system [exit]",
        "!!binary aGk=",
        "'\\x00'",
        "[1, 2]",
        "{a: 1}",
        "&a [*a]",
    ],
    *"9223372036854775807 -9223372036854775808 1000000000000 1e-9".split(),
    *"best loss [10,5] [0.5,0.2] [-1] fp16 bf16 sgd adam constant linear step".split(),
    *"1 2 3 4 0.1 0.5 1e-3 true false null auto".split() * 8,  # some of these are right, somewhere
]
# the last one can be read
ENCODINGS = [
    "utf-16",
    "utf-16-le",
    "utf-32",
    "latin-1",
    "cp037",
    "gb18030",
    "utf-8-sig",
]
# Not changed: what would only make a run long, large or wait for other machines.
SPARED = (
    "launch.master_addr",
    "training.compile",
    "logging.profile_steps",
    "launch.timeout_minutes",
)


@pytest.mark.timeout(3600)
def test_mutated_config_is_refused_in_words_or_trains(
    make_project: Callable[[Path | None], Any],
    is_long: bool,
    report: Report,
    tmp_path: Path,
) -> None:
    # the image example's, which check their values; the tests' own do not
    for name in (
        "model.py",
        "dataset.py",
    ):
        shutil.copy(ROOT / PROJECT / "template_package" / name, tmp_path)
    project, choose = make_project(tmp_path), random.Random(seed := 3)
    original = (project.folder / "config.yaml").read_text(encoding="utf-8")
    keys = [key for key in dotted(yaml.safe_load(defaults())) if key not in SPARED]
    names = {name for key in [*keys, *SPARED] for name in key.split(".")}
    num_cases, codes, rules, tries = (
        (1_000 if is_long else 120),
        Counter[int](),
        Counter[str](),
        Tries(),
    )
    for number in range(num_cases):
        words = mutate(project.folder / "config.yaml", original, keys, choose)
        words = [*words, *SMALL] if words[:1] != ["--"] else words[1:]
        code, printed = project.session.run(project.folder, "run", [f"name=run{number}", *words])
        codes[code] += 1
        lines = printed.strip().splitlines()
        if code == 2:
            rules[rule_of(lines[-1], names)] += 1
        with tries.one(f"{words}: exit code {code}\n{printed[-2000:]}"):
            if code == 0:
                assert project.json(f"run{number}", "summary.json")["status"] == "complete"
            elif code == 1:  # a learning rate of 2**63 - 1, say
                assert (
                    "is not finite. Look for a NaN in the samples or a mean over nothing, lower "
                    in lines[-1]
                )
            else:
                assert code == 2
                assert 1 <= len(lines) <= 3
                assert "Traceback" not in printed
    report(
        "config file or command line mutated",
        tries,
        f"## {num_cases} mutated configs\n\nTrained: {codes[0]}. Ended, with one line, by a loss that is not finite: "
        f"{codes[1]}. Refused in one to three lines: {codes[2]}. "
        f"{len(rules)} rules refused them. The most frequent:\n\n"
        + "\n".join(f"- {n} x {rule}" for rule, n in rules.most_common(10)),
        seed=seed,
    )
    assert codes[0] >= num_cases // 20
    assert len(rules) >= 15


def defaults() -> str:
    text = (ROOT / PROJECT / "config.yaml").read_text(encoding="utf-8")
    return re.sub(r"\{[{%].*?[%}]\}", "x", text)


def dotted(content: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of all values except the run's name."""
    keys = []
    for key, value in content.items():
        if f"{prefix}{key}" != "name":
            keys += (
                dotted(value, f"{prefix}{key}.")
                if isinstance(value, dict) and value
                else [f"{prefix}{key}"]
            )
    return keys


def mutate(path: Path, original: str, keys: list[str], choose: random.Random) -> list[str]:
    """Make one random change, often a mistake, in the config file or the command line. Return the command's arguments.

    A first argument "--" means that the caller removes it and does not add the arguments SMALL.
    """
    path.write_text(original, encoding="utf-8")
    key, value = choose.choice(keys), choose.choice(VALUES)
    section, _, name = key.rpartition(".")
    match choose.randrange(8):
        case 0 | 1 | 2:
            return [f"{key}={value}"]
        case 3:  # a word that is no key=value
            return [
                "--",
                choose.choice(
                    [
                        f"--{key} {value}",
                        f"--{key}={value}",
                        key,
                        f"={value}",
                        f"{key}.x={value}",
                        "",
                    ]
                ),
            ]
        case 4:  # an unknown key
            return ["--", f"{key[:-1]}={value}"]
        case 5:
            line = f"{name}: {value}"
            path.write_text(
                f"{original}\n{section}:\n  {line}\n" if section else f"{original}\n{line}\n",
                encoding="utf-8",
            )
        case 6:
            content = yaml.safe_load(original)
            content.setdefault(section, {})[name] = [[[[[value]]]]] if section else value
            path.write_text(yaml.safe_dump(content), encoding="utf-8")
        case _ if choose.random() < 0.25:  # the whole file
            path.write_bytes(f"{original}# é\n".encode(choose.choice(ENCODINGS)))
        case _:
            data = bytearray(original.encode())
            for _ in range(choose.randint(1, 3)):
                data[choose.randrange(len(data))] = choose.choice(b"\x00\xff:{}[]\t &*!%@`'\"#-\n")
            path.write_bytes(bytes(data))
    return []


def rule_of(line: str, names: set[str]) -> str:
    """Return an error message's rule without keys, sections, values and remedy, so that each rule has one text."""
    if (unreadable := "cannot be read") in line:
        return unreadable
    rule = re.sub(r"(?<=\w)=\S+|(?<=byte )\d+", "…", line.partition(". ")[0].rpartition(": ")[2])
    return re.sub(rf"\b({'|'.join(names)}|the config)\b", "…", rule)

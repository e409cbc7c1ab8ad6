"""Makes the rendered folder the project that was asked for, and lets it prove that it trains.

The shape first, the same bytes for the same answers (cruft relies on it): the chosen example, license, tracker and
devices go in place, what was not chosen goes away, `template_package` takes its name. Then the smoke test, which is
left to template_only/first_smoke_test.py of the rendered folder, because a hook cannot import its neighbours. The
project is kept whatever comes of it, unless DDP_TEMPLATE_STRICT=1. Runs on Python 3.10, without any library; the only
Jinja is the line RAW.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

EXTRA_STRATEGIES = ("accelerate", "deepspeed", "horovod")
"""Each is a file in strategies/, tests, an extra of pyproject.toml; some have a section in config.yaml or a script."""
RAW = r"""{{ cookiecutter | tojson }}"""
# {% raw %}


def main() -> int:
    answers, project = json.loads(RAW), Path.cwd()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(project / "template_only"))
    import first_smoke_test  # before shape_project removes it

    shape_project(project, answers)
    if Path(__file__).is_relative_to(tempfile.gettempdir()):
        Path(__file__).unlink()  # the rendered copy of this file, which cookiecutter leaves behind
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if "_output_dir" not in answers:  # cruft runs the hooks at every update too; its stdout may hold a patch
        print("smoke test: SKIPPED (under cruft; `python run.py smoke` runs it)", file=sys.stderr)
        return 0
    state = first_smoke_test.run_first_test(project, answers["smoke_test"])
    if state != "INTERRUPTED":
        print(next_steps(project, answers, state), flush=True)
    return int(state not in {"PASSED", "SKIPPED"} and os.environ.get("DDP_TEMPLATE_STRICT") == "1")


def shape_project(project: Path, answers: Mapping[str, str]) -> None:
    """Leaves the chosen files with the chosen values, under the chosen package name."""
    config, pyproject = project / "config.yaml", project / "pyproject.toml"
    text = place_example(project, answers["example"], config.read_text(encoding="utf-8"))
    text = set_value(text, "device_ids", as_yaml(answers["device_ids"]))
    text = set_value(text, "logging.tracker", answers["tracker"])
    for name in EXTRA_STRATEGIES:
        if answers["extra_strategies"] not in (name, "all"):
            for path in ("template_package/strategies/{}.py", "tests/test_{}.py", "scripts/install_{}.sh"):
                (project / path.format(name)).unlink(missing_ok=True)
            if name == "deepspeed":
                shutil.rmtree(project / "template_package" / "strategies" / "zero")
            text = re.sub(block_pattern(name), "", text, flags=re.MULTILINE)
    config.write_text(text, encoding="utf-8", newline="\n")

    text = keep_chosen_lines(pyproject.read_text(encoding="utf-8"), answers)
    text = text.replace('license = "none"\n', "").replace('authors = [{ name = "" }]\n', "")
    text = text.replace('["template_package', f'["{answers["package_name"]}')  # no answer has a bare quote in TOML
    pyproject.write_text(text, encoding="utf-8", newline="\n")

    if answers["license"] != "none":
        (project / "template_only" / "licenses" / answers["license"]).rename(project / "LICENSE")
    shutil.rmtree(project / "template_only")
    for pattern in ("__pycache__", ".*_cache"):  # what tools have left in a local copy of the template
        for folder in list(project.rglob(pattern)):
            shutil.rmtree(folder, ignore_errors=True)
    rename_package(project, answers["package_name"])


def place_example(project: Path, example: str, config: str) -> str:
    """The config text for the example, whose code goes to the package and tests/, and whose data to the top folder."""
    folder = project / "examples" / example
    changes = ""
    if folder.is_dir():
        changes = (folder / "config.yaml").read_text(encoding="utf-8")
        (folder / "config.yaml").unlink()
        for source in filter(Path.is_file, folder.iterdir()):
            code = "tests" if source.name.startswith("test_") else "template_package"
            source.replace(project / (code if source.suffix == ".py" else ".") / source.name)
    shutil.rmtree(project / "examples")
    for block in re.findall(block_pattern(r"\w+"), changes, re.MULTILINE):
        section = block.partition(":")[0]
        if section in {"data", "model"}:
            old = re.search(block_pattern(section), config, re.MULTILINE)
            assert old, f"config.yaml has no {section}"
            config = config[: old.start()] + block + config[old.end() :]
        else:
            for name, value in re.findall(r"^ +(\w+): *(.*?)(?: +#.*)?$", block, re.MULTILINE):
                config = set_value(config, f"{section}.{name}", value)
    return config


def block_pattern(section: str) -> str:
    """Matches a top-level key of a YAML text and the indented lines below it, not the comment above the next key."""
    return rf"^{section}:.*\n(?: +.*\n|\n(?= ))*"


def set_value(config: str, key: str, value: str) -> str:
    """The config text with one value changed; the comment behind it keeps its column where the value leaves room."""
    section, _, name = key.rpartition(".")
    block = re.search(block_pattern(section) if section else r"\A[\s\S]*", config, re.MULTILINE)
    assert block, f"config.yaml has no {section}"
    indent = "  " if section else ""
    line = re.compile(rf"^{indent}{name}: (.*?)( +#.*)?$", re.MULTILINE).search(config, *block.span())
    assert line, f"config.yaml has no {key}"
    comment = (line[2] or "").lstrip()
    if comment:
        value = f"{value.ljust(line.end() - line.start(1) - len(comment) - 1)} {comment}"
    return config[: line.start(1)] + value + config[line.end() :]


def as_yaml(device_ids: str) -> str:
    """`0,2` as `[0, 2]`; words such as cpu and auto:2 stay words."""
    entries = [entry.strip() for entry in device_ids.strip().strip("[]").split(",")]
    entries = [str(int(entry)) if entry.isdigit() else entry for entry in entries]
    return entries[0] if len(entries) == 1 and not entries[0].isdigit() else f"[{', '.join(entries)}]"


def keep_chosen_lines(text: str, answers: Mapping[str, str]) -> str:
    """The text without the lines that end in `# only with QUESTION=ANSWER` where another answer was given."""
    kept = []
    for line in text.splitlines():
        condition = re.search(r"\s*# only with (example|tracker|extra_strategies)=(\w+)$", line)
        if condition is None or answers[condition[1]] in (condition[2], "all"):
            kept.append(line[: condition.start()] if condition else line)
    return "\n".join(kept) + "\n"


def rename_package(project: Path, name: str) -> None:
    """Gives the folder `template_package` its name, and every mention of it in code, which holds no answer's words."""
    (project / "template_package").rename(project / name)
    for path in project.rglob("*"):
        if path.suffix in {".py", ".sh"} and path.is_file():
            path.write_bytes(path.read_bytes().replace(b"template_package", name.encode()))


def next_steps(project: Path, answers: Mapping[str, str], state: str) -> str:
    """What to type now, in the order that works after this result."""
    steps = [(f"cd {shlex.quote(str(project))}", "")]
    if answers["smoke_test"] == "venv" and state in {"PASSED", "FAILED"}:
        steps += [(". .venv/bin/activate", "")]
    elif state in {"NOT RUN", "SKIPPED"}:
        steps += [
            ("python3 -m venv .venv && . .venv/bin/activate", "or activate an environment of your own"),
            ("python -m pip install -c constraints.txt -e .", "what the project needs"),
        ]
    if state != "PASSED":
        steps += [("python run.py smoke", "the test: two CPU ranks train, save, resume and evaluate")]
    if state != "FAILED":
        steps += [
            ("python run.py", "trains on the devices that config.yaml names"),
            ("git init -b main && git add -A && git commit -m Start", "before your first change"),
        ]
    lines = [f"  {command:<56}{'# ' + reason if reason else ''}".rstrip() for command, reason in steps]
    package = answers["package_name"]
    yours = f"Yours to write: {package}/model.py and {package}/dataset.py; README.md says how."
    return "\n".join(["", "Next:", *lines, yours])


if __name__ == "__main__":
    sys.exit(main())
# {% endraw %}

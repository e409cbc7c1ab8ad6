"""Turns the rendered folder into the project that was asked for, then runs the project's smoke test.

First the hook puts the chosen size, example, license, tracker and devices in place, removes the files that were not
chosen, and renames `template_package`. The same answers always give the same bytes; cruft relies on that. Then
template_only/first_smoke_test.py of the rendered folder runs the smoke test. The project is kept whatever the result,
unless DDP_TEMPLATE_STRICT=1. The hook runs on Python 3.10 without any library. Its only Jinja is the line RAW.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

RAW = r"""{{ cookiecutter | tojson }}"""
# {% raw %}

LIBRARY_ENVIRONMENT = "template_package/strategies/library_environment.py"
ONLY_WITH = {
    "extra_strategies": {
        "accelerate": ["template_package/strategies/accelerate.py", LIBRARY_ENVIRONMENT],
        "deepspeed": [
            "template_package/strategies/deepspeed.py",
            "template_package/options_deepspeed.py",
            "template_package/strategies/zero",
            LIBRARY_ENVIRONMENT,
            "config.yaml:deepspeed",
        ],
        "horovod": [
            "template_package/strategies/horovod.py",
            "template_package/horovodrun.py",
            "scripts/install_horovod.sh",
            LIBRARY_ENVIRONMENT,
        ],
    },
    "furniture": {
        "all": [
            ".devcontainer",
            ".dockerignore",
            ".github",
            ".pre-commit-config.yaml",
            ".vscode",
            "AGENTS.md",
            "CITATION.cff",
            "Dockerfile",
        ],
    },
    "tracker": {
        "tensorboard": ["template_package/tracking/tensorboard.py"],
        "wandb": ["template_package/tracking/wandb.py"],
        "mlflow": ["template_package/tracking/mlflow.py"],
        "trackio": ["template_package/tracking/trackio.py"],
    },
}
"""{question: {answer: paths}}. A project holds these files, folders and sections of config.yaml only with that answer.

The answer `all` stands for every answer to its question.
"""
NEVER = ("examples", "small", "template_only")
"""Folders of the template that no project holds, after their files have been used."""
SMALL_KEEPS = {
    "scripts": ["multi_node.sh", "torchrun.sh", "update_from_template.sh"],
    "template_package": [
        "__init__.py",
        "commands/__init__.py",
        "commands/evaluate.py",
        "commands/predict.py",
        "commands/smoke.py",
        "core/*.py",
        "dataset.py",
        "errors.py",
        "files.py",
        "lab.py",  # a fork may have one
        "model.py",
        "policy.py",  # of a lab's fork
        "tracking/*.py",
    ],
    "tests": ["test_dataset.py", "test_model.py", "workload/dataset.py", "workload/model.py"],
}
"""{folder: patterns of the files that both sizes have}. The folder small/ holds the other files of size=small."""
EXTRAS = {
    "doctor": ["commands/doctor/*"],
    "export": ["commands/export.py"],
    "report": ["commands/report/*"],
    "sweep": ["commands/sweep/*", "commands/common.py"],
}
"""{command: patterns of its files in the package}. With size=small a project has those that `_extras` names."""
NOT_IN_SMALL = {"test_sentences.py"}
"""Files of an example, and keys that it sets, which a project of size=small does not have."""


def main() -> int:
    answers, project = json.loads(RAW), Path.cwd()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(project / "template_only"))
    import first_smoke_test  # before shape_project removes it

    shape_project(project, answers)
    if Path(__file__).is_relative_to(tempfile.gettempdir()):
        Path(__file__).unlink()  # the rendered copy of this file, which cookiecutter leaves behind
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # cruft runs the hooks at every update too; its stdout may hold a patch
    if "_output_dir" not in answers:
        print("smoke test: SKIPPED (under cruft; `python run.py smoke` runs it)", file=sys.stderr)
        return 0
    write_origin(project, answers)
    state = first_smoke_test.run_first_test(project, answers["smoke_test"])
    if state != "INTERRUPTED":
        print(next_steps(project, answers, state), flush=True)
    return int(state not in {"PASSED", "SKIPPED"} and os.environ.get("DDP_TEMPLATE_STRICT") == "1")


def shape_project(project: Path, answers: Mapping[str, str]) -> None:
    """Keep only the chosen files, set the chosen values, and rename the package."""
    extras = extras_of(answers)
    answers = {**answers, "_extras": ",".join(extras)}
    config, pyproject = project / "config.yaml", project / "pyproject.toml"
    for path in (*paths_not_chosen(answers), "tests/machinery"):
        if path.startswith("config.yaml:"):
            text = remove_section(
                config.read_text(encoding="utf-8"), path.removeprefix("config.yaml:")
            )
            config.write_text(text, encoding="utf-8", newline="\n")
        elif (project / path).is_dir():
            shutil.rmtree(project / path)
        else:
            (project / path).unlink()
    if answers["size"] == "small":
        take_small_files(project, extras)
    text = config.read_text(encoding="utf-8")
    text = install_example(
        project, answers["example"], text, NOT_IN_SMALL if answers["size"] == "small" else ()
    )
    text = set_value(text, "device_ids", device_ids_as_yaml(answers["device_ids"]))
    text = set_value(text, "logging.tracker", answers["tracker"])
    config.write_text(text, encoding="utf-8", newline="\n")
    if answers["license"] != "none":
        (project / "template_only" / "licenses" / answers["license"]).rename(project / "LICENSE")
    for folder in filter(Path.is_dir, (project / name for name in NEVER)):
        shutil.rmtree(folder)

    for pattern in ("__pycache__", ".*_cache"):  # left by tools in a local copy of the template
        for folder in list(project.rglob(pattern)):
            shutil.rmtree(folder, ignore_errors=True)
    apply_conditions(project, answers)

    text = pyproject.read_text(encoding="utf-8")
    text = text.replace('license = "none"\n', "").replace('authors = [{ name = "" }]\n', "")
    # no answer has a bare quote in TOML
    text = text.replace('["template_package', f'["{answers["package_name"]}')
    pyproject.write_text(text, encoding="utf-8", newline="\n")
    rename_package(project, answers["package_name"])


def paths_not_chosen(answers: Mapping[str, str]) -> list[str]:
    """Return the paths in ONLY_WITH that no answer asks for."""
    all_paths, chosen = set[str](), set[str]()
    for question, paths_of_answer in ONLY_WITH.items():
        for answer, paths in paths_of_answer.items():
            all_paths.update(paths)
            if answers[question] in (answer, "all"):
                chosen.update(paths)
    return sorted(all_paths - chosen)


def extras_of(answers: Mapping[str, str]) -> list[str]:
    """Return the commands besides those of the core that the project has."""
    if answers["size"] == "full":
        return [*EXTRAS]
    chosen = set(filter(None, answers.get("_extras", "").split(",")))
    if "sweep" in chosen:  # it reads runs as report does
        chosen.add("report")
    return sorted(chosen)


def take_small_files(project: Path, extras: Collection[str] = ()) -> None:
    """Remove the files that only size=full has, and move those of small/ to their places."""
    keeps = {folder: [*patterns] for folder, patterns in SMALL_KEEPS.items()}
    for name in extras:
        keeps["template_package"] += EXTRAS[name]
        keeps["tests"].append(f"test_command_{name}.py")
    for folder, patterns in keeps.items():
        kept = {path for pattern in patterns for path in (project / folder).glob(pattern)}
        # files before the folders that hold them
        for path in sorted((project / folder).rglob("*"), reverse=True):
            if path.is_file() and path not in kept:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    small = project / "small"
    for source in filter(Path.is_file, list(small.rglob("*"))):
        target = project / source.relative_to(small)
        if target.parent.name.startswith(".") and not target.parent.exists():
            continue  # furniture that was not chosen
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def install_example(
    project: Path, example: str, config: str, left_out: Collection[str] = ()
) -> str:
    """Move the example's code to the package and tests/, and its data to the top folder. Return the changed config.

    The files of the first example, `image`, are in place. left_out: files and keys to skip.
    """
    folder = project / "examples" / example
    (folder / "README.txt").unlink()  # README.md has taken its sentences
    if not (folder / "config.yaml").is_file():
        return config
    changes = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").unlink()
    for source in filter(Path.is_file, folder.iterdir()):
        if source.name in left_out:
            source.unlink()
            continue
        code = "tests" if source.name.startswith("test_") else "template_package"
        source.replace(project / (code if source.suffix == ".py" else ".") / source.name)
    for block in re.findall(section_pattern(r"\w+"), changes, re.MULTILINE):
        section = block.partition(":")[0]
        if section in {"data", "model"}:
            old = re.search(section_pattern(section), config, re.MULTILINE)
            assert old, f"config.yaml has no {section}"
            config = config[: old.start()] + block + config[old.end() :]
        else:
            for name, value in re.findall(r"^ +(\w+): *(.*?)(?: +#.*)?$", block, re.MULTILINE):
                if f"{section}.{name}" not in left_out:
                    config = set_value(config, f"{section}.{name}", value)
    return config


def section_pattern(section: str) -> str:
    """Return a pattern that matches a top-level YAML key and its indented lines, not the comment above the next key."""
    return rf"^{section}:.*\n(?: +.*\n|\n(?= ))*"


def remove_section(config: str, section: str) -> str:
    """Return the config text without a section and without the blank line between it and its neighbour."""
    shorter, number = re.subn(section_pattern(section) + r"\n?", "", config, flags=re.MULTILINE)
    assert number == 1, f"config.yaml has no {section}"
    return shorter.rstrip("\n") + "\n"


def set_value(config: str, key: str, value: str) -> str:
    """Return the config text with one value changed. The comment after the value keeps its column if there is room."""
    section, _, name = key.rpartition(".")
    block = re.search(section_pattern(section) if section else r"\A[\s\S]*", config, re.MULTILINE)
    assert block, f"config.yaml has no {section}"
    indent = "  " if section else ""
    line = re.compile(rf"^{indent}{name}: (.*?)( +#.*)?$", re.MULTILINE).search(
        config, *block.span()
    )
    assert line, f"config.yaml has no {key}"
    comment = (line[2] or "").lstrip()
    if comment:
        value = f"{value.ljust(line.end() - line.start(1) - len(comment) - 1)} {comment}"
    return config[: line.start(1)] + value + config[line.end() :]


def device_ids_as_yaml(device_ids: str) -> str:
    """Convert the answer to YAML: `0,2` becomes `[0, 2]`. A single word, such as cpu or auto:2, is not changed."""
    entries = [entry.strip() for entry in device_ids.strip().strip("[]").split(",")]
    entries = [str(int(entry)) if entry.isdigit() else entry for entry in entries]
    return (
        entries[0] if len(entries) == 1 and not entries[0].isdigit() else f"[{', '.join(entries)}]"
    )


def apply_conditions(project: Path, answers: Mapping[str, str]) -> None:
    """Apply `# only with QUESTION=ANSWER` in all files of the project that hold it.

    A file with a line that holds nothing else is removed with another answer; so are the lines that end in it.
    """
    for path in filter(Path.is_file, list(project.rglob("*"))):
        # cookiecutter may fill a folder that holds a repository
        if ".git" in path.relative_to(project).parts or b"# only with " not in path.read_bytes():
            continue
        try:
            text = keep_chosen_lines(path.read_bytes().decode(), answers)
        except ValueError as problem:  # text that is not UTF-8, too
            sys.exit(f"error: {path.relative_to(project)} of the template: {problem}")
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text.encode())


def keep_chosen_lines(text: str, answers: Mapping[str, str]) -> str | None:
    """Return the text without the lines whose answer was not given, or None if the whole file belongs to one."""
    kept = []
    for line in text.split("\n"):
        before, mark, condition = line.partition("# only with ")
        question, _, answer = condition.partition("=")
        if mark and (question not in answers or not re.fullmatch(r"[\w.-]+", answer)):
            raise ValueError(
                f"{line.strip()!r} must end in `# only with QUESTION=ANSWER`, with a question of cookiecutter.json"
            )
        is_chosen = not mark or bool({answer, "all"} & {*answers[question].split(",")})
        if mark and not before.strip():
            if not is_chosen:
                return None
        elif is_chosen:
            kept.append(before.rstrip() if mark else line)
    return "\n".join(kept)


def rename_package(project: Path, name: str) -> None:
    """Rename `template_package`: the folder, and every mention in code files, which hold no text of the answers."""
    (project / "template_package").rename(project / name)
    for path in project.rglob("*"):
        if path.suffix in {".py", ".sh"} and path.is_file():
            path.write_bytes(path.read_bytes().replace(b"template_package", name.encode()))


def write_origin(project: Path, answers: Mapping[str, str]) -> None:
    """Write .template.json, from which scripts/update_from_template.sh makes the project again. (cruft has its own.)

    The file holds no path of this machine, because projects are published, unless a lab names its template by `_home`
    in cookiecutter.json: a path on a shared disk, or a URL. A commit ending in -dirty had local changes.
    """
    # `.` may have been typed; cookiecutter 2.1 does not tell the folder
    template = Path(os.environ.get("PWD", ""), answers.get("_repo_dir", "")).resolve()
    is_template = "_repo_dir" in answers and (template / "cookiecutter.json").is_file()
    is_clone = is_template and (template / ".git").exists()
    commit = (
        ask_git(template, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        if is_clone
        else None
    )
    url = ask_git(template, "remote", "get-url", "origin") if is_clone else None
    if not re.match(r"(https?|ssh|git)://|[^/]+@[^/]+:", url or ""):
        url = None
    url = url and re.sub(r"^(https?://)[^/]*@", r"\1", url)  # without name and password
    asked = {key: value for key, value in answers.items() if key[0] != "_" and key != "smoke_test"}
    if answers.get("_extras"):
        asked["_extras"] = answers["_extras"]
    origin = {
        "template": answers.get("_home") or url,
        "version": answers["_version"],
        "commit": commit,
        "answers": asked,
    }
    text = json.dumps(origin, indent=2, ensure_ascii=False) + "\n"
    (project / ".template.json").write_text(text, encoding="utf-8", newline="\n")


def ask_git(folder: Path, *words: str) -> str | None:
    """Return git's output, or None if git fails or is not installed."""
    try:
        return subprocess.check_output(
            # reading is safe in a colleague's clone, too
            ["git", "-c", "safe.directory=*", *words],
            cwd=folder,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def next_steps(project: Path, answers: Mapping[str, str], state: str) -> str:
    """Return the commands to type next, which depend on the result of the smoke test."""
    steps = [(f"cd {shlex.quote(str(project))}", "")]
    if answers["smoke_test"] == "venv" and state in {"PASSED", "FAILED"}:
        steps += [(". .venv/bin/activate", "")]
    elif state in {"NOT RUN", "SKIPPED"}:
        steps += [
            (
                "python3 -m venv .venv && . .venv/bin/activate",
                "or activate an environment of your own",
            ),
            ("python -m pip install -c constraints.txt -e .", "installs the dependencies"),
        ]
    if state != "PASSED":
        steps += [("python run.py smoke", "two CPU ranks train, save, resume and evaluate")]
    if state != "FAILED":
        # inside a repository, a second one would hide the project from the first
        is_inside = ask_git(project, "rev-parse", "--is-inside-work-tree") == "true"
        commit = (
            f"git {'add .' if is_inside else 'init -b main && git add -A'} && git commit -m Start"
        )
        steps += [
            ("python run.py", "trains on the devices that config.yaml names"),
            (commit, "before your first change"),
        ]
    lines = [
        f"  {command:<56}{'# ' + reason if reason else ''}".rstrip() for command, reason in steps
    ]
    package = answers["package_name"]
    yours = f"You write {package}/model.py and {package}/dataset.py; README.md explains how."
    return "\n".join(["", "Next:", *lines, yours])


if __name__ == "__main__":
    sys.exit(main())
# {% endraw %}

"""Each answer gives exactly the files it should, whole and finished, and the same bytes each time."""

from __future__ import annotations

import compileall
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pexpect
import pytest
import yaml

from baking import PROJECT, bake, expected_files, files_of, plain_environment

QUESTIONS = json.loads((Path(__file__).parents[1] / "cookiecutter.json").read_text(encoding="utf-8"))
CHOICES = {key: value for key, value in QUESTIONS.items() if isinstance(value, list) and not key.startswith("_")}
SINGLE = [{key: value} for key, values in CHOICES.items() if key != "smoke_test" for value in values]
COMBINED = [
    {"example": "stub", "tracker": "none", "license": "none", "device_ids": "cpu,cpu"},
    {"example": "stub", "tracker": "wandb", "license": "Apache-2.0", "author_name": "Ada", "package_name": "ab"},
    {"example": "image", "tracker": "wandb", "license": "BSD-3-Clause", "package_name": "z" * 40},
    {"example": "text", "extra_strategies": "all", "package_name": "z" * 40},
]
LIBRARY_OF = {"tracker": {"tensorboard": "tensorboard", "wandb": "wandb"}, "example": {"image": "scikit-learn"}}


def named(answers: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in answers.items())


@pytest.mark.parametrize("answers", SINGLE + COMBINED, ids=named)
def test_bake_is_whole_and_finished(template: Path, tmp_path: Path, answers: dict[str, str]) -> None:
    chosen = {key: values[0] for key, values in CHOICES.items()} | {"package_name": "ddp_experiment"} | answers
    project = bake(template, tmp_path, **answers)
    files = files_of(project)
    assert set(files) == expected_files(
        template, chosen["package_name"], chosen["example"], chosen["license"], chosen["extra_strategies"]
    )

    leftovers = re.compile(rb"template_package|template_only|cookiecutter\.\w|\{%|# only with ")
    assert [name for name, content in files.items() if leftovers.search(content)] == []
    assert compileall.compile_dir(project, quiet=2)

    config = yaml.safe_load(files["config.yaml"])
    assert config["logging"]["tracker"] == chosen["tracker"]
    is_classifier = chosen["example"] != "stub"
    assert (config["evaluation"]["metric"], config["evaluation"]["mode"]) == (
        ("accuracy", "max") if is_classifier else ("loss", "min")
    )
    metadata = tomllib.loads(files["pyproject.toml"].decode())["project"]
    assert metadata.get("license", "none") == chosen["license"]
    extras = {"accelerate", "deepspeed", "horovod"} & metadata["optional-dependencies"].keys()
    asked = chosen["extra_strategies"]
    assert extras == (
        {"accelerate", "deepspeed", "horovod"} & set(CHOICES["extra_strategies"])
        if asked == "all"
        else {asked} - {"none"}
    )
    libraries = {requirement.partition(">=")[0] for requirement in metadata["dependencies"]}
    optional = {library for by_answer in LIBRARY_OF.values() for library in by_answer.values()}
    wanted = {by_answer[chosen[key]] for key, by_answer in LIBRARY_OF.items() if chosen[key] in by_answer}
    assert libraries & optional == wanted


def test_top_of_the_default_project(template: Path, tmp_path: Path) -> None:
    """Spelled out once by hand: the rule of expected_files() could be wrong in the same way as the hook."""
    names = {path.name for path in bake(template, tmp_path).iterdir()}
    files = ".gitignore LICENSE README.md config.yaml constraints.txt pyproject.toml run.py"
    assert names == {*files.split(), "ddp_experiment", "scripts", "tests"}


@pytest.mark.parametrize("example", ["stub", "text"])
def test_example_brings_its_own_files_and_config(template: Path, tmp_path: Path, example: str) -> None:
    project = bake(template, tmp_path, example=example)
    source = template / PROJECT / "examples" / example
    for name in ("model.py", "dataset.py"):
        assert (project / "ddp_experiment" / name).read_bytes() == (source / name).read_bytes()
    data = [path.name for path in source.iterdir() if path.suffix not in {".py", ".yaml"}]
    assert data == {"stub": [], "text": ["sentences.json"]}[example]
    assert [(project / name).read_bytes() for name in data] == [(source / name).read_bytes() for name in data]
    changes = yaml.safe_load((source / "config.yaml").read_text(encoding="utf-8"))
    config = yaml.safe_load((project / "config.yaml").read_text(encoding="utf-8"))
    assert config["data"] == changes.pop("data")
    assert config["model"] == changes.pop("model")
    assert "evaluation" in changes
    for section, values in changes.items():
        assert config[section].items() > values.items()


def test_same_answers_give_the_same_bytes(template: Path, tmp_path: Path) -> None:
    answers = {"project_name": "名 😀", "example": "stub", "device_ids": "0,2"}
    first = bake(template, tmp_path / "first", **answers)
    second = bake(template, tmp_path / "a folder 名", **answers)
    assert files_of(first) == files_of(second)


def test_caches_in_the_template_do_not_reach_the_project(template: Path, tmp_path: Path) -> None:
    clean = bake(template, tmp_path / "clean")
    used = Path(shutil.copytree(template, tmp_path / "used"))
    caches = "__pycache__ tests/__pycache__ .mypy_cache/3.11 .ruff_cache template_package/.pytest_cache/v".split()
    for cache in caches:
        (used / PROJECT / cache).mkdir(parents=True)
        (used / PROJECT / cache / "file").write_bytes(b"\xff\xfe {{ not jinja")
    assert files_of(bake(used, tmp_path / "from-used")) == files_of(clean)


@pytest.mark.parametrize("example", ["stub", "text"])
def test_quick_tests_of_the_other_examples_pass(template: Path, tmp_path: Path, example: str) -> None:
    project = bake(template, tmp_path, example=example, package_name="z" * 40)
    own = [path.name for path in (template / PROJECT / "examples" / example).glob("test_*.py")]
    assert len(own) > 1
    files = [f"tests/{name}" for name in (*own, "test_structure.py")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, check=False, cwd=project, env=plain_environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_questions_are_asked_in_words(template: Path, tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "cookiecutter", str(template), "-o", str(tmp_path)],
        env=plain_environment({"TERM": "dumb", "COLUMNS": "200"}),
        encoding="utf-8",
        timeout=30,
    )
    replies = ["My Net", "", "", "", "", "2", "cpu", "", "3", "4", "3"]
    visible = [key for key in QUESTIONS if not key.startswith("_")]
    assert len(replies) == len(visible)
    for key, reply in zip(visible, replies, strict=True):
        prompt = QUESTIONS["__prompts__"][key]
        child.expect_exact(prompt if isinstance(prompt, str) else prompt["__prompt__"])
        child.sendline(reply)
    child.expect_exact("smoke test: SKIPPED")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    config = yaml.safe_load((tmp_path / "my-net" / "config.yaml").read_text(encoding="utf-8"))
    assert (config["device_ids"], config["logging"]["tracker"]) == ("cpu", "none")
    assert not (tmp_path / "my-net" / "LICENSE").exists()


@pytest.mark.parametrize(
    ("package_name", "example"),
    [("ab", "stub"), ("zz_" + 37 * "z", "image"), ("yy_" + 37 * "z", "text")],
    ids=lambda name: name[:2],
)
def test_bake_is_clean_for_ruff_and_mypy(template: Path, tmp_path: Path, package_name: str, example: str) -> None:
    project = bake(template, tmp_path, package_name=package_name, example=example)
    for tool in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy", "--strict"]):
        result = subprocess.run(
            [sys.executable, "-m", *tool, "."],
            check=False,
            cwd=project,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert result.returncode == 0, result.stdout.decode()

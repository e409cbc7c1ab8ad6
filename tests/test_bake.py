"""Tests that each answer gives exactly the right files and settings, and the same bytes each time."""

from __future__ import annotations

import compileall
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pexpect
import pytest
import yaml
from cookiecutter.exceptions import FailedHookException

from baking import (
    CHOICES,
    CONDITION,
    EXAMPLES,
    PROJECT,
    QUESTIONS,
    bake,
    changes_of_example,
    default_answers,
    example_files,
    expected_files,
    files_of,
    plain_environment,
)
from post_gen_project import NOT_IN_SMALL

pytestmark = pytest.mark.fork

SINGLE = [
    {key: value} for key, values in CHOICES.items() if key != "smoke_test" for value in values
]
OTHERS = [
    {"tracker": "none", "license": "none", "device_ids": "cpu,cpu"},
    {"tracker": "wandb", "license": "Apache-2.0", "author_name": "Ada", "package_name": "ab"},
    {"tracker": "none", "extra_strategies": "all", "license": "Apache-2.0"},
    {"tracker": "wandb", "license": "BSD-3-Clause", "package_name": "z" * 40},
    {"furniture": "none", "extra_strategies": "all", "package_name": "z" * 40},
    {"tracker": "none", "furniture": "none", "package_name": "ab", "size": "small"},
]
COMBINED = [
    *({"example": EXAMPLES[i % len(EXAMPLES)], **answers} for i, answers in enumerate(OTHERS)),
    *({"example": example, "size": "small"} for example in EXAMPLES[1:]),
    *({"tracker": tracker, "size": "small"} for tracker in CHOICES["tracker"][1:]),
]


def named(answers: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in answers.items())


@pytest.mark.parametrize("answers", SINGLE + COMBINED, ids=named)
def test_project_holds_exactly_what_was_chosen(
    template: Path, tmp_path: Path, answers: dict[str, str]
) -> None:
    chosen = default_answers() | answers
    chosen["_extras"] = "all" if chosen["size"] == "full" else "none"
    project = bake(template, tmp_path, **answers)
    files = files_of(project)
    assert set(files) == expected_files(template, chosen)

    leftovers = re.compile(
        rb"template_package|template_only|cookiecutter\.(?!json)\w|\{%|# only with "
    )
    page = f"{chosen['package_name']}/commands/report/page.html"  # the project renders it itself, with Jinja too
    assert [
        name for name, content in files.items() if leftovers.search(content) and name != page
    ] == []
    assert compileall.compile_dir(project, quiet=2)

    config = yaml.safe_load(files["config.yaml"])
    assert b"\n\n\n" not in files["config.yaml"]
    assert config["logging"]["tracker"] == chosen["tracker"]
    assert ("deepspeed" in config) == (chosen["extra_strategies"] in {"deepspeed", "all"})
    assert ("benchmark" in config) == (chosen["size"] == "full")
    assert config["evaluation"].items() >= evaluation_of(template, chosen["example"]).items()

    metadata = tomllib.loads(files["pyproject.toml"].decode())["project"]
    assert metadata.get("license", "none") == chosen["license"]
    all_extras = {"accelerate", "deepspeed", "horovod"}
    asked = chosen["extra_strategies"]
    assert all_extras & set(metadata["optional-dependencies"]) == (
        all_extras if asked == "all" else {asked} - {"none"}
    )
    lines = (template / PROJECT / "pyproject.toml").read_bytes()
    for line, question, answer in CONDITION.findall(lines):
        is_wanted = any(
            chosen[key.decode()] in (value.decode(), "all")
            for other, key, value in CONDITION.findall(lines)
            if other == line  # several answers may want the same library
        )
        assert (line.strip() in files["pyproject.toml"]) == is_wanted, (
            f"pyproject.toml, {question.decode()}={answer.decode()}: {line.decode()}"
        )


def evaluation_of(template: Path, example: str) -> dict[str, str]:
    """Return the metric and mode that the example's config.yaml names."""
    evaluation = changes_of_example(template, example).get("evaluation", {})
    assert {"metric", "mode"} <= set(evaluation), (
        f"write evaluation.metric and evaluation.mode into examples/{example}/config.yaml"
    )
    return {key: evaluation[key] for key in ("metric", "mode")}


def test_top_of_the_full_project(template: Path, tmp_path: Path) -> None:
    """List the names by hand, because expected_files() could have the same mistake as the hook."""
    project = bake(template, tmp_path)
    files = ".gitignore .template.json LICENSE README.md config.yaml constraints.txt pyproject.toml run.py"
    furniture = ".devcontainer .dockerignore .github .pre-commit-config.yaml .vscode AGENTS.md CITATION.cff Dockerfile"
    names = {path.name for path in project.iterdir()}
    assert names == {*files.split(), *furniture.split(), "ddp_experiment", "scripts", "tests"}
    without = bake(template, tmp_path / "without", furniture="none")
    assert {path.name for path in without.iterdir()} == names - {*furniture.split()}
    commands = {path.name for path in (project / "ddp_experiment" / "commands").iterdir()}
    assert commands == {
        *"__init__.py common.py evaluate.py export.py predict.py smoke.py benchmark doctor report sweep".split()
    }
    extras = {path.name for path in (project / "ddp_experiment" / "extras").iterdir()}
    assert extras == {"__init__.py", "other_words.py", "other_words.yaml", "stream.py"}
    strategies = {path.name for path in (project / "ddp_experiment" / "strategies").iterdir()}
    assert strategies == {
        "__init__.py",
        "base.py",
        "ddp.py",
        "data_parallel.py",
        "fsdp.py",
    }


def test_small_project_shares_few_files_with_the_full_one(template: Path, tmp_path: Path) -> None:
    """List the shared files by hand, for the same reason. So a new file must be small's own, or be named here.

    Scripts of a fork are free: IN_BOTH_SIZES of baking.py names them.
    """
    full, small = (bake(template, tmp_path / size, size=size) for size in ("full", "small"))
    assert {path.name for path in small.iterdir()} == {path.name for path in full.iterdir()}
    own = {
        name.removeprefix("small/")
        for name in files_of(template / PROJECT)
        if name.startswith("small/")
    }
    package = "__init__.py dataset.py errors.py files.py model.py".split()
    shared = {f"ddp_experiment/{name}" for name in package}
    if (tracker := CHOICES["tracker"][0]) != "none":
        shared.add(f"ddp_experiment/tracking/{tracker}.py")
    shared.add("ddp_experiment/tracking/__init__.py")
    shared |= {f"scripts/{path.name}" for path in (small / "scripts").iterdir()}
    core = (
        "__init__ checkpoint checks config data evaluation global_batch group launch logs optimizer"
    )
    core += " processes random_states ranks settings strategies task"
    shared |= {f"ddp_experiment/core/{name}.py" for name in core.split()}
    commands = "__init__ evaluate predict smoke"
    shared |= {f"ddp_experiment/commands/{name}.py" for name in commands.split()}
    shared |= {f"tests/{name}.py" for name in ("test_dataset", "test_model")}
    shared |= {f"tests/workload/{name}.py" for name in ("dataset", "model")}
    names = {
        name
        for name in files_of(small)
        if name.startswith(("ddp_experiment/", "scripts/", "tests/"))
    }
    assert (
        names
        - {name.replace("template_package", "ddp_experiment") for name in own}
        - {"ddp_experiment/lab.py", "ddp_experiment/policy.py"}  # of a fork
        <= shared
        <= names
    )
    assert {"run.py", "config.yaml", "README.md", "template_package/trainer.py"} <= own


@pytest.mark.parametrize(
    "extras", ["doctor", "export", "report", "sweep", "doctor,export,report,sweep"]
)
def test_small_project_with_commands_of_the_full_one(
    template: Path, tmp_path: Path, extras: str
) -> None:
    small, full = (bake(template, tmp_path / size, size=size) for size in ("small", "full"))
    project = bake(template, tmp_path / "with", size="small", _extras=extras)
    chosen = {*extras.split(","), *(["report"] if "sweep" in extras else [])}
    before, after = files_of(small), files_of(project)
    new = {name for name in after if name not in before}
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed - {"pyproject.toml"} == {".template.json"}
    assert ("pyproject.toml" in changed) == ("report" in chosen)
    assert all(after[name] == files_of(full)[name] for name in new)
    new_commands = [name for name in new if name.startswith("ddp_experiment/commands/")]
    parts = {name.split("/")[2].replace("export.py", "export") for name in new_commands}
    assert parts == chosen | ({"common.py"} if "sweep" in chosen else set())
    assert {name for name in new if not name.startswith("ddp_experiment/commands/")} == {
        f"tests/test_command_{name}.py" for name in chosen
    }


@pytest.mark.slow
def test_commands_alone_pass_their_tests(template: Path, tmp_path: Path, mypy_cache: str) -> None:
    project = bake(template, tmp_path, size="small", _extras="doctor,export,sweep")
    tests = [f"tests/test_command_{name}.py" for name in ("doctor", "export", "report", "sweep")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8", check=False)
    assert run.returncode == 0, run.stdout
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", mypy_cache, "ddp_experiment", "run.py"]
    run = subprocess.run(mypy, cwd=project, capture_output=True, encoding="utf-8", check=False)
    assert run.returncode == 0, run.stdout


def test_new_file_of_the_full_size_is_not_in_a_small_project(
    template: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(template, tmp_path / "template"))
    (changed / PROJECT / "template_package" / "lab.py").touch()  # of a fork, in both sizes
    new = "template_package/new.py template_package/tracking/new/a.py scripts/new.sh tests/test_new.py".split()
    for name in new:
        (changed / PROJECT / name).parent.mkdir(exist_ok=True)
        (changed / PROJECT / name).touch()
    before, after = (
        bake(source, tmp_path / source.name / "out", size="small") for source in (template, changed)
    )
    assert set(files_of(after)) == set(files_of(before)) | {"ddp_experiment/lab.py"}
    full = files_of(bake(changed, tmp_path / "full"))
    assert {name.replace("template_package", "ddp_experiment") for name in new} <= set(full)


def test_keys_that_only_the_full_size_has_are_left_out_of_small_examples(template: Path) -> None:
    config = yaml.safe_load(
        (template / PROJECT / "small" / "config.yaml").read_text(encoding="utf-8")
    )
    examples = [changes_of_example(template, example) for example in EXAMPLES[1:]]
    for section, name in (key.split(".") for key in NOT_IN_SMALL if not key.endswith(".py")):
        assert name not in config[section]
        assert any(name in example.get(section, {}) for example in examples)


def test_wheel_holds_every_file_of_the_package(template: Path, tmp_path: Path) -> None:
    project = bake(template, tmp_path, example=EXAMPLES[-1])
    files = {name for name in files_of(project) if name.startswith("ddp_experiment/")}
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "wheels",
        ".",
    ]
    subprocess.run(build, check=True, cwd=project, capture_output=True)
    (wheel,) = project.glob("wheels/*.whl")
    assert {
        name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ddp_experiment/")
    } == files


@pytest.mark.parametrize("size", ["full", "small"])
@pytest.mark.parametrize("example", EXAMPLES[1:])
def test_example_brings_its_own_files_and_config(
    template: Path, tmp_path: Path, example: str, size: str
) -> None:
    project = bake(template, tmp_path, example=example, size=size)
    source = example_files(template, example)
    assert {"template_package/model.py", "template_package/dataset.py"} <= set(source)
    for name, file in source.items():
        if size == "full" or file.name not in NOT_IN_SMALL:
            brought = (project / name.replace("template_package", "ddp_experiment")).read_bytes()
            assert brought == file.read_bytes().replace(b"template_package", b"ddp_experiment")
    changes = changes_of_example(template, example)
    config = yaml.safe_load((project / "config.yaml").read_text(encoding="utf-8"))
    assert config["data"] == changes.pop("data")
    assert config["model"] == changes.pop("model")
    for section, values in changes.items():
        kept = {
            key: value
            for key, value in values.items()
            if size == "full" or f"{section}.{key}" not in NOT_IN_SMALL
        }
        assert config[section].items() >= kept.items()


def test_conditions_work_in_every_text_file(template: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(template, tmp_path / "template"))
    questions = QUESTIONS | {"of_this_test": ["alpha", "beta"]}
    (changed / "cookiecutter.json").write_text(json.dumps(questions), encoding="utf-8")
    folder = changed / PROJECT
    added = "scripts/slurm.sbatch config.yaml README.md Dockerfile .github/workflows/test.yml run.py".split()
    for name in added:
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(
                "# a line   # only with of_this_test=alpha\n# another # only with of_this_test=beta\n"
            )
    (folder / "scripts" / "of_beta.sh").write_text("#!/bin/sh\n# only with of_this_test=beta\nls\n")
    before = files_of(bake(template, tmp_path / "before"))
    for answer, line in {"alpha": b"# a line\n", "beta": b"# another\n"}.items():
        after = files_of(bake(changed, tmp_path / answer, of_this_test=answer))
        assert (after.pop("scripts/of_beta.sh", None) == b"#!/bin/sh\nls\n") == (answer == "beta")
        assert set(after) == set(before)
        for name in set(after) - {".template.json"}:
            assert after[name] == before[name] + (line if name in added else b""), name


@pytest.mark.parametrize(
    "condition", ["clutser=alpha", "size = full", "size=full or so", "size=full ", "size", ""]
)
def test_condition_that_could_not_be_applied_makes_no_project(
    template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], condition: str
) -> None:
    changed = Path(shutil.copytree(template, tmp_path / "template"))
    with (changed / PROJECT / "scripts" / "torchrun.sh").open("a", encoding="utf-8") as script:
        script.write(f"ls  # only with {condition}\n")
    with pytest.raises(FailedHookException):
        bake(changed, tmp_path / "out")
    assert "error: scripts/torchrun.sh of the template: 'ls  # only with" in capfd.readouterr().err
    assert not [*(tmp_path / "out").iterdir()]


def test_same_answers_give_the_same_bytes(template: Path, tmp_path: Path) -> None:
    answers = {"project_name": "名 😀", "example": EXAMPLES[-1], "device_ids": "0,2"}
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


def test_every_question_is_asked_with_its_prompt(template: Path, tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "cookiecutter", str(template), "-o", str(tmp_path)],
        env=plain_environment({"TERM": "dumb", "COLUMNS": "200"}),
        encoding="utf-8",
        timeout=30,
    )
    typed = {"project_name": "My Net", "device_ids": "cpu"}
    for key in filter(lambda key: key[0] != "_", QUESTIONS):
        prompt = QUESTIONS["__prompts__"][key]
        words = (prompt if isinstance(prompt, str) else prompt["__prompt__"]).split()
        child.expect(r"\s+".join(map(re.escape, words)))  # a long prompt is wrapped
        child.sendline(str(len(CHOICES[key])) if key in CHOICES else typed.get(key, ""))
    child.expect_exact("smoke test: SKIPPED")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    origin = json.loads((tmp_path / "my-net" / ".template.json").read_text(encoding="utf-8"))
    last = {key: values[-1] for key, values in CHOICES.items() if key != "smoke_test"}
    assert origin["answers"].items() >= (last | typed).items()

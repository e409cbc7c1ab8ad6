"""Tests of scripts/update_from_template.sh: a project with its own changes follows new versions and other answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baking import PROJECT, bake, files_of, plain_environment

ANSWERS = {
    "project_name": 'A "quoted" \\ 名 😀',
    "project_slug": "my-net",
    "package_name": "net",
    "description": 'with "quotes" and \\',
    "example": "stub",
    "furniture": "none",
}


def git(folder: Path, *words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=folder, encoding="utf-8")


def commit(folder: Path) -> str:
    """Commit all files of the folder. Return the commit's id."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=state")
    return git(folder, "rev-parse", "HEAD").strip()


def update(project: Path, *words: str) -> tuple[int, str]:
    """Run the script. Return its exit code and output."""
    environment = plain_environment({"PYTHON": sys.executable})
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    script = str(project / "scripts" / "update_from_template.sh")
    result = subprocess.run(
        [script, *words],
        check=False,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return result.returncode, result.stdout


def read_origin(project: Path) -> dict[str, object]:
    return dict(json.loads((project / ".template.json").read_text(encoding="utf-8")))


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


@pytest.mark.parametrize("subfolder", [".", "in a larger repository/nets"])
def test_project_with_its_own_changes_follows_two_versions(
    template: Path, tmp_path: Path, subfolder: str
) -> None:
    repository = Path(shutil.copytree(template, tmp_path / "template"))
    first = commit(repository)
    project = bake(repository, tmp_path / "work" / subfolder, **ANSWERS)
    top = project if subfolder == "." else tmp_path / "work"
    assert read_origin(project) == {
        "template": None,  # a path of this machine
        "version": json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))[
            "_version"
        ],
        "commit": first,
        "answers": read_origin(project)["answers"],
    }
    commit(top)

    # The owner: a model and a file of their own, a line in the machinery, a file less.
    (project / "net" / "model.py").write_text("MINE = True\n", encoding="utf-8")
    (project / "net" / "own.py").write_text("", encoding="utf-8")
    edit(project / "net" / "trainer.py", '"""', '# mine\n"""')
    (project / "scripts" / "slurm.sbatch").unlink()
    code, output = update(project, str(repository))
    assert (code, output) == (
        1,
        "error: there are uncommitted changes. Commit or stash them first.\n",
    )
    commit(top)
    assert update(project) == (
        1,
        "error: where is the template? Type: scripts/update_from_template.sh PATH_OR_URL\n",
    )

    # The template: new files, and a change of a file that the owner has changed, of one that is gone, of the script.
    source = repository / PROJECT
    for name in ("new.py", "other.py"):
        (source / "template_package" / name).write_text(
            'NAME = "template_package"\n', encoding="utf-8"
        )
    for name in (
        "template_package/trainer.py",
        "scripts/slurm.sbatch",
        "scripts/update_from_template.sh",
    ):
        (source / name).open("a", encoding="utf-8").write("# of the second version\n")
    second = commit(repository)
    code, output = update(project, str(repository))
    assert code == 0, output
    assert read_origin(project)["commit"] == second
    merged, fresh = files_of(project), files_of(bake(repository, tmp_path / "second", **ANSWERS))
    merged = {name: data for name, data in merged.items() if not name.startswith(".git/")}
    assert set(merged) == {*fresh, "net/own.py"} - {"scripts/slurm.sbatch"}
    assert merged["net/model.py"] == b"MINE = True\n"
    assert merged["net/trainer.py"] == fresh["net/trainer.py"].replace(b'"""', b'# mine\n"""', 1)
    own = {"net/model.py", "net/trainer.py", "net/own.py"}
    assert all(merged[name] == fresh[name] for name in set(merged) - own)

    # Both change the same line; the template removes two files, one of which the owner has changed.
    (project / "net" / "other.py").open("a", encoding="utf-8").write("# mine\n")
    commit(top)
    edit(source / "template_package" / "trainer.py", '"""', '# of the third version\n"""')
    for name in ("new.py", "other.py"):
        (source / "template_package" / name).unlink()
    third = commit(repository)
    code, output = update(project, str(repository))
    conflict = (project / "net" / "trainer.py").relative_to(top)
    assert code == 1
    assert output.startswith("kept, since you have changed it: net/other.py")
    last = output.splitlines()[-2:]
    assert last[0].startswith("error: conflicts between version ") and last[1] == str(conflict)
    assert "follows version" not in output
    text = (project / "net" / "trainer.py").read_text(encoding="utf-8")
    assert text.startswith(
        '<<<<<<< ours\n# mine\n=======\n# of the third version\n>>>>>>> theirs\n"""'
    )
    status = {
        line[3:].strip('"'): line[:2] for line in git(top, "status", "--porcelain").splitlines()
    }
    names = {"net/trainer.py": "UU", "net/new.py": "D ", ".template.json": "M "}
    assert status == {
        (project / name).relative_to(top).as_posix(): state for name, state in names.items()
    }
    assert read_origin(project)["commit"] == third


def test_project_remembers_the_place_that_a_lab_names(repository: Path, tmp_path: Path) -> None:
    questions = json.loads((repository / "cookiecutter.json").read_text(encoding="utf-8"))
    home = {"_home": str(repository)}
    (repository / "cookiecutter.json").write_text(json.dumps(questions | home), encoding="utf-8")
    commit(repository)
    project = bake(repository, tmp_path / "work", **ANSWERS)
    assert read_origin(project)["template"] == str(repository)
    commit(project)
    (repository / PROJECT / "scripts" / "new.sh").touch()
    second = commit(repository)
    code, output = update(project)
    assert code == 0, output
    assert (project / "scripts" / "new.sh").is_file()
    assert read_origin(project).items() >= {"template": str(repository), "commit": second}.items()


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Path:
    commit(folder := Path(shutil.copytree(template, tmp_path / "template")))
    return folder


def files_beside_git(project: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(project).items() if not name.startswith(".git/")}


def test_another_answer_changes_its_files_and_keeps_the_owners_changes(
    repository: Path, tmp_path: Path
) -> None:
    project = bake(repository, tmp_path / "work", **ANSWERS)
    edit(project / "net" / "trainer.py", '"""', '# mine\n"""')
    (project / "net" / "own.py").touch()
    commit(project)
    assert update(project, str(repository), "trackre=none") == (
        1,
        "error: trackre is not a question of the template\n",
    )
    code, output = update(project, str(repository), "size=middle")
    assert code == 1
    assert (
        output
        == "error: the template does not offer size=middle. Add another answer, such as size=small\n"
    )
    assert git(project, "status", "--porcelain") == ""

    code, output = update(
        project, "tracker=none", str(repository), "HEAD", "extra_strategies=accelerate"
    )
    assert code == 0, output
    changed = ANSWERS | {"tracker": "none", "extra_strategies": "accelerate"}
    expected = files_of(bake(repository, tmp_path / "expected", **changed))
    assert (
        "net/strategies/accelerate.py" in expected and "net/tracking/tensorboard.py" not in expected
    )
    expected["net/trainer.py"] = expected["net/trainer.py"].replace(b'"""', b'# mine\n"""', 1)
    # .template.json holds the new answers
    assert files_beside_git(project) == expected | {"net/own.py": b""}


def test_small_project_becomes_a_full_one(repository: Path, tmp_path: Path) -> None:
    project = bake(repository, tmp_path / "work", **ANSWERS, size="small")
    (project / "net" / "model.py").write_text("MINE = True\n", encoding="utf-8")
    commit(project)
    code, output = update(project, str(repository), "size=full")
    assert code == 0, output
    full = files_of(bake(repository, tmp_path / "full", **ANSWERS))
    assert files_beside_git(project) == full | {"net/model.py": b"MINE = True\n"}


def test_small_project_gets_a_command_alone_and_keeps_it(repository: Path, tmp_path: Path) -> None:
    project = bake(repository, tmp_path / "work", **ANSWERS, size="small")
    edit(project / "net" / "trainer.py", '"""', '# mine\n"""')
    commit(project)
    code, output = update(project, str(repository), "extras=sweep")
    assert code == 0, output
    expected = files_of(
        bake(repository, tmp_path / "with", **ANSWERS, size="small", _extras="sweep")
    )
    expected["net/trainer.py"] = expected["net/trainer.py"].replace(b'"""', b'# mine\n"""', 1)
    assert files_beside_git(project) == expected
    commit(project)
    sweep = repository / PROJECT / "template_package" / "commands" / "sweep" / "__init__.py"
    edit(sweep, '"""', '# new\n"""')
    commit(repository)
    code, output = update(project, str(repository))  # an update brings what has changed in it
    assert code == 0, output
    text = (project / "net" / "commands" / "sweep" / "__init__.py").read_text(encoding="utf-8")
    assert text.startswith("# new\n")
    commit(project)
    code, output = update(project, str(repository), "extras=")
    assert code == 0, output
    assert not (project / "net" / "commands" / "sweep").exists()


def test_change_of_a_renamed_file_is_told(repository: Path, tmp_path: Path) -> None:
    project = bake(repository, tmp_path / "work", **ANSWERS)
    (project / "net" / "files.py").rename(project / "net" / "writing.py")
    (project / "net" / "errors.py").unlink()
    commit(project)
    edit(repository / PROJECT / "template_package" / "files.py", '"""', '# mended\n"""')
    commit(repository)
    code, output = update(project, str(repository))
    assert code == 0, output
    told = [line for line in output.splitlines() if line.startswith("not updated")]
    assert told == ["not updated, since you have deleted or renamed it: net/files.py"]


def test_changes_of_a_renamed_package_are_told_file_by_file(
    repository: Path, tmp_path: Path
) -> None:
    """Row 09 of the environment's cases, a further form: none of the package's files is where it was."""
    project = bake(repository, tmp_path / "work", **ANSWERS)
    (project / "net").rename(project / "mine")
    commit(project)
    package = repository / PROJECT / "template_package"
    for name in ("files.py", "trainer.py", "core/ranks.py"):
        edit(package / name, '"""', '# mended\n"""')
    (package / "new.py").touch()
    commit(repository)
    code, output = update(project, str(repository))
    assert code == 0, output
    told = {line.rpartition(" ")[2] for line in output.splitlines() if "deleted or renamed" in line}
    assert told == {"net/files.py", "net/trainer.py", "net/core/ranks.py"}
    assert git(project, "status", "--porcelain").split() == [
        "M",
        ".template.json",
        "A",
        "net/new.py",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_repository_of_another_user(repository: Path, tmp_path: Path) -> None:
    """git refuses it: the update passes its remedy on, and a new project notes the template's commit all the same."""
    project = bake(repository, tmp_path / "work", **ANSWERS)
    commit(project)
    for path in (project, *project.rglob("*")):
        os.chown(path, 12345, 12345)
    code, output = update(project, str(repository))
    assert code == 1 and "dubious ownership" in output and "safe.directory" in output, output
    state = git(repository, "rev-parse", "HEAD").strip()
    for path in (repository, *repository.rglob("*")):
        os.chown(path, 12345, 12345)
    assert read_origin(bake(repository, tmp_path / "other", **ANSWERS))["commit"] == state


def edit_questions(repository: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = repository / "cookiecutter.json"
    change(questions := json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(questions, indent=2, ensure_ascii=False), encoding="utf-8")


def retire(repository: Path, example: str, other: str | None) -> None:
    """Remove an example, or give it another name, and say so in cookiecutter.json."""
    folder = repository / PROJECT / "examples" / example

    def change(questions: dict[str, Any]) -> None:
        questions["example"].remove(example)
        del questions["__prompts__"]["example"][example]
        questions["_retired"].setdefault("example", {})[example] = other
        if other is not None:
            questions["example"].append(other)
            questions["__prompts__"]["example"][other] = other

    edit_questions(repository, change)
    if other is None:
        shutil.rmtree(folder)
    else:
        folder.rename(folder.with_name(other))


def test_project_follows_a_template_that_retires_its_answers(
    repository: Path, tmp_path: Path
) -> None:
    """An example is renamed, then retired, while the project keeps its files; and a question is removed."""
    edit_questions(repository, lambda questions: questions.update(cluster=["alpha", "beta"]))
    commit(repository)
    project = bake(
        repository, tmp_path / "work", **ANSWERS | {"example": "text", "cluster": "beta"}
    )
    edit(project / "net" / "model.py", '"""', '# mine\n"""')
    edit(project / "config.yaml", "seed: 42 ", "seed: 43 ")
    commit(project)

    retire(repository, "text", "sentences")
    path = repository / PROJECT / "examples" / "sentences" / "model.py"
    path.open("a", encoding="utf-8").write("# of the second version\n")
    commit(repository)
    code, output = update(project, str(repository))
    assert code == 0, output
    assert output.count("example=text is retired: example=sentences takes its place\n") == 1
    assert dict(read_origin(project)["answers"])["example"] == "sentences"  # type: ignore[call-overload]
    text = (project / "net" / "model.py").read_text(encoding="utf-8")
    assert text.startswith('# mine\n"""') and text.endswith("# of the second version\n")
    commit(project)
    former = files_beside_git(project)

    retire(repository, "sentences", None)
    edit(
        repository / PROJECT / "template_package" / "trainer.py",
        '"""',
        '# of the third version\n"""',
    )
    edit(repository / PROJECT / "config.yaml", "seed: 42   ", "seed: 42 # a comment")
    edit_questions(repository, lambda questions: questions.pop("cluster"))
    commit(repository)
    code, output = update(project, str(repository))
    assert code == 1, "both have changed the line of the seed"
    assert output.count("example=sentences is retired: the project keeps its files\n") == 1
    assert "kept, since the template no longer offers what brought it: net/model.py\n" in output
    assert git(project, "diff", "--name-only", "--diff-filter=U") == "config.yaml\n"
    now = files_beside_git(project)
    assert {name for name in former if name not in now} == set()
    changed = {name for name in now if former.get(name) != now[name]}
    assert changed <= {
        "net/trainer.py",
        "config.yaml",
        ".template.json",
        "README.md",
        "pyproject.toml",
    }
    assert {"net/trainer.py", "config.yaml"} <= changed
    assert dict(read_origin(project)["answers"])["example"] == "image"  # type: ignore[call-overload]


def test_versions_of_several_projects_are_told(repository: Path, tmp_path: Path) -> None:
    first = bake(repository, tmp_path / "first", **ANSWERS)
    commit(first)
    old, version = git(repository, "rev-parse", "HEAD")[:7], read_origin(first)["version"]
    for name in ("files.py", "trainer.py"):
        edit(repository / PROJECT / "template_package" / name, '"""', '# mended\n"""')
    edit_questions(repository, lambda questions: questions.update(_version="0.4.0"))
    commit(repository)
    new = git(repository, "rev-parse", "HEAD")[:7]
    second = bake(repository, tmp_path / "second", **ANSWERS)
    commit(second)
    (second / "net" / "model.py").write_text(
        "", encoding="utf-8"
    )  # uncommitted changes do not matter
    code, output = update(first, "--check", str(repository), str(first), str(second), str(tmp_path))
    assert output.splitlines() == [
        f"{first}: version {version} ({old}); the template has 0.4.0 ({new}): an update changes 2 files",
        f"{second}: version 0.4.0 ({new}); the template has 0.4.0 ({new}): an update changes 0 files",
        f"{tmp_path}: error: there is no .template.json, which says how this project was made",
    ]
    assert code == 1
    assert git(first, "status", "--porcelain") == ""
    code, output = update(first, "--check", str(repository))
    assert code == 0 and output.endswith("an update changes 2 files\n")


def test_answer_that_is_gone_without_a_word_is_told(repository: Path, tmp_path: Path) -> None:
    project = bake(repository, tmp_path / "work", **ANSWERS | {"example": "text"})
    commit(project)
    retire(repository, "text", None)
    edit_questions(repository, lambda questions: questions["_retired"].pop("example"))
    commit(repository)
    code, output = update(project, str(repository))
    assert code == 1
    assert output.endswith(
        "error: the template does not offer example=text. Add another answer, such as example=image\n"
    )
    assert update(project, str(repository), "example=stub")[0] == 0


def make_old(repository: Path) -> None:
    """Change the template so that it asks the question `tools` in place of `size`, as version 0.2 did."""
    edit(repository / "cookiecutter.json", '"size": ["small", "full"]', '"tools": ["all", "none"]')
    edit(repository / "hooks" / "pre_gen_project.py", " | typed_tools()", "")
    edit(repository / "hooks" / "pre_gen_project.py", '"tools" in answers', "False")
    shutil.rmtree(repository / PROJECT / "small", ignore_errors=True)
    files = [
        *(repository / "hooks").glob("*.py"),
        *(repository / PROJECT / name for name in ("pyproject.toml", "README.md")),
    ]
    for path in files:
        text = path.read_text(encoding="utf-8").replace('answers["size"]', '"full"')
        text = text.replace("with size=full", "with tools=all").replace(
            '.size == "full"', '.tools == "all"'
        )
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("tools", ["all", "none"])
def test_project_that_answered_tools_becomes_a_full_one(
    template: Path, tmp_path: Path, tools: str
) -> None:
    repository = Path(shutil.copytree(template, tmp_path / "template"))
    make_old(repository)
    commit(repository)
    project = bake(repository, tmp_path / "work", **ANSWERS, tools=tools)
    assert '"tools": ' in (project / ".template.json").read_text(encoding="utf-8")
    commit(project)
    shutil.copytree(template, repository, dirs_exist_ok=True)
    commit(repository)
    code, output = update(project, str(repository))
    assert code == 0, output
    assert files_beside_git(project) == files_of(bake(repository, tmp_path / "full", **ANSWERS))

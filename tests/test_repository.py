"""Tests of the repository: pinned versions agree, Python holds no Jinja, questions are in order and have prompts."""

from __future__ import annotations

import ast
import re
import shutil
import tomllib
from pathlib import Path

import fork_requirements
import pytest

import pre_gen_project
from baking import CHOICES, CONDITION, EXAMPLES, PROJECT, QUESTIONS, ROOT, files_of
from post_gen_project import EXTRAS

pytestmark = pytest.mark.fork
FILES_OF_EXAMPLE = (
    "README.txt config.yaml model.py dataset.py test_model.py test_dataset.py".split()
)


def read_toml(path: Path) -> dict[str, dict[str, object]]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def pinned(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}


def names(requirements: object) -> set[str]:
    assert isinstance(requirements, list)
    return {
        re.split(r"[\[<>=!~;]", requirement)[0].strip().lower()
        for requirement in requirements
        if isinstance(requirement, str) and " @ " not in requirement  # names its own version
    }


def test_both_constraints_files_hold_the_same_versions() -> None:
    ours, theirs = pinned(ROOT / "constraints.txt"), pinned(ROOT / PROJECT / "constraints.txt")
    differing = {f"{name}=={version}" for name, version in theirs.items() - ours.items()}
    assert not differing, f"constraints.txt of the template lacks or contradicts {differing}"
    assert theirs["torch"] == "2.13.0"
    assert len(theirs) > 30


def test_every_direct_dependency_is_pinned() -> None:
    project = read_toml(ROOT / PROJECT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    wanted = names(project["dependencies"]) | names(extras["dev"])
    missing = wanted - set(pinned(ROOT / PROJECT / "constraints.txt"))
    assert not missing, f"pin {missing} in both constraints.txt, such as `name==1.2.3`"
    groups = read_toml(ROOT / "pyproject.toml")["dependency-groups"]
    missing = (names(groups["dev"]) | names(groups["fork"])) - set(pinned(ROOT / "constraints.txt"))
    assert not missing, f"pin {missing} in constraints.txt"


def test_private_library_needs_no_pin() -> None:
    private = "labutils @ git+ssh://git@lab.example/labutils.git@v1.2"
    assert names([private, "x[y]>=1", "Z~=2.0"]) == {"x", "z"}


def test_every_question_is_in_order_and_has_a_prompt() -> None:
    prompts, visible = QUESTIONS["__prompts__"], [key for key in QUESTIONS if key[0] != "_"]
    assert list(prompts) == visible, (
        "cookiecutter.json: each question needs a prompt under __prompts__, in the same order"
    )
    for key, answers in CHOICES.items():
        described = set(prompts[key]) - {"__prompt__"} if isinstance(prompts[key], dict) else set()
        assert described <= set(answers), (
            f"cookiecutter.json: remove from __prompts__, since {key} has no such answers: {described - set(answers)}"
        )


def test_folders_of_examples_are_the_answers(template: Path) -> None:
    folder = template / PROJECT / "examples"
    found = {path.name for path in folder.iterdir()}
    more = found - set(EXAMPLES)
    assert not more, f"add to `example` in cookiecutter.json, or delete from examples/: {more}"
    for example in EXAMPLES:
        # the first one's are in place
        needed = FILES_OF_EXAMPLE[: 1 if example == EXAMPLES[0] else None]
        missing = [name for name in needed if not (folder / example / name).is_file()]
        assert not missing, f"examples/{example} lacks {missing}"


def test_commands_that_a_small_project_may_have_are_the_same_everywhere() -> None:
    settings = ROOT / PROJECT / "template_package" / "core" / "settings.py"
    (alone,) = re.findall(r"^ALONE = (.*)$", settings.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*EXTRAS} == pre_gen_project.EXTRAS == {*ast.literal_eval(alone)}


def test_every_condition_names_an_answer(template: Path) -> None:
    num_conditions, problems = 0, []
    for name, content in files_of(template / PROJECT).items():
        for line in content.splitlines():
            if b"# only with " in line:
                num_conditions += 1
                if not (found := CONDITION.search(line)):
                    problems.append(f"{name}: `{line.decode()}` must end in QUESTION=ANSWER")
                elif found[3].decode() not in {**CHOICES, "_extras": EXTRAS}.get(
                    found[2].decode(), []
                ):
                    question, answer = found[2].decode(), found[3].decode()
                    problems.append(f"{name}: cookiecutter.json offers no {question}={answer}")
    assert not problems, "\n".join(problems)
    assert num_conditions > 10


def test_fork_installs_what_its_projects_need_and_no_other_library(tmp_path: Path) -> None:
    (tmp_path / PROJECT).mkdir()
    for name in ("pyproject.toml", "cookiecutter.json", f"{PROJECT}/pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    found = names(fork_requirements.requirements(tmp_path))
    assert {"torch", "cookiecutter", "pytest", *CHOICES["tracker"][:1]} - {"none"} <= found
    others = {*CHOICES["tracker"][1:], "deepspeed", "accelerate", "datasets", "webdataset", "cruft"}
    assert not found & others
    listed = (tmp_path / PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    more = 'dependencies = [\n    "lab @ git+ssh://git@lab/lab",\n    "sox>=1",  # only with example=x\n'
    changed = listed.replace("dependencies = [\n", more, 1)
    (tmp_path / PROJECT / "pyproject.toml").write_text(changed, encoding="utf-8")
    assert {"lab @ git+ssh://git@lab/lab", "sox>=1"} <= {*fork_requirements.requirements(tmp_path)}


def test_python_of_the_project_holds_no_jinja(template: Path) -> None:
    sources = [*(template / PROJECT).rglob("*.py")]
    assert len(sources) > 20
    for source in sources:
        assert not re.search(r"\{\{ ?cookiecutter|\{%", source.read_text(encoding="utf-8")), source


def test_hooks_hold_jinja_in_one_line_only(template: Path) -> None:
    for hook in (template / "hooks").glob("*.py"):
        text = hook.read_text(encoding="utf-8")
        assert text.count("cookiecutter | tojson") == 1
        before, _, after = text.partition("# {% raw %}\n")
        assert after.endswith("# {% endraw %}\n")
        assert before.count("{{") + before.count("{%") == 1

"""Tests that each example has all that it needs: an answer, sentences of the README, its own tests, its libraries."""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from jinja2 import Environment, TemplateNotFound
from test_own_tests import num_passed
from test_smoke_at_birth import NAME, state_of, with_python

from baking import EXAMPLES, PROJECT, bake, run_cookiecutter

pytestmark = pytest.mark.fork


def sentences(template: Path, example: str) -> dict[str, str]:
    """Return {name: text} for the blocks of an example's README.txt."""
    text = (template / PROJECT / "examples" / example / "README.txt").read_text(encoding="utf-8")
    module = Environment().from_string(text).module
    return {name: str(value) for name, value in vars(module).items() if name[0] != "_"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_readme_says_what_its_own_example_is(template: Path, tmp_path: Path, example: str) -> None:
    own, readme = sentences(template, example), f"examples/{example}/README.txt"
    assert set(own) in ({"predict", "code"}, {"predict", "code", "usage"}), (
        f"{readme} must set `predict` and `code`, and may set `usage`"
    )
    text = (bake(template, tmp_path, example=example) / "README.md").read_text(encoding="utf-8")
    missing = {name for name, sentence in own.items() if sentence not in text}
    assert not missing, f"README.md of the project does not show {missing} of {readme}"
    for other in set(EXAMPLES) - {example}:
        code = sentences(template, other)["code"]
        assert code != own["code"], f"{readme} says what examples/{other}/README.txt says"
        assert code not in text


def test_example_without_its_sentences_makes_no_project(template: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(template, tmp_path / "template"))
    (changed / PROJECT / "examples" / EXAMPLES[-1] / "README.txt").unlink()
    with pytest.raises(TemplateNotFound, match=rf"examples/{EXAMPLES[-1]}/README\.txt"):
        bake(changed, tmp_path / "out", example=EXAMPLES[-1])


def imported_modules(source: str) -> set[str]:
    """Return the top-level names of the modules that import statements name, except relative ones and Python's own."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(str(node.module))
    return {module.partition(".")[0] for module in modules} - sys.stdlib_module_names


def test_libraries_of_an_example_are_in_the_dependencies(template: Path, tmp_path: Path) -> None:
    libraries_of = packages_distributions()
    for example in EXAMPLES:
        project = bake(template, tmp_path / example, example=example, size="small")
        text = (project / "pyproject.toml").read_text(encoding="utf-8")
        metadata = tomllib.loads(text)["project"]
        dev = metadata["optional-dependencies"].pop("dev")
        listed = [*metadata["dependencies"], *chain(*metadata["optional-dependencies"].values())]
        assert dev and len(listed) > 8
        names = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in listed}
        for file in ("model.py", "dataset.py"):
            source = (project / "ddp_experiment" / file).read_text(encoding="utf-8")
            for module in imported_modules(source) - {"ddp_experiment"}:
                libraries = libraries_of.get(module, [module])
                assert names & {library.lower() for library in libraries}, (
                    f"example={example}: {file} imports {module}. Add to `dependencies` in the project's "
                    f'pyproject.toml: "{libraries[0]}>=VERSION",  # only with example={example}'
                )


@pytest.mark.parametrize("example", EXAMPLES)
def test_own_tests_of_an_example_pass(template: Path, tmp_path: Path, example: str) -> None:
    """Run those that are not marked as slow; test_own_tests.py runs all of them, in both sizes."""
    project = bake(template, tmp_path, example=example, package_name="z" * 40)
    tests = [f"tests/{path.name}" for path in (project / "tests").glob("test_*.py")]
    own = {path.name for path in (template / PROJECT / "examples" / example).glob("test_*.py")}
    own |= {"test_model.py", "test_dataset.py"}
    words = [name for name in tests if Path(name).name in own]
    assert num_passed(project, "-m", "not slow", *words) >= 2


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_trains_resumes_and_evaluates_at_birth(
    template: Path, tmp_path: Path, example: str
) -> None:
    answers = {"example": example, "size": "small"}
    result = run_cookiecutter(template, tmp_path, with_python(sys.executable), **answers)
    assert state_of(result.stdout) == "PASSED", result.stdout
    assert (tmp_path / NAME / "run.py").is_file()

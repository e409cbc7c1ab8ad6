"""Tests of the hooks' functions: they edit config text, choose files, search for a Python and end processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from baking import bake, files_of
from post_gen_project import (
    keep_chosen_lines,
    next_steps,
    paths_not_chosen,
    remove_section,
    set_value,
)
from processes import run
from python_search import candidate_pythons, find_base, find_python, is_older, read_requirements

from conftest import StubPython, marked_processes

CONFIG = """\
# About the file
name: baseline      # not the value of section.name
section:            # about the section
  name: old         # 5 # 6
  list: [1, 2]

  last: 1
# About the next
other:
  name: kept
"""


def test_value_changes_in_its_section_only_and_comments_keep_their_column() -> None:
    changed = set_value(CONFIG, "section.name", "new value")
    assert changed == CONFIG.replace("  name: old         # 5 # 6", "  name: new value   # 5 # 6")
    assert set_value(CONFIG, "name", "run") == CONFIG.replace(
        "name: baseline      #", "name: run           #"
    )
    assert "  name: much too long for it # 5 # 6\n" in set_value(
        CONFIG, "section.name", "much too long for it"
    )
    assert set_value(CONFIG, "section.last", "2") == CONFIG.replace("last: 1", "last: 2")
    with pytest.raises(AssertionError, match=r"other\.last"):
        set_value(CONFIG, "other.last", "2")


def test_section_ends_before_the_comment_of_the_next_key() -> None:
    begin, end = CONFIG.index("section:"), CONFIG.index("# About the next")
    assert remove_section(CONFIG, "section") == CONFIG[:begin] + CONFIG[end:]


def test_no_blank_lines_pile_up_where_a_section_was() -> None:
    text = "a: 1\n\nb:\n  c: 2\n\n  d: 3\n\ne: 4\n"
    assert remove_section(text, "b") == "a: 1\n\ne: 4\n"
    assert remove_section("a: 1\n\nb:\n  c: 2\n", "b") == "a: 1\n"
    with pytest.raises(AssertionError, match="no other"):
        remove_section(text, "other")


def test_file_of_several_answers_stays_with_each_of_them() -> None:
    shared = "template_package/strategies/library_environment.py"
    for answer, is_removed in {
        "none": True,
        "accelerate": False,
        "horovod": False,
        "all": False,
    }.items():
        removed = paths_not_chosen(
            {"extra_strategies": answer, "furniture": "all", "tracker": "none"}
        )
        assert (shared in removed) == is_removed
        assert ("scripts/install_horovod.sh" in removed) == (answer not in {"horovod", "all"})


def test_conditional_lines_follow_the_answers() -> None:
    text = 'a\n"b",  # only with tracker=wandb\n"c",  # only with tracker=none\n'
    assert keep_chosen_lines(text, {"tracker": "wandb"}) == 'a\n"b",\n'
    whole = f"#!/bin/sh\n  # only with tracker=none\n{text}"
    assert keep_chosen_lines(whole, {"tracker": "wandb"}) is None
    assert keep_chosen_lines(whole, {"tracker": "none"}) == '#!/bin/sh\na\n"c",\n'


@pytest.mark.parametrize("state", ["PASSED", "FAILED", "NOT RUN", "SKIPPED"])
def test_next_steps_fit_the_state(tmp_path: Path, state: str) -> None:
    steps = next_steps(tmp_path / "a folder", {"smoke_test": "auto", "package_name": "net"}, state)
    assert f"cd '{tmp_path}/a folder'" in steps
    assert ("pip install" in steps) == (state in {"NOT RUN", "SKIPPED"})
    assert ("run.py smoke" in steps) == (state != "PASSED")


def test_next_steps_make_no_repository_inside_another(tmp_path: Path) -> None:
    answers = {"smoke_test": "auto", "package_name": "net"}
    assert "git init -b main" in next_steps(tmp_path, answers, "PASSED")
    subprocess.check_call(["git", "init", "--quiet", tmp_path])
    steps = next_steps(tmp_path, answers, "PASSED")
    assert "git add ." in steps and "git init" not in steps


def cookiecutter_of(version: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Install this version in an environment of its own, run it in `folder`, and return its result.

    The shell stands in the repository of another template, of which nothing may be noted.
    """
    (folder / "cookiecutter.json").touch()
    subprocess.check_call(["git", "init", "--quiet", folder])
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "-m", "Start"]
    subprocess.check_call([*commit, "--allow-empty"], cwd=folder)
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.check_call([*pip, f"cookiecutter=={version}"])
    command = [str(programs / "cookiecutter"), *words, "--no-input", "-o", "made"]
    settings = os.environ | {"PWD": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=settings, check=False, capture_output=True, text=True
    )


@pytest.mark.slow
def test_cookiecutter_that_is_too_old_is_refused_in_one_line(
    template: Path, tmp_path: Path
) -> None:
    """Row 11 of the environment's cases. Debian 12 has 1.7.3, which renders no private variables."""
    result = cookiecutter_of("1.7.3", tmp_path, str(template))
    assert result.returncode == 1 and not [*tmp_path.glob("made/*")]
    assert "error: this cookiecutter is too old for the template. Type:" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "full"])
def test_old_cookiecutter_that_is_not_refused_makes_the_same_project(
    template: Path, tmp_path: Path, size: str
) -> None:
    """Row 11, a further form: a feature that an older 2.x lacks may not be taken for cruft."""
    answers = ("smoke_test=skip", f"size={size}")
    result = cookiecutter_of("2.1.1", tmp_path, str(template), *answers)
    assert result.returncode == 0, result.stderr
    assert "cruft" not in result.stdout + result.stderr
    (made,) = tmp_path.glob("made/*")
    assert files_of(made) == files_of(bake(template, tmp_path / "now", size=size))


def test_pythons_are_searched_in_the_documented_order(tmp_path: Path) -> None:
    for folder in ("venv/bin", "conda/bin", "first", "second"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("python", "python3"):
            (tmp_path / folder / name).touch(mode=0o755)
    environment = {
        "PATH": os.pathsep.join(
            [str(tmp_path / "first"), "", str(tmp_path / "missing"), str(tmp_path / "second")]
        ),
        "CONDA_PREFIX": str(tmp_path / "conda"),
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "DDP_TEMPLATE_PYTHON": "named/python",
        "PWD": str(tmp_path),
    }
    expected = ["named/python", "venv/bin/python", "conda/bin/python", None]
    expected += ["first/python3", "first/python", "second/python3", "second/python"]
    assert candidate_pythons(environment) == [
        str(tmp_path / path) if path else sys.executable for path in expected
    ]


def test_first_python_with_all_requirements_is_taken_and_the_others_are_explained(
    stub_python: StubPython,
) -> None:
    old = stub_python(anything_else="echo '[[3, 9, 1], {}]'", name="old")
    bare = stub_python(
        anything_else='echo \'[[3, 12, 0], {"torch": "1.13.1+cu117"}]\'', name="bare"
    )
    broken = stub_python(anything_else="exit 3", name="broken")
    talkative = stub_python(
        anything_else='echo "a word first"; exec "$REAL" "$@"'.replace("$REAL", sys.executable)
    )
    requirements = {"torch": "2.0", "numpy": "1.0"}
    python, notes = find_python(
        [old, bare, broken, "/nowhere/python", talkative, sys.executable], requirements
    )
    assert python == talkative
    assert notes == [
        f"{old} is Python 3.9.1, older than 3.11",
        f"{bare} lacks torch>=2.0 (it has 1.13.1+cu117), numpy",
        f"{broken} does not run",
        "/nowhere/python does not run",
    ]
    assert find_python([old, broken], requirements)[0] is None


def test_missing_tracker_does_not_disqualify_a_python(stub_python: StubPython) -> None:
    python = stub_python(anything_else='echo \'[[3, 12, 0], {"torch": "2.13.0"}]\'')
    found, notes = find_python([python], {"torch": "2.13", "wandb": "0.19"})
    assert found == python
    assert notes == [f"{python} lacks wandb: metrics.jsonl only"]


@pytest.mark.parametrize(
    ("version", "lowest", "older"),
    [
        ("2.9.0a0+50eac811a6.nv25.9", "2.8", False),  # NVIDIA's containers hold previews
        ("2.8.0a0+34c6371d24.nv25.8", "2.8", True),
        ("2.8.0.dev20250501+cu128", "2.8", True),
        ("2.8.0rc3", "2.8", True),
        ("2.8.0+cu128", "2.8", False),
        ("2.8.0.post1", "2.8", False),
        ("2.11.0", "2.8", False),
        ("2.7.1+cu118", "2.8", True),
        ("11", "11.0", False),
        ("0.19.2", "0.19.10", True),
    ],
)
def test_versions_are_compared_as_pip_compares_them(version: str, lowest: str, older: bool) -> None:
    assert is_older(version, lowest) is older
    # prereleases: what is installed
    assert (version not in SpecifierSet(f">={lowest}", prereleases=True)) is older


def test_new_environment_takes_the_first_torch_that_is_new_enough(stub_python: StubPython) -> None:
    versions = {
        "bare": "",
        "old": '"torch": "2.7.1"',
        "preview": '"torch": "2.9.0a0+50eac811a6.nv25.9"',
    }
    pythons = {
        name: stub_python(anything_else=f"echo '[[3, 12, 0], {{{found}}}]'", name=name)
        for name, found in versions.items()
    }
    bare, old, preview = pythons.values()
    note = f"{old} lacks torch>=2.8 (it has 2.7.1)"
    assert find_base([bare, old, preview, sys.executable], "2.8", is_named=False) == (
        preview,
        True,
        [note],
    )
    assert find_base([preview, bare], "2.8", is_named=True) == (preview, True, [])
    assert find_base([bare, preview], "2.8", is_named=True) == (bare, False, [])
    assert find_base([bare, old], "2.8", is_named=False) == (bare, False, [note])
    assert find_base(["/nowhere/python"], "2.8", is_named=False) == (
        None,
        False,
        ["/nowhere/python does not run"],
    )


def test_probe_imports_no_library() -> None:
    start = time.monotonic()
    assert find_python([sys.executable], {"torch": "1.0"})[0] == sys.executable
    assert time.monotonic() - start < 1.0  # importing torch takes longer


def test_requirements_are_read_from_a_pyproject() -> None:
    text = 'x = 1\ndependencies = [\n    "torch>=2.13",\n    "scikit-learn>=1.5",\n]\ndev = [\n    "ruff>=1",\n]\n'
    assert read_requirements(text) == {"torch": "2.13", "scikit-learn": "1.5"}


STUBBORN = """
trap '' TERM
{detached} sh -c "trap '' TERM; sleep 600" &
echo started
sleep 600
"""


@pytest.mark.parametrize("detached", ["", "setsid"])
def test_nothing_outlives_the_time_limit(mark: str, detached: str) -> None:
    start = time.monotonic()
    code, output = run(["sh", "-c", STUBBORN.format(detached=detached)], os.environ, seconds=1.0)
    assert (code, output) == (None, "started\n")
    assert marked_processes(mark) == []
    # they ignore SIGTERM, so SIGKILL follows after five seconds
    assert 5 < time.monotonic() - start < 12


def test_willing_processes_end_at_once(mark: str) -> None:
    start = time.monotonic()
    assert run(["sh", "-c", "sleep 600 & sleep 600"], os.environ, seconds=0.5)[0] is None
    assert time.monotonic() - start < 4
    assert marked_processes(mark) == []


def test_held_back_lines_are_returned_but_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(
        ["sh", "-c", "echo one; echo two >&2; exit 7"], os.environ, held_back=("two", "three")
    )
    assert (code, output) == (7, "one\ntwo\n")
    assert capsys.readouterr().out == "one\n"


def test_hooks_import_on_the_oldest_python_of_cookiecutter() -> None:
    """The hooks run in cookiecutter's Python, which may be 3.10, so they must not use newer syntax."""
    folder = Path(__file__).parents[1]
    sources = [*folder.glob("hooks/*.py"), *folder.glob("*/template_only/*.py")]
    assert {"post_gen_project.py", "first_smoke_test.py"} <= {path.name for path in sources}
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--target-version=py310",
        "--select=F,E9",
    ]
    subprocess.run([*command, *map(str, sources)], check=True)

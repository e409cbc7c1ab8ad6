"""Tests of answers: bad ones are refused together, with remedies, and leave no file; printable text stays as typed."""

from __future__ import annotations

import shlex
import tempfile
import tomllib
from pathlib import Path

import pytest
import yaml
from cookiecutter.exceptions import FailedHookException

from baking import EXAMPLES, PROJECT, bake, files_of, run_cookiecutter
from pre_gen_project import find_problems, suggest_package, suggest_slug

pytestmark = pytest.mark.fork

GOOD = {
    "project_name": "A Project",
    "project_slug": "a-project",
    "package_name": "a_project",
    "description": "",
    "author_name": "",
    "device_ids": "auto",
    "size": "full",
    "extra_strategies": "none",
}
REFUSED = {
    "project_name": [
        "",
        "   ",
        "two\nlines",
        "tab\there",
        "bell\a",
        "half \ud83d",
        "line\u2028separator",
    ],
    "description": [
        "two\nlines",
        "\x7f",
        "{{ cookiecutter }}",
        "{% raw %}",
        "{# note",
        "a # only with example=text",
    ],
    "author_name": ["two\r\nlines", "\x00"],
    "project_slug": [
        *"Upper under__score double--dash -dash dash- 3d a/b ../evil /tmp/x a.b café 名 con com1 lpt9 nul".split(),
        *["torch", "scikit-learn", "a b", "a" * 65],
    ],
    "package_name": [
        *"Upper 3d a-b a.b _x café class import json yaml torch numpy sklearn pynvml run tests scripts con".split(),
        *["template_package", "", "a b", "a" * 41],
    ],
    "device_ids": [
        "",
        *"x -1 auto: auto:0 auto:-1 0,,2 0;2 [0 0] 0,0 cpu,0 cuda:0 gpu cpu:2 0x1 1.5".split(),
    ],
}
ACCEPTED = {
    "project_name": [
        "x",
        "O'Neil's \"best\" \\ work",
        "日本語 실험 😀 👩‍🔬",
        "a: b # c",
        "[1, 2]",
        "<b>&amp;</b>",
    ],
    "project_slug": ["a", "ab", "a-b_c", "net2", "a" * 64],
    "package_name": ["a", "ab", "net_2", "a" * 40, "match"],
    "device_ids": [
        "auto",
        "auto:2",
        "0",
        "0,2",
        "0, 2",
        "[0, 2]",
        "[0]",
        "cpu",
        "cpu,cpu",
        "[cpu, cpu]",
        "mps",
    ],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in REFUSED for value in REFUSED[key]]
)
def test_bad_answer_is_refused_by_its_key(key: str, value: str) -> None:
    assert list(find_problems(GOOD | {key: value})) == [key]


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in ACCEPTED for value in ACCEPTED[key]]
)
def test_good_answer_is_accepted(key: str, value: str) -> None:
    assert find_problems(GOOD | {key: value}) == {}


def test_extra_strategies_need_the_full_size() -> None:
    for strategies in ("accelerate", "deepspeed", "horovod", "all"):
        assert find_problems(GOOD | {"extra_strategies": strategies}) == {}
        problems = find_problems(
            GOOD | {"extra_strategies": strategies, "size": "small", "device_ids": "0,cpu"}
        )
        assert list(problems) == ["device_ids", "extra_strategies"]
        assert problems["extra_strategies"].endswith("Use extra_strategies=none, or add size=full")


@pytest.mark.parametrize(("tools", "size"), [("all", "full"), ("none", "small")])
def test_question_that_is_gone_is_refused_on_the_command_line(
    template: Path, tmp_path: Path, tools: str, size: str
) -> None:
    """Cookiecutter would ignore it, and an old project's update script would make a small project of a full one."""
    result = run_cookiecutter(
        template, tmp_path / "out", smoke_test="skip", tools=tools, project_name="tools=x"
    )
    assert result.returncode == 1
    assert (
        f"tools={tools!r}: the question is called size since version 0.3. Use size={size}\n"
        in result.stdout
    )
    command = next(
        line for line in result.stdout.splitlines() if line.startswith("  cookiecutter ")
    )
    assert f" size={size} " in command and " tools=" not in command
    assert not list((tmp_path / "out").iterdir())


def test_suggested_name_is_always_a_good_one() -> None:
    for value in REFUSED["project_slug"] + REFUSED["package_name"]:
        assert find_problems(GOOD | {"project_slug": suggest_slug(value)}) == {}
        assert find_problems(GOOD | {"package_name": suggest_package(value)}) == {}


@pytest.mark.parametrize(
    "answers",
    [
        {"project_name": " "},
        {"project_slug": "a/b"},
        {"project_slug": "../evil"},
        {"package_name": "torch"},
        {"device_ids": "cpu,0"},
        {"author_name": "two\nlines"},
    ],
)
def test_refused_answers_leave_nothing(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]
) -> None:
    output_dir, temporary = tmp_path / "out", tmp_path / "temporary"
    output_dir.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))  # cookiecutter renders the hooks there
    monkeypatch.setenv("TMPDIR", str(temporary))
    with pytest.raises(FailedHookException):
        bake(template, output_dir, **answers)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    # cookiecutter itself makes parent folders before any hook
    if "/" not in answers.get("project_slug", ""):
        assert list(output_dir.iterdir()) == []


def test_folder_that_holds_files_is_not_overwritten(template: Path, tmp_path: Path) -> None:
    project = bake(template, tmp_path, package_name="net")
    (project / "net" / "model.py").write_text("# years of work\n", encoding="utf-8")
    (project / "examples").mkdir()
    (project / "examples" / "mine.py").touch()
    before = files_of(project)
    with pytest.raises(FailedHookException):
        bake(template, tmp_path, True, package_name="net")
    assert files_of(project) == before


def test_folder_that_holds_only_git_is_filled(template: Path, tmp_path: Path) -> None:
    (tmp_path / "ddp-experiment" / ".git").mkdir(parents=True)
    (tmp_path / "ddp-experiment" / ".git" / "index").write_bytes(b"\xff  # only with mine\n")
    assert (bake(template, tmp_path, True) / "run.py").is_file()


def test_all_problems_are_named_with_a_command_that_keeps_the_good_answers(
    template: Path, tmp_path: Path
) -> None:
    bad = {"project_slug": "Bad Slug", "package_name": "torch", "device_ids": "0,cpu"}
    good = {"project_name": 'It\'s "x"; $(id)', "author_name": "名 😀", "example": EXAMPLES[-1]}
    result = run_cookiecutter(template, tmp_path / "out", smoke_test="skip", **bad, **good)
    assert result.returncode == 1
    for key, value in bad.items():
        assert f"{key}={value!r}" in result.stdout
    command = next(
        line for line in result.stdout.splitlines() if line.startswith("  cookiecutter ")
    )
    words = shlex.split(command)
    assert words[1:4] == [str(template), "-o", str(tmp_path / "out")]
    repeated = dict(word.split("=", 1) for word in words[4:])
    assert repeated.items() >= good.items()
    assert not bad.keys() & repeated.keys()
    assert not list((tmp_path / "out").iterdir())

    remedies = {"project_slug": "bad-slug", "package_name": "project_torch", "device_ids": "0"}
    for key, value in remedies.items():
        assert f"Use {key}={value}" in result.stdout
    assert run_cookiecutter(template, tmp_path / "out", **repeated, **remedies).returncode == 0


HOSTILE = [
    'He said "no"',
    "back\\slash \\n \\u0041 \\",
    "it's; rm -rf $HOME `id` $(id) | & >",
    "日本語プロジェクト",
    "emoji 😀 and 👩‍🔬 family",
    "key: value # comment",
    "[1, 2] {a: b} *anchor &ref !tag %x @y",
    "yes",
    "1e3",
    "'''triple''' \"\"\" quotes",
    "<script>&amp;</script>",
    "right-to-left עברית",
    " spaces around ",
    "}} %} #}",
    "# only",
    'the ["template_package"] of template_package',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_printable_text_arrives_as_typed(template: Path, tmp_path: Path, text: str) -> None:
    names = {"project_slug": "net", "package_name": "net", "license": "MIT"}
    project = bake(
        template, tmp_path, project_name=text, description=text, author_name=text, **names
    )
    assert (project / "README.md").read_text(encoding="utf-8").startswith(f"# {text}\n")
    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert metadata["description"] == text
    assert metadata["authors"] == [{"name": text}]
    citation = yaml.safe_load((project / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["title"], citation["authors"]) == (text, [{"name": text}])
    assert f"Copyright (c) {text}\n" in (project / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("project_name", "slug", "package"),
    [
        ("DDP Experiment", "ddp-experiment", "ddp_experiment"),
        ("3D Net", "project-3d-net", "project_3d_net"),
        ("😀", "project", "project"),
        ("Word " * 30, ("word-" * 11).strip("-"), ("word_" * 8).strip("_")),
    ],
)
def test_default_names_are_good_ones(
    template: Path, tmp_path: Path, project_name: str, slug: str, package: str
) -> None:
    project = bake(template, tmp_path, project_name=project_name)
    assert project.name == slug
    assert (project / package / "model.py").is_file()


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("auto", "auto"),
        ("auto:2", "auto:2"),
        ("0", [0]),
        ("0,2", [0, 2]),
        ("[ 0, 2 ]", [0, 2]),
        ("007", [7]),
        ("cpu", "cpu"),
        ("cpu,cpu", ["cpu", "cpu"]),
        ("[cpu]", "cpu"),
    ],
)
def test_device_ids_reach_the_config(
    template: Path, tmp_path: Path, answer: str, value: object
) -> None:
    before = (template / PROJECT / "config.yaml").read_text(encoding="utf-8")
    tracker = yaml.safe_load(before)["logging"]["tracker"]
    example = EXAMPLES[0]  # its config is in place
    answers = {"extra_strategies": "all", "tracker": tracker, "example": example}
    project = bake(template, tmp_path, device_ids=answer, **answers)
    text = (project / "config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["device_ids"] == value
    changed = [
        (new, old)
        for new, old in zip(text.splitlines(), before.splitlines(), strict=True)
        if new != old
    ]
    # no other line changes, not even a comment
    others = [(new, old) for new, old in changed if not new.startswith("device_ids: ")]
    assert others == [], "device_ids changes these lines of config.yaml, too"
    assert [new.partition("#")[2] for new, _ in changed] == [
        old.partition("#")[2] for _, old in changed
    ]


def test_answers_are_never_run_as_code(template: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    attack = f'"""; open({str(marker)!r}, "w"); """ \'\'\' $(touch {marker}) `touch {marker}` \\'
    bake(
        template,
        tmp_path / "out",
        project_name=attack,
        project_slug="net",
        author_name=attack,
        description=attack,
    )
    assert not marker.exists()

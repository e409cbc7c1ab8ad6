"""Tests of the documentation: links work, the tutorial's commands print what it shows, tables agree with the config."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference

from baking import PROJECT, ROOT, bake, plain_environment

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
NUMBER = re.compile(r"\d[\d.,]*\d|\d")
TIMES = re.compile(r"\d+ samples/s|[\d:]+ left|; \d+ s\)|cpu: \w+")  # differ on each machine


class Block(NamedTuple):
    language: str
    text: str


def read_blocks(page: Path) -> list[Block]:
    fences = re.findall(
        r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [Block(*fence) for fence in fences]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MkDocs give to the page's headings."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.fork
def test_links_between_files_hold() -> None:
    num_links, problems = 0, []
    for page in PAGES:
        text = re.sub(
            r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        for target in re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', text):
            link, _, anchor = "".join(target).partition("#")
            if link.startswith(("http:", "https:")):
                continue
            file = page.parent / link if link else page
            where = f"{page.relative_to(ROOT)} links to {link}"
            if not file.exists():
                problems.append(f"{where}, which does not exist")
            elif anchor and anchor not in anchors(file):
                problems.append(f"{where}#{anchor}, a heading that does not exist")
            num_links += 1
    assert not problems, "\n".join(problems)
    assert num_links > 30


@pytest.mark.fork
def test_navigation_of_the_site_names_every_page_and_no_other() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert not pages - named, f"add to `nav` in mkdocs.yml: {pages - named}"
    assert not named - pages, f"remove from `nav` in mkdocs.yml: {named - pages}"


@pytest.mark.fork
def test_key_reference_is_what_the_config_says() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), (
        "type `python tools/reference.py` with an environment of make (.venv, .cache/fork), or `make docs`"
    )


def test_words_of_other_tools_are_keys_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / PROJECT))
    reader, run = import_module("template_package.core.settings"), import_module("run")

    def load_config(config: Path, words: list[str]) -> None:
        try:
            reader.read_command_line(words, config).load_config()
        except ValueError as error:
            raise ValueError(run.in_our_words(error)) from None

    config, num_settings = ROOT / PROJECT / "config.yaml", 0
    for row in re.findall(
        r"^\| .* \|$", (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8"), re.MULTILINE
    ):
        theirs, ours = row.strip("| ").split(" | ")[:2]
        settings = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*=[^` ]+)`", ours)
        load_config(config, settings)
        num_settings += len(settings)
        for word in re.findall(
            r"`(\w+=[^` ]+)` \(answered\)", theirs
        ):  # typed as it is, the answer names our key
            with pytest.raises(ValueError, match="there is no such key") as answer:
                load_config(config, [word])
            key = re.findall(r"`([a-z_.]+)=", ours)[0]
            assert f"{key}=" in str(answer.value)
    assert num_settings >= 40


def same_line(shown: str, printed: str) -> bool:
    """Return True if the lines are equal, except for times, and for numbers that differ by at most a tenth."""
    shown, printed = TIMES.sub("", shown), TIMES.sub("", printed)
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=False)
    is_close = all(
        float(b.strip(".,")) == pytest.approx(float(a.strip(".,")), rel=0.1) for a, b in pairs
    )
    return NUMBER.sub("", shown) == NUMBER.sub("", printed) and is_close


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_commands_of_the_tutorial_print_what_it_shows(template: Path, tmp_path: Path) -> None:
    project = bake(template, tmp_path, project_name="Spirals", example="stub")
    blocks = read_blocks(ROOT / "docs" / "tutorial.md")
    output, num_lines = "", 0
    environment = plain_environment({"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"})
    for block in blocks:
        if block.language == "python":
            (project / block.text.split()[1]).write_text(block.text, encoding="utf-8")
        elif block.language == "yaml":
            config = (project / "config.yaml").read_text(encoding="utf-8")
            config = re.sub(r"^(data|model):.*\n(  .*\n)+", "", config, flags=re.MULTILINE)
            own, evaluation = block.text.split("evaluation:\n")
            for line in evaluation.splitlines():
                config = re.sub(rf"^  {line.split()[0]} .*$", line, config, flags=re.MULTILINE)
            (project / "config.yaml").write_text(own + config, encoding="utf-8")
        elif block.language == "sh" and not block.text.startswith("cookiecutter"):
            options: dict[str, Any] = {
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "timeout": 120,
            }
            command = ["bash", "-c", block.text]
            result = subprocess.run(command, check=False, cwd=project, env=environment, **options)
            output = result.stdout.decode()
        elif block.language == "text":
            for line in block.text.splitlines():
                printed = any(same_line(line, other) for other in output.splitlines())
                assert line == "…" or printed, f"{line}\nis not in\n{output}"
                num_lines += 1
    assert num_lines > 20

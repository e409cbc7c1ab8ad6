"""Tests of report.html: it shows the numbers of one run or of several, and no text from a file becomes markup."""

from __future__ import annotations

import base64
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from template_package.commands.report import mean_over_seeds, read_metrics, write_report

from conftest import Project

EVIL = "<script>alert('$x$')</script>&\"'"


class Page(HTMLParser):
    """The text of a page, the page's tags, and all addresses that the page would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.tags, self.addresses = "", list[str](), list[str]()
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or ""
            for name, value in attrs
            if "src" in name or ("href" in name and (value or "")[:1] != "#")
        ]

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def make_run(folder: Path, name: str, *, seed: int, rate: float, loss: float) -> Path:
    """Write the files of a run that has ended, and return the run's folder."""
    directory = folder / name
    (directory / "logs").mkdir(parents=True)
    config = {"name": name, "seed": seed, "optimizer": {"learning_rate": rate}}
    config["evaluation"] = {"metric": "loss", "mode": "min"}
    (directory / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    best = {"status": "complete", "steps": 3, "best": {"loss": loss, "step": 3}}
    (directory / "summary.json").write_text(json.dumps(best), encoding="utf-8")
    lines: list[dict[str, Any]] = [
        {"split": "train", "step": step, "epoch": 1, "loss": loss + 1 / step, "learning_rate": rate}
        for step in (1, 2, 3)
    ]
    lines.append(
        {
            "split": "validation",
            "step": 3,
            "epoch": 1,
            "loss": loss,
            "accuracy": 0.5,
            "num_samples": 9,
        }
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")
    return directory


@pytest.mark.timeout(600)  # seconds on idle cores
def test_report_of_a_real_run_holds_its_numbers(project: Project) -> None:
    project.run("name=a", "training.epochs=2", "logging.report=true")
    project.run("name=b", "training.epochs=1", "seed=7")
    project.run("name=b", "training.epochs=2", "seed=7", "logging.report=true")
    assert (
        "Resumed 1 time (after step 7), asked to stop 0 times."
        in Page(project.directory("b") / "report.html").text
    )
    assert "Resumed 0 times" in Page(project.directory("a") / "report.html").text
    printed = project.run("report", "a")
    assert printed.strip() == "runs/a/report.html"
    page = Page(project.directory("a") / "report.html")
    summary = project.json("a", "summary.json")
    for number in (
        summary["best"]["loss"],
        summary["train_seconds"],
        summary["samples_per_second"],
    ):
        assert f" {number:.5g} " in page.text
    assert all(
        title in page.text
        for title in "loss epoch_loss absolute_error learning_rate samples_per_second".split()
    )
    assert page.tags.count("svg") == 5 and "script" not in page.tags and page.addresses == []
    assert re.search(r"optimizer.learning_rate\s+0.01\s+0.003", page.text), "value and default"

    assert project.run("report", "a", "b").strip() == "runs/report.html"
    both = Page(project.folder / "runs" / "report.html")
    assert all(
        f"{project.json(name, 'summary.json')['best']['loss']:.5g}" in both.text for name in "ab"
    )
    assert re.search(r"status\s+best loss\s+seed\s+a\s+complete", both.text), (
        "they differ in the seed alone"
    )
    assert "Means over seeds" in both.text
    output = project.run("report", "c", code=2)
    assert output == "error: runs/c: holds no run. Name one or more of: a, b.\n"


def test_curves_are_those_of_the_lines(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "a", seed=1, rate=0.1, loss=0.5)
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"split": "train", "st')  # the run is writing it
    lines = read_metrics(directory)["train"]
    assert [line["loss"] for line in lines] == [1.5, 1.0, 0.5 + 1 / 3]
    write_report([directory], tmp_path / "report.html")
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    curve = re.search(
        r'<g id="line2d_\d+">\s+<path d="(M [^"]+)"[^>]*stroke: #0072b2', source, re.DOTALL
    )
    assert curve is not None, "the training loss"
    heights = [float(point.split()[1]) for point in re.split("[ML] ", curve[1])[1:]]
    assert (heights[1] - heights[0]) / (heights[2] - heights[0]) == pytest.approx(
        0.5 / (1.5 - 0.5 - 1 / 3), rel=1e-3
    )


def test_nothing_from_the_files_becomes_markup(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "a", seed=1, rate=0.1, loss=0.5)
    config = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    (directory / "config.yaml").write_text(
        yaml.safe_dump({**config, "data": {EVIL: EVIL}}), encoding="utf-8"
    )
    (directory / "environment.json").write_text(json.dumps({EVIL: [EVIL]}), encoding="utf-8")
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        line = {"split": "validation", "step": 3, "epoch": 1, EVIL: 1.0, "$\\frac{": 2.0, "実験": 3}
        file.write(json.dumps(line) + "\n")
    (directory / "reports").mkdir()
    report = {"title": EVIL, "label_names": [EVIL, "b"], "confusion_matrix": [[1, 2], [0, 4]]}
    (directory / "reports" / "validation_best.json").write_text(
        json.dumps(report), encoding="utf-8"
    )
    (directory / "media").mkdir()
    for step in (1, 20, 300, 4000):
        (directory / "media" / f"step_{step:08d}_a_b.txt").write_text(
            f"{EVIL} number {step}", encoding="utf-8"
        )
    image = b"\x89PNG: no test looks into it"
    (directory / "media" / "step_00000020_<i>.png").write_bytes(image)
    other = make_run(tmp_path, EVIL.replace("/", "_"), seed=2, rate=0.1, loss=0.6)
    write_report([directory], tmp_path / "one.html")
    write_report([directory, other], tmp_path / "two.html")

    page = Page(tmp_path / "one.html")
    assert "script" not in page.tags and "i" not in page.tags
    assert (
        page.text.count(EVIL) >= 8 and "$\\frac{" in page.text and "実験" in unescape(page.source)
    )
    assert [step for step in (1, 20, 300, 4000) if f"number {step}" in page.text] == [
        20,
        300,
        4000,
    ], "the newest three"
    assert page.addresses == ["data:image/png;base64," + base64.b64encode(image).decode()]
    assert "script" not in Page(tmp_path / "two.html").tags


def test_run_that_has_barely_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("", encoding="utf-8")
    write_report([tmp_path / "a"], tmp_path / "a.html")
    assert "The run has not ended" in (tmp_path / "a.html").read_text(encoding="utf-8")
    write_report([tmp_path / "a", tmp_path / "a"], tmp_path / "b.html")


def test_means_are_over_runs_that_differ_in_their_seed_alone() -> None:
    results: list[tuple[dict[str, Any], float | None]] = [
        ({"a": "1", "seed": "1"}, 0.5),
        ({"a": "1", "seed": "2"}, 0.7),
        ({"a": "2", "seed": "1"}, 0.9),
        ({"a": "3"}, None),
    ]
    worse, better = mean_over_seeds(results, "min")
    assert worse["settings"] == {"a": "1"} and worse["mean"] == pytest.approx(0.6)
    assert worse["std"] == pytest.approx(0.1 * 2**0.5) and worse["num_runs"] == 2
    assert (better["settings"], better["std"], better["num_runs"]) == ({"a": "2"}, None, 1)
    assert mean_over_seeds(results, "max") == [better, worse]

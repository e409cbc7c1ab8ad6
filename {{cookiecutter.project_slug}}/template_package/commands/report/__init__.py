"""`python run.py report [NAME…]`: writes an HTML file, readable offline, that shows one run or compares several runs.

The content is read from each run's files. page.html is the Jinja template, and matplotlib draws the curves.
"""

import base64
import io
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
import yaml
from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from ...core.config import find_config, values_of
from ...core.settings import CommandLine
from ...errors import ConfigError, one_line
from ...files import run_directory, write_whole

NOT_DRAWN = ("split", "step", "epoch", "num_samples")
# Curves differ in colour and in line, for the colour-blind and for print in black and white: 21 styles.
# Okabe and Ito 2008, no yellow
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
LINES = ("solid", "dashed", "dotted")  # both matplotlib and CSS know these words
DRAWING: Any = {
    "font.size": 9, "svg.fonttype": "none", "text.parse_math": False, "axes.grid": True, "grid.alpha": 0.3,
    "figure.figsize": (4.6, 2.9), "figure.constrained_layout.use": True,
    "path.simplify_threshold": 1.0,  # pixels: curves of many steps make no large file
}  # fmt: skip


def main(line: CommandLine) -> int:
    """Write a report on the runs named in the command or, if it names none, on the run in the config. Return 0."""
    folders = [run_directory(name) for name in line.rest or [line.load_config().name]]
    path = (folders[0] if len(folders) == 1 else run_directory("")) / "report.html"
    write_report([run for folder in folders for run in find_runs(folder)], path)
    print(path)
    return 0


def find_runs(folder: Path) -> list[Path]:
    """If `folder` is a run, return [folder]. If it is a sweep, return its runs. If it is neither, raise ConfigError."""
    runs = (
        [folder]
        if (folder / "metrics.jsonl").exists()
        else [path.parent for path in folder.glob("*/metrics.jsonl")]
    )
    if not runs:
        paths = [
            path.relative_to(run_directory(""))
            for path in run_directory("").glob("**/metrics.jsonl")
        ]
        there = ", ".join(sorted({path.parts[0] for path in paths})) or "none so far"
        raise ConfigError(f"{folder}: holds no run. Name one or more of: {there}.")
    return sorted(runs)


def write_report(directories: list[Path], path: Path) -> None:
    """Write the report on one run, or the comparison of several runs, to `path`."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["show"] = show
    parts = describe_run(directories[0]) if len(directories) == 1 else compare_runs(directories)
    parts |= {"curves": draw_all(directories), "colors": COLORS, "lines": LINES}
    text = environment.get_template("page.html").render(parts)
    write_whole(
        path, lambda beside: beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    )


def show(value: Any) -> str:
    """Return a value as text for the report. A float gets five significant digits."""
    if isinstance(value, list):
        return " ".join(map(show, value))
    return f"{value:.5g}" if isinstance(value, float) else "-" if value is None else str(value)


def describe_run(directory: Path) -> dict[str, Any]:
    """Collect everything that page.html shows about a single run, except the curves."""
    default = {k: v for k, v in values_of({}, find_config()).items() if v is not MISSING}
    media: dict[str, list[dict[str, str]]] = {}
    for path in sorted(directory.glob("media/step_*_*"), reverse=True):
        _, step, name = path.stem.split("_", 2)
        if len(newest := media.setdefault(name, [])) < 3:  # images and texts of each name
            content, key = path.read_bytes(), "image" if path.suffix == ".png" else "text"
            text = (
                base64.b64encode(content).decode()
                if key == "image"
                else content.decode(errors="replace")
            )
            newest.append({"step": step.lstrip("0"), key: text})
    parts: dict[str, Any] = {"title": directory.name, "media": media, "default": default}
    parts |= {
        key: dotted(read_json(directory / f"{key}.json"))
        for key in ("summary", "environment", "evaluation")
    }
    matrices = [read_json(path) for path in sorted(directory.glob("reports/*.json"))]
    parts["reports"] = []
    with suppress(ModuleNotFoundError):  # size=full writes matrices, and has what shows them
        from ...training.evaluation import class_scores

        parts["reports"] = [matrix | {"classes": class_scores(matrix)} for matrix in matrices]
    log = "".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in directory.glob("logs/rank_0.log")
    )
    parts |= {
        "config": read_config(directory),
        "resumed_after": re.findall(r"resuming after step (\d+)", log),
    }
    return parts | {"num_stops": log.count("stopped: the same command continues")}


def compare_runs(directories: Sequence[Path]) -> dict[str, Any]:
    """Collect what page.html shows about several runs: the settings that differ, the results, and means over seeds."""
    configs, runs = [*map(read_config, directories)], []
    all_keys = dict.fromkeys(key for key in chain(*configs) if key != "name")
    keys = [key for key in all_keys if len({one_line(config.get(key)) for config in configs}) > 1]
    metric, mode = (configs[0].get(f"evaluation.{key}", "") for key in ("metric", "mode"))
    for path, config in zip(directories, configs, strict=True):
        summary, settings = (
            read_json(path / "summary.json"),
            {key: one_line(config.get(key)) for key in keys},
        )
        value, status = (summary.get("best") or {}).get(metric), summary.get("status", "not ended")
        runs.append({"name": path.name, "status": status, "value": value, "settings": settings})
    means = mean_over_seeds([(run["settings"], run["value"]) for run in runs], mode)
    return {
        "title": f"{len(runs)} runs",
        "runs": runs,
        "keys": keys,
        "metric": metric,
        "means": means,
    }


def mean_over_seeds(
    results: list[tuple[dict[str, Any], float | None]], mode: str
) -> list[dict[str, Any]]:
    """Group runs that differ only in the seed. Return the groups, best first.

    Each group holds the mean and standard deviation of its runs' results, and the number of runs.
    """
    groups: dict[str, list[float]] = {}
    for settings, value in results:
        if value is not None:
            rest = {key: text for key, text in settings.items() if key != "seed"}
            groups.setdefault(json.dumps(rest), []).append(value)
    means: list[dict[str, Any]] = []
    for text, values in groups.items():
        std = stdev(values) if len(values) > 1 else None
        means.append(
            {
                "settings": json.loads(text),
                "mean": mean(values),
                "std": std,
                "num_runs": len(values),
            }
        )
    return sorted(means, key=lambda entry: entry["mean"], reverse=mode == "max")


def draw_all(directories: Sequence[Path]) -> list[str]:
    """Return the curves as SVG text: one figure per metric or, if there are several runs, per split and metric."""
    is_single, figures, drawn = len(directories) == 1, defaultdict[str, Figure](Figure), list[str]()
    with matplotlib.rc_context(DRAWING), warnings.catch_warnings():
        # letters that matplotlib's font lacks: the browser has them
        warnings.simplefilter("ignore")
        for index, directory in enumerate(directories):
            for split_index, (split, lines) in enumerate(read_metrics(directory).items()):
                for key in dict.fromkeys(
                    key for line in lines for key in line if key not in NOT_DRAWN
                ):
                    title, style = (key, split_index) if is_single else (f"{split}: {key}", index)
                    axes = figures[title].gca()
                    axes.set(title=title, xlabel="step")
                    steps, values = zip(
                        *((line["step"], line[key]) for line in lines if key in line), strict=True
                    )
                    color, line_style = COLORS[style % len(COLORS)], LINES[style % len(LINES)]
                    marker = "." if len(steps) == 1 else ""
                    axes.plot(steps, values, marker=marker, color=color, ls=line_style, label=split)
        for figure in figures.values():
            axes, file = figure.gca(), io.StringIO()
            axes.locator_params("x", nbins=6, integer=True)
            if is_single and len(axes.lines) > 1:
                axes.legend()
            figure.savefig(file, format="svg")
            drawn.append(file.getvalue()[file.getvalue().index("<svg") :])
    return drawn


def read_metrics(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of metrics.jsonl, grouped by split. Skip a line that is only half written."""
    path, splits = directory / "metrics.jsonl", dict[str, list[dict[str, Any]]]()
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    ):
        with suppress(ValueError):
            values = json.loads(line)
            splits.setdefault(values["split"], []).append(values)
    return splits


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts into one dict with dotted keys, such as `training.epochs`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and value
        flat |= dotted(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat


def read_config(directory: Path) -> dict[str, Any]:
    """Read the run's config.yaml as a dict with dotted keys. Return {} if the file does not exist."""
    path = directory / "config.yaml"
    return dotted(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file. Return {} if the file does not exist."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

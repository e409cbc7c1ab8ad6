"""`python run.py report [NAME…]`: one file that shows a run, or compares several, and opens anywhere without a network.

All of it comes from the files of the runs. page.html lays it out and escapes it (Jinja), curves.py draws.
"""

import base64
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

from ...config import build_config, to_dict
from ...errors import ConfigError, one_line
from ...files import run_directory, write_whole
from .. import CommandLine
from .curves import Curve, draw_curves, sample_line

NOT_DRAWN = ("split", "step", "epoch", "num_samples")
NUM_MEDIA = 3  # images and texts of each name: the newest


def main(line: CommandLine) -> int:
    """0, once the report of the runs that are named, or of config.yaml's, is written."""
    folders = [run_directory(name) for name in line.rest or [line.load_config().name]]
    path = (folders[0] if len(folders) == 1 else run_directory("")) / "report.html"
    write_report([run for folder in folders for run in find_runs(folder)], path)
    print(path)
    return 0


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, or the runs in it if it is a sweep's. ConfigError for any other."""
    runs = [folder / "metrics.jsonl", *sorted(folder.glob("*/metrics.jsonl"))]
    if not (runs := [path.parent for path in runs if path.exists()]):
        there = sorted({path.parent.name for path in run_directory("").glob("*/*") if path.suffix.startswith(".json")})
        raise ConfigError(f"{folder}: holds no run. Name one or more of: {', '.join(there) or 'none so far'}.")
    return runs[:1] if runs[0] == folder else runs


def write_report(directories: list[Path], path: Path) -> None:
    """Write the report of one run, or the comparison of several, to `path`."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["show"] = show
    environment.globals["sample_line"] = sample_line
    is_single, folder = len(directories) == 1, path.absolute().parent
    title = directories[0].name if is_single else f"{len(directories)} runs of {folder.name}"
    parts = describe_run(directories[0]) if is_single else compare_runs(directories)
    text = environment.get_template("page.html").render(title=title, curves=draw_all(directories), **parts)
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8", errors="backslashreplace"))


def show(value: Any) -> str:
    """A value as the page shows it."""
    if isinstance(value, list):
        return " ".join(map(show, value))
    return f"{value:.5g}" if isinstance(value, float) else "-" if value is None else str(value)


def describe_run(directory: Path) -> dict[str, Any]:
    """What the report shows of one run, besides the curves."""
    config, default = read_config(directory), default_config()
    log = directory / "logs" / "rank_0.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    newest: dict[str, list[dict[str, str]]] = {}
    for path in sorted(directory.glob("media/step_*_*"), reverse=True):
        _, step, name = path.stem.split("_", 2)
        if path.suffix in (".png", ".txt") and len(newest.setdefault(name, [])) < NUM_MEDIA:
            image = base64.b64encode(path.read_bytes()).decode() if path.suffix == ".png" else ""
            words = "" if image else path.read_text(encoding="utf-8", errors="replace")
            newest[name].append({"step": step.lstrip("0"), "image": image, "text": words})
    return {
        "summary": dotted(read_json(directory / "summary.json")),
        "times": re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text, re.MULTILINE),
        "resumed_after": re.findall(r"resuming after step (\d+)", text),
        "num_stops": text.count("saved: the same command continues"),
        "reports": [read_json(path) for path in sorted(directory.glob("reports/*.json"))],
        "media": newest,
        "config": config,
        "changed": {key: default[key] for key, value in config.items() if default.get(key, value) != value},
        "environment": dotted(read_json(directory / "environment.json")),
        "evaluation": dotted(read_json(directory / "evaluation.json")),
    }


def compare_runs(directories: Sequence[Path]) -> dict[str, Any]:
    """What the report shows of several runs, besides the curves: their differences, and means over seeds."""
    configs = [*map(read_config, directories)]
    all_keys = dict.fromkeys(key for config in configs for key in config if key != "name")
    keys = [key for key in all_keys if len({one_line(config.get(key)) for config in configs}) > 1]
    metric, mode = (configs[0].get(f"evaluation.{key}", "") for key in ("metric", "mode"))
    runs = []
    for path, config in zip(directories, configs, strict=True):
        summary, settings = read_json(path / "summary.json"), {key: one_line(config.get(key)) for key in keys}
        value, status = (summary.get("best") or {}).get(metric), summary.get("status", "not ended")
        runs.append({"name": path.name, "status": status, "value": value, "settings": settings})
    means = mean_over_seeds([(run["settings"], run["value"]) for run in runs], mode)
    return {"runs": runs, "keys": keys, "metric": metric, "means": means}


def mean_over_seeds(results: list[tuple[dict[str, Any], float | None]], mode: str) -> list[dict[str, Any]]:
    """Mean, standard deviation and number of the values of runs whose settings differ in the seed alone, best first."""
    groups: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for settings, value in results:
        rest = {key: text for key, text in settings.items() if key != "seed"}
        groups.setdefault(json.dumps(rest), (rest, []))[1].extend([] if value is None else [value])
    means = [
        {"settings": rest, "mean": mean(values), "std": stdev(values) if values[1:] else None, "num_runs": len(values)}
        for rest, values in groups.values()
        if values
    ]
    return sorted(means, key=lambda entry: entry["mean"], reverse=mode == "max")


def draw_all(directories: Sequence[Path]) -> list[str]:
    """A picture of each figure in metrics.jsonl: of one run, its splits together; of several, the runs."""
    pictures: dict[str, dict[int, Curve]] = {}
    for index, directory in enumerate(directories):
        for place, (split, lines) in enumerate(read_metrics(directory).items()):
            for key in dict.fromkeys(key for line in lines for key in line if key not in NOT_DRAWN):
                points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
                title, style = (key, place) if len(directories) == 1 else (f"{split}: {key}", index)
                pictures.setdefault(title, {})[style] = Curve(split, points)
    return [draw_curves(title, curves) for title, curves in pictures.items()]


def read_metrics(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of metrics.jsonl by split; a line that is being written is left out."""
    path, splits = directory / "metrics.jsonl", dict[str, list[dict[str, Any]]]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError, TypeError, KeyError):
            values = json.loads(line)
            splits.setdefault(values["split"], []).append(values)
    return splits


def read_config(directory: Path) -> dict[str, Any]:
    """The run's config.yaml under dotted keys."""
    with suppress(OSError, yaml.YAMLError):
        return dotted(yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8")))
    return {}


def default_config() -> dict[str, Any]:
    """The defaults in config.py, model.py and dataset.py; nothing if a field of these has none."""
    with suppress(ConfigError):
        return dotted(to_dict(build_config({})))
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file, or nothing if the run has not written it."""
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    return {}


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat

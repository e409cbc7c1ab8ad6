"""Writes the README's charts, docs/charts/*.svg, from the reports in benchmarks/ and docs/. Type `make charts`.

Each chart is written twice, for light and for dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
OURS, OTHERS = "#2f81f7", "#9aa4b2"
INK = {"light": "#24292f", "dark": "#d0d7de"}
BENCHMARKS = (
    ("RESULTS.md", "mlp, 1 rank"),
    ("RESULTS.md", "transformer, 2 ranks"),
    ("RESULTS-DATA.md", "mlp on tuples, 1 rank"),  # the trainer is the slowest here
)
GROUPS = {
    "processes killed (SIGKILL)": r"SIGKILL during|rank killed|loader worker killed",
    "stop signals": "SIGTERM|SIGUSR1",
    "disks full, gone, slow or read-only": "^disk",
    "checkpoints cut, flipped, foreign": "^checkpoint|: checkpoint",
    "configs and answers mutated, a run started twice": "^config|^answers|^two runs",
    "bad data, ranks that differ, memory": "^item|^text example|^ranks that|^memory|^evaluation",
}
"""{bar in the chart of faults: pattern of the rows in docs/reliability.md that the bar adds up}"""


def rows(path: Path, section: str = "") -> list[list[str]]:
    """Return the cells of the first table below `section`, without the table's head."""
    text = path.read_text(encoding="utf-8")
    text = text.partition(f"### {section}\n")[2] if section else text
    table = re.search(r"\|.*\|\n\|[-:| ]+\|\n((?:\|.*\|\n)+)", text)
    assert table, f"{path.name} has no table {section}"
    return [
        [cell.strip(" *") for cell in line.strip("|").split(" | ")]
        for line in table[1].splitlines()
    ]


def draw_speed(axes: Axes, report: str, section: str) -> None:
    """Draw the milliseconds per step for each loop of a benchmark, the fastest on top."""
    table = [row for row in rows(ROOT / "benchmarks" / report, section) if row[0] != "bare, again"]
    draw_bars(
        axes, f"{section}: milliseconds a step", {row[0]: int(row[1]) / 1000 for row in table}
    )


def draw_bars(axes: Axes, title: str, table: dict[str, float]) -> None:
    names = sorted(table, key=lambda name: -table[name])
    values = [table[name] for name in names]
    bars = axes.barh(
        names, values, color=[OURS if name == "generated trainer" else OTHERS for name in names]
    )
    axes.bar_label(
        bars,
        fmt="%.2f" if max(values) < 10 else "%.1f",
        padding=3,
        color=pyplot.rcParams["text.color"],
    )
    axes.margins(x=0.1)
    axes.set_title(title, loc="left")


def draw_faults(axes: Axes) -> None:
    """Draw, for each group of faults, the number injected and the number that lost work."""
    table = rows(ROOT / "docs" / "reliability.md")
    sums = {group: [0, 0] for group in GROUPS}
    for fault, tried, _, lost, _ in table:
        for group, pattern in GROUPS.items():
            if re.search(pattern, fault):
                sums[group][0] += int(tried)
                sums[group][1] += int(lost)
                break
    bars = axes.barh(
        list(sums)[::-1], [tried for tried, _ in list(sums.values())[::-1]], color=OURS
    )
    labels = [f"{tried:,} injected, {lost} lost" for tried, lost in sums.values()]
    axes.bar_label(bars, labels[::-1], padding=3, color=pyplot.rcParams["text.color"])
    axes.margins(x=0.6)
    axes.set_title("Faults that were injected, and runs that lost work", loc="left")


def draw_gpu(tables: dict[str, dict[str, float]], folder: Path) -> None:
    """Write gpu-light.svg and gpu-dark.svg to the folder. `tables` maps titles to {loop: milliseconds a step}."""
    num_bars = sum(len(table) for table in tables.values())
    for theme in themes():
        size = (7.5, 0.7 * len(tables) + 0.32 * num_bars)
        heights = [len(table) + 1 for table in tables.values()]
        figure, axes = pyplot.subplots(
            len(tables), 1, figsize=size, layout="constrained", height_ratios=heights, squeeze=False
        )
        for own, (title, table) in zip(axes[:, 0], tables.items(), strict=True):
            draw_bars(own, f"{title}: milliseconds a step", table)
        save(figure, folder / f"gpu-{theme}.svg")


def themes() -> Iterator[str]:
    """Yield the name of each theme, whose style holds until the next one is asked for."""
    for theme, ink in INK.items():
        style: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "ddp-template",
            "font.size": 11,
        }
        style |= {f"{part}.color": ink for part in ("text", "xtick", "ytick")}
        style |= {f"axes.spines.{side}": False for side in ("top", "right", "bottom", "left")}
        with pyplot.rc_context(style):
            yield theme


def main() -> None:
    folder = ROOT / "docs" / "charts"
    folder.mkdir(exist_ok=True)
    for theme in themes():
        figure, axes = pyplot.subplots(len(BENCHMARKS), 1, figsize=(7.5, 9), layout="constrained")
        for report_axes, (report, section) in zip(axes, BENCHMARKS, strict=True):
            draw_speed(report_axes, report, section)
        save(figure, folder / f"speed-{theme}.svg")
        figure, single = pyplot.subplots(figsize=(7.5, 2.9), layout="constrained")
        draw_faults(single)
        save(figure, folder / f"faults-{theme}.svg")


def save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.tick_params(length=0, which="both", labelbottom=False)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()

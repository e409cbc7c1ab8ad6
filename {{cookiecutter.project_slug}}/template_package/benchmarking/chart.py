"""The bar chart of a benchmark: time and memory, a bar a row."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

PLAIN, ADVISED, DOUBTFUL = "#9db7d5", "#1f5fa8", "#d9d9d9"


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the PNG. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    rows = report["rows"]
    names = [f"{row['name']}{' (wrong loss)' if row.get('is_loss_off') else ''}" for row in rows]
    colors = [
        DOUBTFUL if row.get("is_loss_off") else ADVISED if row["name"] == report["advised"] else PLAIN for row in rows
    ]
    figure = Figure(figsize=(11, 1.9 + 0.42 * len(rows)), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    times = [1000 * row["seconds_per_step"] for row in rows]
    labels = [f"{time:.3g} ms{_speed_up(row)}" for time, row in zip(times, rows, strict=True)]
    of_runs = [[1000 * run["seconds_per_step"] for run in row["runs"]] for row in rows]
    _bars(time_axes, names, times, colors, labels, [max(runs) for runs in of_runs])
    for place, runs in enumerate(of_runs):
        time_axes.plot([min(runs), max(runs)], [place, place], color="#333333", linewidth=1, marker="|", markersize=7)
    time_axes.set_title(f"time of a step of {report['global_batch_size']} samples", loc="left", fontsize=11)
    memory = [max(row["peak_memory_mib"]) for row in rows]
    labels = [f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB" for mib in memory]
    _bars(memory_axes, names, memory, colors, labels, memory)
    memory_axes.set_title("peak memory of a rank", loc="left", fontsize=11)
    time_axes.invert_yaxis()  # the first row on top; both share the axis
    title = f"Training {report['name']} on {report['devices']}; shorter bars are better"
    advice = textwrap.fill(report["advice"].partition(": python ")[0].partition(": torchrun ")[0], width=125)
    figure.suptitle(f"{title}\n{advice}", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=130)


def _bars(
    axes: Any, names: list[str], values: list[float], colors: list[str], labels: list[str], ends: list[float]
) -> None:
    """A bar for each name, and to the right of `ends` its label."""
    axes.barh(names, values, color=colors, height=0.7)
    for place, (label, end) in enumerate(zip(labels, ends, strict=True)):
        axes.annotate(label, (end, place), (7, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, 1.4 * max(ends))
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)  # each bar has its number
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _speed_up(row: dict[str, Any]) -> str:
    return f"  ({row['speed_up']:.2f}x)" if "speed_up" in row else ""

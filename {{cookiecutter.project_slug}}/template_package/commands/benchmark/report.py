"""From the runs to medians, the table and the fastest row."""

from __future__ import annotations

from statistics import median
from typing import Any

TOLERANCE = 0.02  # of losses, relative: rounding and other random numbers make less
COLUMNS = {  # heading: the key in a row's summary, and how its value is shown
    "row": ("name", "{}"),
    "s/step": ("seconds_per_step", "{:.4g}"),
    "spread": ("spread", "{:.0%}"),
    "samples/s": ("samples_per_second", "{:.0f}"),
    "speed-up": ("speed_up", "{:.2f}x"),
    "start-up s": ("startup_seconds", "{:.1f}"),
    "MiB/rank": ("peak_memory_mib", "{:.0f}"),
    "waiting": ("waiting_share", "{:.0%}"),
    "loss": ("shown_loss", "{}"),
}
LEGEND = """Medians of {rounds} runs; {steps} steps of {global_batch_size} samples, after {num_warm_up_steps} others.
spread: slowest - fastest run. start-up: from the command to the end of the first step. MiB/rank: of the largest rank.
waiting: for data. loss: mean of the last steps; (!): the row learned less than half as much as one device."""


def summarize_runs(name: str, command: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a row's runs, and the runs."""
    times = [run["seconds_per_step"] for run in runs]
    keys = ("seconds_per_step", "samples_per_second", "startup_seconds", "first_loss", "final_loss")
    medians = {key: median(run[key] for run in runs) for key in keys}
    return {
        **{"name": name, "command": command, **medians, "shown_loss": f"{medians['final_loss']:.4g}"},
        "spread": (max(times) - min(times)) / median(times) if len(times) > 1 else None,
        "waiting_share": median(max(run["waiting_shares"]) for run in runs),
        "peak_memory_mib": median(max(run["peak_memory_mib"]) for run in runs),
        "runs": runs,
    }


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `speed_up` over one device, and `is_loss_wrong`: it learned less than half as much, or is NaN."""
    if rows and rows[0]["name"] == "one device":
        base = rows[0]
        # Dropout draws other numbers on other ranks, which alone makes a fifth in the steep beginning of a training.
        gain = max(0.0, base["first_loss"] - base["final_loss"])
        limit = base["final_loss"] + gain / 2 + TOLERANCE * abs(base["final_loss"])
        for row in rows:
            row["speed_up"] = base["seconds_per_step"] / row["seconds_per_step"]
            row["is_loss_wrong"] = not row["final_loss"] <= limit
            row["shown_loss"] += " (!)" * row["is_loss_wrong"]
    return rows


def as_markdown(report: dict[str, Any]) -> str:
    """The table, the rows that did not run, and as the last line the fastest row with its command."""
    cells = [list(COLUMNS)]
    for row in report["rows"]:
        cells.append(["" if row.get(key) is None else form.format(row[key]) for key, form in COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * (width - 1) + ":" for width in widths])
    table = ["| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in cells]
    not_run = [f"- {row['name']}: {row['reason']}" for row in report["not_run"]]
    machine = [*report["devices"], report["platform"], f"torch {report['libraries']['torch']}"]
    fastest = "No row has a loss to trust."
    if sound := [row for row in report["rows"] if not row.get("is_loss_wrong")]:
        row = min(sound, key=lambda row: row["seconds_per_step"])
        speed_up = f" ({row['speed_up']:.2f} times the speed of one device)" if "speed_up" in row else ""
        fastest = f"The fastest row is {row['name']}{speed_up}: {row['command']}"
    lines = [f"# Benchmark of {report['name']}", "", "; ".join(machine), "", *table, "", LEGEND.format(**report), ""]
    return "\n".join([*lines, *(["Not run:", "", *not_run, ""] if not_run else []), fastest, ""])

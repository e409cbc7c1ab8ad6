"""From what the runs left to the table, benchmark.json, benchmark.md and the sentence of advice."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .running import Outcome

SAME_SPEED = 1.03
"""Rows that differ by less are equally fast: the first of them, which is the simplest, is advised."""
MUCH_WAITING, MUCH_LOAD = 0.2, 0.25
LOW_EFFICIENCY, IMPLAUSIBLE_EFFICIENCY = 0.6, 1.2
TOLERANCE = 0.02
"""Of losses, relative: rounding and other random numbers make less."""

COLUMNS = {  # heading: the row's key, and how its value is shown
    "row": ("name", "{}"),
    "s/step": ("seconds_per_step", "{:.4g}"),
    "spread": ("spread", "{:.0%}"),
    "samples/s": ("samples_per_second", "{:.0f}"),
    "speed-up": ("speed_up", "{:.2f}x"),
    "efficiency": ("efficiency", "{:.0%}"),
    "start-up s": ("startup_seconds", "{:.1f}"),
    "MiB/rank": ("peak_memory_mib", "{:.0f}"),
    "waiting": ("waiting_share", "{:.0%}"),
    "loss": ("final_loss", "{:.4g}"),
    "precision": ("precision", "{}"),
    "ranks": ("world_size", "{}"),
    "wrapper": ("wrapper", "{}"),
}
LEGEND = (
    "Medians over benchmark.rounds={rounds}; each run has fresh processes and times {steps} steps of "
    "{global_batch_size} samples, after {num_warm_up_steps} that do not count. spread: slowest - fastest run. "
    "speed-up: over one device. efficiency: speed-up / number of devices{sharing}. start-up: from the command to the "
    "end of the first step. MiB/rank: peak memory ({memory}) of the rank with the most. waiting: part of the time in "
    "which a rank waits for data. loss: training loss, mean of the last steps; it may differ by rounding and dropout. "
    "wrapper: the class that the ranks called as their model, or Horovod's optimizer."
)


def summarize(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A dict for each row that ran: medians over its runs, and the runs themselves."""
    rows = [_summary(outcome) for outcome in outcomes if outcome.runs]
    if rows and rows[0]["name"] == "one device":
        base = rows[0]
        for row in rows:
            row["speed_up"] = base["seconds_per_step"] / row["seconds_per_step"]
            row["efficiency"] = row["speed_up"] / row["num_devices"]
            row["is_loss_off"] = _is_off(row["final_loss"], base["final_loss"], base["first_loss"])
            row["has_learned"] = base["first_loss"] - base["final_loss"] > 2 * TOLERANCE * abs(base["final_loss"])
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells, headings first."""
    return [list(COLUMNS), *([_cell(row, *column) for column in COLUMNS.values()] for row in rows)]


def as_markdown(report: dict[str, Any], chart: str | None) -> str:
    """benchmark.md"""
    cells = table(report["rows"])
    marks = ["---" if heading in ("row", "precision", "wrapper") else "--:" for heading in cells[0]]
    lines = [f"| {' | '.join(line)} |" for line in (cells[0], marks, *cells[1:])]
    machine = report["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    hardware = f"{machine['cpu']}, {machine['num_cores']} cores"
    parts = [
        f"# Benchmark on {report['devices']}",
        f"`{report['command']}`",
        f"{report['advice']}",
        f"![time and memory of each row]({chart})" if chart else "",
        "\n".join(lines),
        legend(report),
        *not_run(report),
        f"Python {machine['python']}, {libraries}; {machine['platform']}; {hardware}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def legend(report: dict[str, Any]) -> str:
    """What the columns mean, and a warning if the machine had other work."""
    is_cpu, is_shared = "cpu" in report["device_ids"], share_hardware(report["device_ids"])
    memory = "resident" if is_cpu else "allocated on the GPU"
    sharing = f", all on the same {'cores' if is_cpu else 'GPU'}" if is_shared else ""
    load, num_cores = report["machine"]["load"], report["machine"]["num_cores"]
    words = LEGEND.format(memory=memory, sharing=sharing, **report)
    if not report["rows"][0].get("has_learned", True):
        words += " One device has hardly learned in these steps, so the losses prove nothing: raise benchmark.steps."
    if load > MUCH_LOAD * num_cores:
        words += f" The machine had other work (load {load:.1f} on {num_cores} cores): do not trust small differences."
    return words


def share_hardware(device_ids: Sequence[str]) -> bool:
    """Whether several ranks compute on the same cores or GPU: then their number alone makes nothing faster."""
    return len(set(device_ids)) < len(device_ids)


def not_run(report: dict[str, Any]) -> list[str]:
    """A paragraph with a line for each row that did not run, if there is one."""
    lines = []
    for row in report["not_run"]:
        log = f" ({row['log']})" if row["log"] else ""
        lines.append(f"- {row['name']}: {row['reason']}{log}")
    return ["\n".join(["Not run:", "", *lines])] if lines else []


def advise(rows: Sequence[dict[str, Any]], device_ids: Sequence[str], num_workers: int | str) -> tuple[str, str]:
    """The name of the fastest row, and a sentence: how it compares with one device, what holds it up, what to type."""
    sound = [row for row in rows if not row.get("is_loss_off")]
    if not sound or "speed_up" not in sound[0]:
        return "", "No advice: one device did not run, or to no finite loss, so there is nothing to compare with."
    fastest = min(row["seconds_per_step"] for row in sound)
    best = next(row for row in sound if row["seconds_per_step"] <= SAME_SPEED * fastest)
    others = [row["speed_up"] for row in sound[1:]]
    if best is sound[0]:
        words = "one device is the fastest way here"
        words += f" (the others reach {max(others):.2g} times its speed at most)" if others else ""
    else:
        place = f" on [{', '.join(device_ids)}]" if best["num_devices"] > 1 else ""
        bits = f" ({best['precision']})" if best["precision"] != "fp32" else ""
        words = f"{best['name']}{bits}{place} is {best['speed_up']:.2g} times as fast as one device"
    alike = [row for row in sound if row["precision"] == "fp32" and not row["is_compiled"]]
    if max(row["efficiency"] for row in alike) > IMPLAUSIBLE_EFFICIENCY:
        return best["name"], f"{words}: more devices alone do not gain so much, so measure again without other work"
    # 16 bits make one device faster too: what sharing costs shows in fp32.
    judged = next((row for row in alike if row["num_devices"] == best["num_devices"]), best)
    if best["waiting_share"] > MUCH_WAITING:
        share = f"{best['waiting_share']:.0%}"
        words += f"; data loading is the limit ({share} of the time): raise loader.num_workers (now {num_workers})"
    elif judged["efficiency"] < LOW_EFFICIENCY and not share_hardware(device_ids):
        words += (
            f"; sharing gradients is the limit ({judged['efficiency']:.0%} of what {best['num_devices']} devices could "
            "do): raise training.global_batch_size"
        )
    return best["name"], f"{words}: {best['command']}"


def _summary(outcome: Outcome) -> dict[str, Any]:
    runs, row = outcome.runs, outcome.row
    means = {
        key: median(run[key] for run in runs)
        for key in ("seconds_per_step", "samples_per_second", "startup_seconds", "first_loss", "final_loss")
    }
    times = [run["seconds_per_step"] for run in runs]
    peaks = zip(*(run["peak_memory_mib"] for run in runs), strict=True)
    return {
        "name": row.name,
        "command": row.command,
        "world_size": len(runs[0]["ranks"]),
        "wrapper": runs[0]["ranks"][0]["wrapper"],
        **{key: runs[0][key] for key in ("num_devices", "precision", "is_compiled", "micro_batch_size")},
        **means,
        "spread": (max(times) - min(times)) / median(times) if len(times) > 1 else None,
        "waiting_share": median(max(rank["waiting_share"] for rank in run["ranks"]) for run in runs),
        "peak_memory_mib": [median(peak) for peak in peaks],
        "runs": [{key: value for key, value in run.items() if key != "environment"} for run in runs],
    }


def _is_off(loss: float, wanted: float, first: float) -> bool:
    """Whether a row does not learn as one device does: it has gained less than half as much (or it is NaN).

    Dropout draws other numbers on other ranks, which alone makes a fifth in the steep beginning of a training.
    """
    return not loss <= wanted + 0.5 * max(0.0, first - wanted) + TOLERANCE * abs(wanted)


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = max(row[key]) if key == "peak_memory_mib" else row.get(key)
    text = "" if value is None else form.format(value)
    return f"{text} (!)" if key == "final_loss" and row.get("is_loss_off") else text

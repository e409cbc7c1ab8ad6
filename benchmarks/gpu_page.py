"""Writes the GPU report's page, its JSON file and its chart from the results so far."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_plan import COMPILED, Comparison, comparisons, flops_per_sample
from plan import BARE, OURS, TUNED
from report import PEER_NAMES

ROOT = Path(__file__).resolve().parents[1]
PEAKS = (
    ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H200 NVL", 835e12), ("H100", 989e12), ("H200", 989e12),
    ("A100", 312e12),
)  # fmt: skip
"""Dense bf16 operations per second by a part of the card's name, the most special first (NVIDIA's data sheets of H100,
H200 and A100, whose larger figures "with sparsity" are halved). TF32 has half of each."""
UNITS = {"gpt": ("tokens/s", 1024), "bert": ("samples/s", 1), "resnet": ("images/s", 1)}
TESTS = {
    "tests": "`pytest -m gpu tests/machinery` in the project's folder",
    "tests-small": "`tests/machinery/test_gpu.py` in a small project, but for what `size=full` alone has",
}
LOSS_TOLERANCE = 0.05
"""Relative difference of final losses from the tuned loop's. Rounding in 16 bits and other kernels explain less."""


def write(results: dict[str, Any], folder: Path) -> None:
    """Write results-gpu.json and RESULTS-GPU.md."""
    contents = {"results-gpu.json": lambda: json.dumps(results, indent=1) + "\n"}
    contents["RESULTS-GPU.md"] = lambda: markdown(results)
    for name, content in contents.items():
        beside = folder / f".{name}.tmp"
        beside.write_text(content(), encoding="utf-8")
        beside.replace(folder / name)  # whole, whenever the run is cut off


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw the milliseconds a step of each comparison so far, in docs/charts or, for another folder, in that one."""
    folder = ROOT / "docs" / "charts" if folder == ROOT / "benchmarks" else folder
    tables = {
        name: medians(results, name, "milliseconds")
        for name in results["names"]
        if name in results["rows"]
    }
    if not (shown := {name: table for name, table in tables.items() if len(table) > 1}):
        return
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import charts

        charts.draw_gpu(shown, folder)
    # matplotlib is missing, or of another version: the page has the figures
    except Exception as error:
        print(f"no chart: {error}", flush=True)


def markdown(results: dict[str, Any]) -> str:
    machine, rows = results["machine"], results["rows"]
    facts = ", ".join(f"{key} {value}" for key, value in machine.items() if key != "card" and value)
    card = machine["card"] or "A rehearsal: tiny networks on the CPU, whose figures mean nothing"
    blocks = [
        "# Results on a GPU",
        f"The last run's machine: {card}; {facts}. Each table names its own card.",
        "\n".join(f"    {command}" for command in results["commands"]),
        "Written by `benchmarks/gpu.py` (`make gpu-report`), row by row. A later run adds its rows to those here, or "
        "replaces the same ones. Each figure is the median "
        "of laps (a log line each) after the warm-up; x is a ratio to a run of the same table. All loops but `bare` "
        "take whole batches from pinned memory and use the fused AdamW. Compiled loops share the compiler's cache: "
        "the first one of a table fills it. A difference is within the noise if the laps of a run differ by more.",
    ]  # fmt: skip
    plan = {
        name: comparison
        for name in rows
        for comparison in _plan(rows[name])
        if comparison.name == name
    }
    if aims := [
        aim
        for name in results["names"]
        if name in plan and name in rows
        for aim in _aims(results, plan[name])
    ]:
        blocks.append("\n".join(["| aim | measured | |", "|---|---:|---|", *aims]))
    for name in results["names"]:
        if name in TESTS and name in rows:
            blocks += _tests(name, rows[name])
        elif name in plan and name in rows:
            blocks += [
                f"## {name}",
                f"{plan[name].title}. {_where(rows[name])}",
                _table(results, plan[name]),
                *_failures(rows[name]),
            ]
        elif name in rows:
            title = "ResNet-50, bf16: how a batch is copied to the GPU (DECISIONS 102)"
            blocks += [
                f"## {name}",
                f"{title}. {_where(rows[name])}",
                _copies(results),
                *_failures(rows[name]),
            ]
    left = [name for name in results["names"] if not rows.get(name, {}).get("is_complete")]
    blocks.append("## Not reached" if left else "Every row was reached.")
    if left:
        blocks.append(f'{", ".join(left)}: `make gpu-report ARGS="--rows {",".join(left)}"`')
    return "\n\n".join(blocks) + "\n"


def medians(results: dict[str, Any], name: str, key: str) -> dict[str, float]:
    """Return the row's median of `key` for each label that has one."""
    found: dict[str, list[float]] = {}
    for entry in results["rows"][name]["entries"]:
        if entry.get(key) is not None:
            found.setdefault(entry["label"], []).append(entry[key])
    return {label: statistics.median(values) for label, values in found.items()}


def _plan(row: dict[str, Any]) -> list[Comparison]:
    return comparisons(row["machine"]["memory_gib"])


def _where(row: dict[str, Any]) -> str:
    return f"{row['machine']['card'] or 'CPU'}, torch {row['machine']['torch']}, {row['date']}."


def _mfu(results: dict[str, Any], comparison: Comparison, milliseconds: float) -> float | None:
    """Return the part of the card's peak that the network's operations take, or None if one of them is unknown."""
    case = comparison.variants[0].case
    flops, card = flops_per_sample(case.work), results["rows"][comparison.name]["machine"]["card"]
    peak = next((value for name, value in PEAKS if name in card), None)
    if flops is None or peak is None:
        return None
    return (
        flops
        * case.batch_size
        / (milliseconds / 1000)
        / (peak if case.precision == "bf16" else peak / 2)
    )


def _table(results: dict[str, Any], comparison: Comparison) -> str:
    keys = (
        "milliseconds",
        "spread",
        "startup_seconds",
        "peak_memory_mib",
        "waiting_share",
        "final_loss",
    )
    times, spreads, starts, peaks, shares, losses = (
        medians(results, comparison.name, key) for key in keys
    )
    case, base = comparison.variants[0].case, times.get(comparison.base)
    unit, number = UNITS[case.work]
    lines = [
        f"| | ms a step | x {comparison.base} | laps differ by | {unit} | MFU | start to first step, s | peak MiB "
        "| waits for data | loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for label, milliseconds in times.items():
        mfu = _mfu(results, comparison, milliseconds)
        shown = (
            f"{mfu:.1%}"
            if mfu is not None
            else "peak unknown"
            if flops_per_sample(case.work)
            else ""
        )
        is_strange = (
            abs(losses[label] / losses.get(comparison.base, losses[label]) - 1) > LOSS_TOLERANCE
        )
        cells = [
            f"**{label}**" if label == OURS else label,
            f"{milliseconds:.2f}",
            f"{milliseconds / base:.3f}" if base else "",
            f"{spreads.get(label, 0):.1%}",
            f"{number * case.batch_size / milliseconds * 1000:,.0f}",
            shown,
            f"{starts[label]:.1f}",
            f"{peaks[label]:,.0f}",
            f"{shares[label]:.1%}" if label in shares else "",
            f"{losses[label]:.3f}{' (differs)' if is_strange else ''}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _copies(results: dict[str, Any]) -> str:
    times = medians(results, "copies", "milliseconds")
    today = next(iter(times.values()), 0.0)
    lines = ["| copy | ms a step | x today's way (the first) |", "|---|---:|---:|"]
    return "\n".join(
        lines
        + [f"| {label} | {value:.2f} | {value / today:.3f} |" for label, value in times.items()]
    )


def _failures(row: dict[str, Any]) -> list[str]:
    failed = [(entry["label"], entry["reason"]) for entry in row["entries"] if entry.get("reason")]
    return [
        f"{label}: {reason}" if "\n" not in reason else f"{label}:\n\n```\n{reason}\n```"
        for label, reason in failed
    ]


def _tests(name: str, row: dict[str, Any]) -> Iterator[str]:
    outcomes = row["entries"]
    counts = {
        kind: sum(outcome["outcome"] == kind for outcome in outcomes)
        for kind in ("passed", "failed", "skipped")
    }
    yield f"## {name}"
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    what = f"{TESTS[name]}, several at a time: {words}, of {len(outcomes)}."
    yield f"{what} {_where(row)}"
    lines = ["| test | outcome | s |", "|---|---|---:|"]
    for outcome in outcomes:
        reason = f": {outcome['reason']}" if outcome["outcome"] == "skipped" else ""
        reason = outcome.get("note", reason)  # written into results-gpu.json by hand
        label = outcome["label"].rpartition("::")[2]
        lines.append(f"| `{label}` | {outcome['outcome']}{reason} | {outcome.get('seconds', '')} |")
    yield "\n".join(lines)
    for outcome in outcomes:
        if outcome["outcome"] == "failed":
            yield f"`{outcome['label']}`:\n\n```\n{outcome.get('reason', '')}\n```"


def _aims(results: dict[str, Any], comparison: Comparison) -> Iterator[str]:
    """Yield a line for each aim of the comparison: measured, met or missed, and the reason that `reasons` gives."""
    times, name = medians(results, comparison.name, "milliseconds"), comparison.name
    if OURS not in times:
        return
    limits = [(TUNED, 1.02, "at most 1.02 x tuned")]
    limits += [(loop, 1.0, f"not slower than {loop}") for loop in (BARE, *PEER_NAMES)]
    noise = medians(results, name, "spread")
    judged = []
    for loop, limit, aim in limits:
        if loop in times:
            ratio = times[OURS] / times[loop]
            is_clear = abs(ratio - limit) > max(noise.get(OURS, 0), noise.get(loop, 0))
            judged.append(
                (
                    f"{name}: {aim}",
                    ratio <= limit,
                    f"{ratio:.3f} x{'' if is_clear else ', within the noise'}",
                )
            )
    mfu = _mfu(results, comparison, times[OURS])
    if name == COMPILED and mfu is not None:
        judged.append((f"{name}: MFU at least 45 %", mfu >= 0.45, f"{mfu:.1%}"))
    for aim, is_met, shown in judged:
        reason = results["reasons"].get(aim, "")  # written into results-gpu.json by hand
        yield f"| {aim} | {shown} | {'met' if is_met else f'**missed** {reason}'.strip()} |"

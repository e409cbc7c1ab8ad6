"""Turns measurements into tables: medians over rounds of the ratios to the bare loop, and whether the aims are met."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions, version
from pathlib import Path

from measure import Measurement
from plan import AGAIN, BARE, OURS, PEERS, ROWS, TRANSFORMERS, TUNED

LIBRARIES = ("torch", "accelerate", "lightning")
PEER_NAMES = [peer.name for peer in PEERS]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
CPU_INFO = Path("/proc/cpuinfo")
TOLERANCE, TOLERANCE_BETWEEN_OPTIMIZERS = 1e-5, 1e-3
"""Relative tolerances of final losses. The second is larger: the fused AdamW and the default one round differently."""


class Table:
    """The measurements of one case."""

    def __init__(self, measurements: Sequence[Measurement], case: str) -> None:
        self.rows: dict[str, list[Measurement]] = {}
        for measurement in measurements:
            if measurement.case == case:
                self.rows.setdefault(measurement.row, []).append(measurement)

    def values(self, row: str, quantity: str) -> list[float]:
        """Return the row's values of the quantity, one for each round."""
        return [getattr(measurement, quantity) for measurement in self.rows[row]]

    def median(self, row: str, quantity: str) -> float:
        return statistics.median(self.values(row, quantity))

    def ratios(self, row: str, base: str, quantity: str) -> list[float]:
        """Return row / base for each round."""
        pairs = zip(self.values(row, quantity), self.values(base, quantity), strict=True)
        return [value / other for value, other in pairs]

    def ratio(self, row: str, base: str, quantity: str) -> float:
        return statistics.median(self.ratios(row, base, quantity))

    def excess(self, row: str, base: str, quantity: str) -> float:
        """Return the median over the rounds of row - base."""
        pairs = zip(self.values(row, quantity), self.values(base, quantity), strict=True)
        return statistics.median(value - other for value, other in pairs)


def describe_machine() -> dict[str, str | int]:
    """Return the machine's processor, cores and system, and the versions of Python and the libraries."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    versions = {name: version(name) for name in LIBRARIES}
    versions |= {
        found.name: found.version
        for found in distributions(name="transformers", path=[str(TRANSFORMERS)])
    }
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": cores,
        "system": platform.system(),
        "python": platform.python_version(),
        **versions,
    }


def markdown(
    measurements: Sequence[Measurement],
    machine: dict[str, str | int],
    *,
    num_rounds: int,
    minutes: float,
) -> str:
    """Return all tables as Markdown."""
    words = ", ".join(f"{key} {value}" for key, value in machine.items())
    blocks = [
        f"`python benchmarks/run.py --rounds {num_rounds}`, {minutes:.0f} minutes; {words}; CPU, gloo, fp32, "
        "one thread a rank.",
        "Medians over rounds. x is the median of the rounds' ratios to `bare` of the same round, with the smallest and "
        "the largest. The noise is the median difference between `bare, again` and `bare` in a round.",
    ]
    cases = list(dict.fromkeys(measurement.case for measurement in measurements))
    tables = {case: Table(measurements, case) for case in cases}
    if all({OURS, BARE, AGAIN, TUNED} <= table.rows.keys() for table in tables.values()):
        blocks.append(_aims(tables))
    for case, table in tables.items():
        blocks.append(f"### {case}\n\n{_table(table)}")
    return "\n\n".join(blocks) + "\n"


def differing_losses(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line for each final loss that differs too much from that of a loop with which it is compared.

    A run is compared closely with the bare or tuned loop that has its optimizer, and loosely with the bare loop.
    """
    references = {
        (m.case, m.row): m.final_loss for m in reversed(measurements) if m.row in (BARE, TUNED)
    }
    is_tuned = {row.name: row.is_tuned for row in ROWS}
    found = []
    for measurement in measurements:
        own = TUNED if is_tuned[measurement.row] else BARE
        for base, tolerance in ((own, TOLERANCE), (BARE, TOLERANCE_BETWEEN_OPTIMIZERS)):
            loss = references.get((measurement.case, base))
            if loss is not None and not abs(measurement.final_loss / loss - 1) < tolerance:
                found.append(
                    f"{measurement.case}: {measurement.row}: {measurement.final_loss}, {base}: {loss}"
                )
    return found


def replace_section(path: Path, text: str) -> None:
    """Put the text between the file's BEGIN and END marks, and keep all other text."""
    former = path.read_text(encoding="utf-8") if path.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    before, rest = former.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def _table(table: Table) -> str:
    lines = [
        "| loop | µs a step | x bare | µs over tuned | start-up s | x bare | peak MiB a rank | final loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(table.rows, key=lambda row: table.median(row, "microseconds")):
        name = f"**{row}**" if row == OURS else row
        memory = statistics.median(
            max(measurement.peak_memory_mib) for measurement in table.rows[row]
        )
        excess = f"{table.excess(row, TUNED, 'microseconds'):+.0f}" if TUNED in table.rows else ""
        lines.append(
            f"| {name} | {table.median(row, 'microseconds'):.0f} | {_spread(table, row, 'microseconds')} | {excess} "
            f"| {table.median(row, 'startup_seconds'):.2f} | {_spread(table, row, 'startup_seconds')} "
            f"| {memory:.0f} | {table.median(row, 'final_loss'):.5f} |"
        )
    return "\n".join(lines)


def _spread(table: Table, row: str, quantity: str) -> str:
    if BARE not in table.rows:
        return ""
    ratios = table.ratios(row, BARE, quantity)
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _aims(tables: dict[str, Table]) -> str:
    judged = [(case, *aim) for case, table in tables.items() for aim in _judge(case, table)]
    missed = [f"{case}: {aim} ({shown})" for case, aim, is_met, _, shown in judged if not is_met]
    lines = [
        f"{len(judged) - len(missed)} of {len(judged)} aims are met. Missed: {'; '.join(missed) or 'none'}.",
        "",
    ]
    lines += ["| aim of the generated trainer | measured | |", "|---|---:|---|"]
    for case, aim, is_met, is_clear, shown in judged:
        verdict = ("met" if is_met else "**missed**") + ("" if is_clear else ", within the noise")
        lines.append(f"| {case}: {aim} | {shown} | {verdict} |")
    return "\n".join(lines)


def _judge(case: str, table: Table) -> Iterator[tuple[str, bool, bool, str]]:
    """Yield each aim for the case, whether it is met, whether the margin exceeds the noise, and the measured value."""
    is_small = case.startswith("mlp")
    if " on " in case:  # data sets as people write them
        limit = 0.75 if "tensors" in case else 1.05
        yield _judge_ratio(table, f"at most {limit} x bare", BARE, limit)
        for peer in ("Accelerate", "Fabric"):
            yield _judge_ratio(table, f"step not slower than {peer}", peer, 1.0)
        return
    limit = 0.9 if not is_small else 0.6 if case.endswith("1 rank") else 0.85
    yield _judge_ratio(table, f"at most {limit} x bare", BARE, limit)
    if is_small:
        excess = table.excess(OURS, TUNED, "microseconds")
        pairs = zip(
            table.values(AGAIN, "microseconds"), table.values(BARE, "microseconds"), strict=True
        )
        noise = statistics.median(abs(again - bare) for again, bare in pairs)
        yield (
            "at most 15 µs above tuned",
            excess <= 15,
            abs(excess - 15) > noise,
            f"{excess:+.0f} µs",
        )
    else:
        yield _judge_ratio(table, "at most 1.02 x tuned", TUNED, 1.02)
    quantities = {"microseconds": "step"}
    if case.endswith("2 ranks"):
        quantities["startup_seconds"] = "start-up"
        yield _judge_ratio(
            table, "start-up at most 0.75 x bare mp.spawn", BARE, 0.75, "startup_seconds"
        )
    for quantity, word in quantities.items():
        for peer in sorted(row for row in table.rows if row.removesuffix(", tuned") in PEER_NAMES):
            yield _judge_ratio(table, f"{word} not slower than {peer}", peer, 1.0, quantity)


def _judge_ratio(
    table: Table, aim: str, base: str, limit: float, quantity: str = "microseconds"
) -> tuple[str, bool, bool, str]:
    ratio = table.ratio(OURS, base, quantity)
    noise = statistics.median(abs(again - 1) for again in table.ratios(AGAIN, BARE, quantity))
    return aim, ratio <= limit, abs(ratio - limit) > noise, f"{ratio:.3f} x"

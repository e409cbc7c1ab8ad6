"""Measures the generated trainer against bare loops and other libraries' trainers, in interleaved rounds.

python benchmarks/run.py              5 rounds; writes RESULTS.md and results.json
python benchmarks/run.py --quick      one short round of everything, to see that it runs; writes nothing
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from measure import HERE, Bench, Measurement
from plan import CASES, ROWS, rows_of, shorten
from report import describe_machine, differing_losses, markdown, replace_section


def main() -> None:
    arguments = parse_arguments()
    # the others have a file of their own
    of_batches = [case for case in CASES if case.data == "batches"]
    cases = (
        [shorten(case) for case in CASES]
        if arguments.quick
        else CASES
        if arguments.case
        else of_batches
    )
    cases = [case for case in cases if arguments.case in case.name]
    rows = [row for row in ROWS if not arguments.rows or row.name in arguments.rows.split(";")]
    measurements: list[Measurement] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        bench = Bench(Path(folder), cases)
        for number in range(1 if arguments.quick else arguments.rounds):
            for case in cases:
                own = [row for row in rows_of(case) if row in rows]
                random.Random(number).shuffle(own)  # no row always comes after the same one
                for row in own:
                    measurement = bench.run(row, case)
                    measurements.append(measurement)
                    print(
                        f"[{time.monotonic() - started:5.0f} s] round {number + 1}, {case.name}: {row.name}: "
                        f"{measurement.microseconds:.0f} µs, start-up {measurement.startup_seconds:.2f} s, "
                        f"loss {measurement.final_loss:.6f}",
                        flush=True,
                    )
    finish(measurements, arguments, minutes=(time.monotonic() - started) / 60)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="one round of 150 steps each; no file is written"
    )
    parser.add_argument(
        "--case", default="", help="only the cases whose name contains this, such as 'mlp, 1'"
    )
    parser.add_argument(
        "--output",
        default="",
        help="a file beside this one for the tables, such as RESULTS-DATA.md",
    )
    parser.add_argument(
        "--rows", default="", help="only these rows, with ; between; no file is written"
    )
    return parser.parse_args()


def finish(measurements: list[Measurement], arguments: argparse.Namespace, minutes: float) -> None:
    """Print the tables, fail if the final losses of the loops differ, and write the files."""
    machine = describe_machine()
    text = markdown(
        measurements,
        machine,
        num_rounds=1 if arguments.quick else arguments.rounds,
        minutes=minutes,
    )
    print(text)
    if differences := differing_losses(measurements):
        raise SystemExit("the final losses are not equal:\n" + "\n".join(differences))
    if arguments.output:
        replace_section(HERE / arguments.output, text)
    elif not (arguments.quick or arguments.case or arguments.rows):
        replace_section(HERE / "RESULTS.md", text)
        content = {
            "machine": machine,
            "measurements": [asdict(measurement) for measurement in measurements],
        }
        (HERE / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

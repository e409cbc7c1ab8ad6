"""Runs what only a GPU can show, and writes RESULTS-GPU.md, results-gpu.json and a chart, row by row.

python benchmarks/gpu.py                          all rows in their order; starts none after 8 minutes
python benchmarks/gpu.py --rows gpt-tf32,copies   these rows; adds them to the results that are there
python benchmarks/gpu.py --rehearse               every row on the CPU, with tiny networks, in build/gpu-rehearsal
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NEEDED = "torch numpy pydantic yaml torchmetrics lightning_utilities tqdm safetensors pynvml pytest pytest_timeout"
TESTS, SMALL_TESTS, COPIES = "tests", "tests-small", "copies"
MAX_TEST_SECONDS = 240.0
NUM_JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))  # a test has two ranks at most
DESCRIBE = """
import importlib.metadata, json, platform, torch
facts = {"card": "", "python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
facts["memory_gib"] = 0
if torch.cuda.is_available():
    import pynvml
    pynvml.nvmlInit()
    facts |= {"card": torch.cuda.get_device_name(), "driver": pynvml.nvmlSystemGetDriverVersion()}
    facts["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
installed = {found.name: found.version for found in importlib.metadata.distributions()}
print(json.dumps(facts | {name: installed[name] for name in ("accelerate", "lightning", "transformers") if name in installed}))
"""  # noqa: E501


@dataclass
class Report:
    """The results so far. save() writes them, so that a run which is cut off keeps them."""

    results: dict[str, Any]
    folder: Path
    write: Callable[[dict[str, Any], Path], None]

    def begin(self, row: str) -> dict[str, Any]:
        """Return a new, empty entry for the row, in place of a former one."""
        machine = {key: self.results["machine"][key] for key in ("card", "torch", "memory_gib")}
        now = f"{datetime.now():%Y-%m-%d %H:%M}"
        self.results["rows"][row] = {
            "date": now,
            "machine": machine,
            "entries": [],
            "is_complete": False,
        }
        entry: dict[str, Any] = self.results["rows"][row]
        return entry

    def save(self) -> None:
        try:
            self.write(self.results, self.folder)
        except Exception:  # the page must not end the report: the JSON file is written first
            traceback.print_exc()


def main() -> None:
    arguments = parse_arguments()
    if missing := [name for name in NEEDED.split() if find_spec(name) is None]:
        sys.exit(
            f"error: {sys.executable} has no {', '.join(missing)}. Put them on PYTHONPATH; nothing is installed here."
        )
    deadline = time.monotonic() + 60 * arguments.minutes
    from gpu_page import draw, write
    from gpu_plan import comparisons

    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
    environment = own if arguments.rehearse else {}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    if done.returncode:
        sys.exit(f"error: torch does not start:\n{done.stderr[-2000:]}")
    machine = json.loads(done.stdout.splitlines()[-1])
    if not machine["card"] and not arguments.rehearse:
        sys.exit(
            "error: torch sees no GPU. Try the report on the CPU: python benchmarks/gpu.py --rehearse"
        )
    plan = {comparison.name: comparison for comparison in comparisons(machine["memory_gib"])}
    names = [TESTS, SMALL_TESTS, *plan]
    names.insert(names.index("resnet-bf16-compile"), COPIES)
    chosen = arguments.rows.split(",") if arguments.rows else names
    if unknown := set(chosen) - set(names):
        sys.exit(f"error: --rows: there is no {', '.join(unknown)}; there are {', '.join(names)}")
    folder = arguments.output or (
        HERE.parent / "build" / "gpu-rehearsal" if arguments.rehearse else HERE
    )
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(former_results(folder, machine), folder, write)
    report.results["names"] = names
    report.results["commands"].append("python benchmarks/gpu.py " + " ".join(sys.argv[1:]))
    with tempfile.TemporaryDirectory(prefix="gpu_report_", ignore_cleanup_errors=True) as temporary:
        work = Path(temporary)
        environment |= {
            "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
            "TRITON_CACHE_DIR": str(work / "triton"),
        }
        cases = [variant.case for comparison in plan.values() for variant in comparison.variants]

        @cache
        def bench() -> Any:  # if it fails, each row says why
            from measure import Bench

            return Bench(Path(tempfile.mkdtemp(dir=work)), cases, environment)

        for name in chosen:
            if time.monotonic() > deadline:
                break
            print(
                f"[{60 * arguments.minutes + time.monotonic() - deadline:4.0f} s] {name}",
                flush=True,
            )
            if name in (TESTS, SMALL_TESTS):
                run_tests(report, name, work / name, environment, deadline)
                continue
            with suppress(Exception):  # before two threads of a rehearsal would both make it
                bench()
            if name == COPIES:
                run_copies(report, bench, plan["resnet-bf16"].variants[0].case)
            else:
                run_comparison(report, bench, plan[name], deadline, arguments.rounds)
            draw(report.results, folder)  # not after each run: it takes a second
    report.save()
    print((folder / "RESULTS-GPU.md").read_text(encoding="utf-8"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="start no further row, nor run, after so long"
    )
    parser.add_argument("--rows", default="", help="only these rows, with commas between")
    parser.add_argument(
        "--rounds", type=int, default=1, help="so many runs of each loop, taking turns"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="the folder for the page, its JSON file and, if given, the charts",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny networks on the CPU; tests are only collected"
    )
    return parser.parse_args()


def former_results(folder: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the folder's results, which may be of other cards, or empty ones. Each row names its own."""
    path = folder / "results-gpu.json"
    former: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"commands": [], "rows": {}, "reasons": {}} | former | {"machine": machine}


def run_tests(
    report: Report, name: str, work: Path, environment: dict[str, str], deadline: float
) -> None:
    import gpu_tests

    entry = report.begin(name)
    is_rehearsal = not report.results["machine"]["card"]

    def show(outcomes: list[dict[str, Any]]) -> None:
        entry["entries"] = outcomes
        report.save()

    seconds, num_jobs = (
        min(MAX_TEST_SECONDS, deadline - time.monotonic()),
        1 if is_rehearsal else NUM_JOBS,
    )
    is_small = name == SMALL_TESTS
    show(gpu_tests.run_tests(work, environment, seconds, num_jobs, show, is_small=is_small))
    entry["is_complete"] = all(
        outcome["outcome"] in ("passed", "failed", "skipped") for outcome in entry["entries"]
    )
    report.save()


def run_comparison(
    report: Report, bench: Callable[[], Any], comparison: Any, deadline: float, rounds: int
) -> None:
    """Run each variant, `rounds` times in turn. One that fails becomes an entry with the reason."""
    entry = report.begin(comparison.name)

    def run(variant: Any) -> list[dict[str, Any]] | None:
        return (
            attempt(variant.label, lambda: measured(bench, variant))
            if time.monotonic() < deadline
            else None
        )

    is_rehearsal = not report.results["machine"]["card"]
    # only a rehearsal may run two at a time
    run_all = ThreadPoolExecutor(2).map if is_rehearsal else map
    for entries in run_all(run, comparison.variants * rounds):
        if entries is None:
            return
        entry["entries"] += entries
        report.save()
    entry["is_complete"] = True
    report.save()


def run_copies(report: Report, bench: Callable[[], Any], case: Any) -> None:
    def measure() -> Iterator[dict[str, Any]]:
        for label, times in bench().run_script(HERE / "copies.py", case).items():
            yield from ({"label": label, "milliseconds": value} for value in times)

    entry = report.begin(COPIES)
    entry["entries"], entry["is_complete"] = attempt(COPIES, measure), True
    report.save()


def measured(bench: Callable[[], Any], variant: Any) -> Iterator[dict[str, Any]]:
    from gpu_plan import PACKAGES

    package = PACKAGES.get(variant.loop.name)
    if package and find_spec(package) is None:
        yield {"label": variant.label, "reason": f"{package} is not installed"}
        return
    found = bench().run(variant.loop, variant.case)
    print(f"    {variant.label}: {found.microseconds / 1000:.2f} ms a step", flush=True)
    yield {
        "label": variant.label,
        "milliseconds": found.microseconds / 1000,
        "startup_seconds": found.startup_seconds,
        "peak_memory_mib": max(found.peak_memory_mib),
        "waiting_share": found.waiting_share,
        "final_loss": found.final_loss,
        "spread": found.spread,
    }


def attempt(label: str, measure: Callable[[], Iterator[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what `measure` yields or, if it fails, an entry with the reason: one row must not end the report."""
    try:
        return list(measure())
    except Exception as error:
        reason = "\n".join(str(error).strip().splitlines()[-6:]) or type(error).__name__
        print(f"    {label}: {reason}", flush=True)
        return [{"label": label, "reason": reason}]


if __name__ == "__main__":
    main()

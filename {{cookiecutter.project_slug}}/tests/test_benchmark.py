"""`run.py benchmark`: each row is what it says, what cannot run has its reason, and the advice follows the numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from template_package.benchmarking import running
from template_package.benchmarking.chart import draw
from template_package.benchmarking.plan import Row, plan
from template_package.benchmarking.report import advise, summarize
from template_package.benchmarking.running import Outcome, find_reason
from template_package.config import LoaderConfig
from template_package.launching.distributed import RankContext
from template_package.training.loader import TrainLoader

from conftest import PACKAGE, ROOT, Project

NOT_TRAINING = """
from ..config import DdpConfig
from .ddp import DistributedDataParallelStrategy


class FullyShardedStrategy(DistributedDataParallelStrategy):
    def __init__(self, config, context, options):
        super().__init__(config, context, DdpConfig())

    def optimizer_step(self, max_gradient_norm):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        return super().optimizer_step(max_gradient_norm)
"""
ON_ONE_DEVICE = """
from .ddp import DistributedDataParallelStrategy


class AccelerateStrategy(DistributedDataParallelStrategy):
    num_devices = 1
"""
needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc: processes cannot be found")
WITHOUT_LIBRARY = "import a_library_that_is_not_here\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_row_is_what_it_says_and_what_cannot_run_has_its_reason(project: Project) -> None:
    strategies = project.folder / PACKAGE / "strategies"
    for name in ("data_parallel", "fsdp", "accelerate", "deepspeed", "horovod"):
        (strategies / f"{name}.py").unlink(missing_ok=True)
    (strategies / "fsdp.py").write_text(NOT_TRAINING, encoding="utf-8")
    (strategies / "accelerate.py").write_text(ON_ONE_DEVICE, encoding="utf-8")
    (strategies / "horovod.py").write_text(WITHOUT_LIBRARY, encoding="utf-8")
    words = ["benchmark", "benchmark.steps=60", "benchmark.rounds=1", "name=b", "optimizer.learning_rate=0.03"]
    output, errors = project.start(*words).communicate(timeout=280)

    assert not errors
    report = project.json("b", "benchmark/benchmark.json")
    rows = {row["name"]: row for row in report["rows"]}
    found = {
        name: (row["world_size"], row["wrapper"], row["precision"], row["is_compiled"]) for name, row in rows.items()
    }
    wrapper = "DistributedDataParallel"
    assert found == {
        "one device": (1, "Sequential", "fp32", False),
        "ddp": (2, wrapper, "fp32", False),
        "ddp, torchrun": (2, wrapper, "fp32", False),
        "ddp, 16-bit": (2, wrapper, "bf16", False),
        "ddp, compile": (2, wrapper, "fp32", True),
        "fsdp": (2, wrapper, "fp32", False),
    }
    assert [len(row["peak_memory_mib"]) for row in rows.values()] == [1, 2, 2, 2, 2, 2]
    # The same data in the same order gives the same losses; 16-bit numbers have three digits.
    losses = {name: row["final_loss"] for name, row in rows.items()}
    reference = losses["one device"]
    assert rows["one device"]["first_loss"] > 1.1 * reference
    assert losses["ddp"] == pytest.approx(reference, rel=1e-4) == losses["ddp, torchrun"]
    assert losses["ddp, compile"] == pytest.approx(reference, rel=1e-4)
    assert 1e-6 < abs(losses["ddp, 16-bit"] / reference - 1) < 0.05
    assert [name for name, row in rows.items() if row["is_loss_off"]] == ["fsdp"]
    # 103 samples in batches of 16: a whole epoch, with its short batch, is warm-up.
    assert report["num_warm_up_steps"] == 7
    for row in rows.values():
        assert 0 < row["seconds_per_step"] < 1 < row["startup_seconds"] < 60
        assert row["samples_per_second"] == pytest.approx(16 / row["seconds_per_step"], rel=0.1)

    reasons = {entry["name"]: entry["reason"] for entry in report["not_run"]}
    assert reasons == {
        "data_parallel": "this project was made without strategies/data_parallel.py",
        "accelerate": "it ran on 1 devices instead of 2 (world sizes [2, 2])",
        "deepspeed, ZeRO-1": "this project was made without strategies/deepspeed.py",
        "horovod": "strategy=horovod: a_library_that_is_not_here is not installed. Type: "
        "python -m pip install -c constraints.txt -e '.[horovod]'",
    }
    assert reasons["horovod"] in (project.directory("b") / "benchmark" / "horovod.log").read_text(encoding="utf-8")
    text = (project.directory("b") / "benchmark" / "benchmark.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in rows) and all(reason in text for reason in reasons.values())
    assert f"{report['machine']['cpu']}, " in text
    assert "benchmark 8/8: horovod" in output and "0:00:00 left" in output
    assert output.splitlines()[-1] == report["advice"] and "(!)" in output
    files = {path.name for path in (project.directory("b") / "benchmark").iterdir()} - {"benchmark.png", ".lock"}
    assert files == {"benchmark.json", "benchmark.md", "config.yaml", "horovod.log", "accelerate.log"}


def living(folder: Path) -> list[str]:
    """The command lines of the processes that run in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (path / "cwd").readlink() == folder:
                found.append((path / "cmdline").read_text(encoding="utf-8"))
    return found


def left_after(seconds: float, folder: Path) -> list[str]:
    """Those that still live then: a fork server imports to the end before it sees that nobody needs it."""
    deadline = time.monotonic() + seconds
    while (left := living(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_table_of_what_was_measured_and_no_process(
    project: Project, number: signal.Signals, code: int
) -> None:
    words = ["benchmark", "benchmark.steps=3", "name=b"]
    process = project.start(*words)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("benchmark 1/")
    time.sleep(1.0)  # the next row's processes are there
    assert len(living(project.folder)) > 1
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=20)  # all that hold its output have ended
    assert process.returncode == code
    assert "\none device " in output and "interrupted before its turn" in output
    report = project.json("b", "benchmark/benchmark.json")
    assert [row["name"] for row in report["rows"]] == ["one device"]
    assert not (project.directory("b") / "benchmark" / "run").exists()
    assert not left_after(30, project.folder)


@needs_proc
def test_a_killed_benchmark_leaves_no_process(project: Project) -> None:
    process = project.start("benchmark", "benchmark.steps=100000", "device_ids=cpu", "model.seconds_per_step=0.01")
    deadline = time.monotonic() + 60
    while len(living(project.folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    process.kill()
    process.communicate(timeout=20)
    assert not left_after(30, project.folder)


@needs_proc
def test_a_row_has_ended_when_its_helpers_have(tmp_path: Path) -> None:
    helper = "import time; time.sleep(1)"
    row = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {helper!r}]); sys.exit(3)"
    program = (
        f"import pathlib, sys, time; from {PACKAGE}.benchmarking import running; running._adopt_orphans(); "
        f"began = time.monotonic(); log = pathlib.Path({str(tmp_path / 'log')!r}); "
        f"code = running._run([sys.executable, '-c', {row!r}], log, running.Countdown(1, has_bar=False)); "
        "print(code, 1 < time.monotonic() - began < running.HELPERS_SECONDS)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "3 True\n"


def run_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, action: Callable[[Outcome], None]) -> int:
    """Three rows in three rounds, of which each run is `action`. Returns the signal that ended it, or 0."""
    monkeypatch.setattr(running, "_adopt_orphans", lambda: None)
    monkeypatch.setattr(running, "run_once", lambda outcome, *_: action(outcome))
    former = signal.getsignal(signal.SIGTERM)
    try:
        return running.run_rounds([Row(name, ["cpu"], []) for name in "abc"], 3, tmp_path, tmp_path, has_bar=False)[1]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_each_round_has_another_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names: list[str] = []
    assert run_rows(monkeypatch, tmp_path, lambda outcome: names.append(outcome.row.name)) == 0
    assert "".join(names) == "abcbcacab"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_is_told_from_ctrl_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals) -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background ignores it
    try:
        assert run_rows(monkeypatch, tmp_path, lambda _: os.kill(os.getpid(), number)) == number
    finally:
        signal.signal(signal.SIGINT, former)


def test_benchmark_under_a_launcher_is_refused(project: Project) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    process = project.start("benchmark", **place, **address)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "without a launcher" in errors


def test_rows_share_devices_and_number_of_ranks() -> None:
    rows = plan(["0", "2", "5"])
    assert [row.name for row in rows][:3] == ["one device", "data_parallel", "ddp"] and len(rows) == 10
    assert rows[0].device_ids == ["0"] and all(row.device_ids == ["0", "2", "5"] for row in rows[1:])
    (torchrun,) = (row for row in rows if row.launcher == "torchrun")
    start = "torchrun --standalone --nproc-per-node=3 run.py device_ids=0,2,5 strategy=ddp"
    assert torchrun.command.startswith(start)
    (again, *_) = plan(["cpu", "cpu"], ["benchmark.steps=9", "data.name=a b", "device_ids=cpu"])
    assert again.command == "python run.py 'data.name=a b' device_ids=cpu strategy=ddp training.precision=fp32"


def test_advised_command_does_what_its_row_does() -> None:
    rows = plan(["0", "2"], ["--config=big.yaml", "training.compile=true"], is_compiled=True)
    for row in rows:
        words = row.command.split()
        assert "--config=big.yaml" in words
        assert f"training.compile={str('compile' in row.name).lower()}" in words
        assert sum(word.startswith("training.compile=") for word in words) == 1


def test_a_run_that_is_not_what_its_row_says_is_told() -> None:
    def difference(row: Row, num_ranks: int, strategy: str, num_devices: int = 2) -> str:
        ranks = [{"world_size": num_ranks, "strategy": strategy}] * num_ranks
        return row.find_difference({"ranks": ranks, "num_devices": num_devices, "is_compiled": False})

    rows = {row.name: row for row in plan(["0", "2"])}
    for name, num_ranks, strategy in (("ddp", 2, "ddp"), ("data_parallel", 1, "data_parallel"), ("fsdp", 2, "fsdp")):
        assert difference(rows[name], num_ranks, strategy) == ""
    assert difference(rows["one device"], 1, "base", num_devices=1) == ""
    assert difference(rows["ddp"], 1, "ddp").endswith("(world sizes [1])")
    assert difference(rows["data_parallel"], 2, "data_parallel").endswith("(world sizes [2, 2])")
    assert difference(rows["horovod"], 2, "ddp") == "strategies/ddp.py trained instead of strategies/horovod.py"
    assert difference(rows["ddp, compile"], 2, "ddp") == "it was not compiled"


def test_a_single_gpu_has_the_rows_that_fit_and_says_how_to_try_the_others() -> None:
    rows = plan(["4"])
    assert [row.name for row in rows if not row.obstacle] == ["one device", "one device, 16-bit", "one device, compile"]
    obstacles = {row.obstacle for row in rows if row.obstacle}
    assert len(obstacles) == 1 and "device_ids=4,4 launch.backend=gloo" in obstacles.pop()


def outcome(name: str, num_devices: int, seconds: list[float], **values: Any) -> Outcome:
    """A row that ran once for each of `seconds`."""
    ids = [str(index) for index in range(num_devices)]
    waiting = values.pop("waiting_share", 0.01)
    run = {
        "ranks": [{"wrapper": "W", "world_size": num_devices, "waiting_share": waiting}] * num_devices,
        "num_devices": num_devices,
        "precision": "fp32",
        "is_compiled": False,
        "micro_batch_size": 8,
        "startup_seconds": 3.0,
        "first_loss": 2.0,
        "final_loss": 1.0,
        "peak_memory_mib": [900.0] * num_devices,
    } | values
    runs = [run | {"seconds_per_step": second, "samples_per_second": 64 / second} for second in seconds]
    return Outcome(Row(name, ids, [f"strategy={name}"]), runs)


def test_medians_speed_up_and_efficiency() -> None:
    one, two = summarize([outcome("one device", 1, [0.4, 0.9, 0.41]), outcome("ddp", 2, [0.25, 0.2, 0.3])])
    assert (one["seconds_per_step"], two["seconds_per_step"]) == (0.41, 0.25)
    assert two["speed_up"] == pytest.approx(1.64) and two["efficiency"] == pytest.approx(0.82)
    assert two["spread"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("loss", "is_off"), [(1.0, False), (0.7, False), (1.3, False), (1.9, True), (float("nan"), True)]
)
def test_a_row_that_learns_less_than_half_as_much_is_marked(loss: float, is_off: bool) -> None:
    rows = summarize([outcome("one device", 1, [0.4]), outcome("ddp", 2, [0.2], final_loss=loss)])
    assert rows[1]["is_loss_off"] == is_off
    assert advise(rows, ["0", "1"], 4)[0] == ("one device" if is_off else "ddp")


def test_advice_names_the_simplest_of_the_fastest_rows_and_what_holds_it_up() -> None:
    one, ids = outcome("one device", 1, [0.4]), ["0", "1"]

    def advice(*others: Outcome) -> str:
        return advise(summarize([one, *others]), ids, 2)[1]

    fast = outcome("ddp", 2, [0.205]), outcome("fsdp", 2, [0.2])
    assert advice(*fast) == "ddp on [0, 1] is 2 times as fast as one device: python run.py device_ids=0,1 strategy=ddp"
    assert advice(outcome("ddp", 2, [0.25]), fast[1]).startswith("fsdp on [0, 1] is 2 times")
    half = advice(outcome("ddp", 2, [0.1], precision="bf16"))
    assert half.startswith("ddp (bf16) on [0, 1] is 4 times as fast as one device: ")
    limit = "data loading is the limit (40% of the time): raise loader.num_workers (now 2)"
    assert limit in advice(outcome("ddp", 2, [0.2], waiting_share=0.4))
    assert "sharing gradients is the limit (57% of what 2 devices could do)" in advice(outcome("ddp", 2, [0.35]))
    assert "so measure again without other work" in advice(outcome("ddp", 2, [0.1]))
    words = advice(outcome("ddp", 2, [0.6]))
    assert words.startswith("one device is the fastest way here (the others reach 0.67 times its speed at most)")
    # Ranks on the same cores: no number of them is expected to be faster.
    assert "sharing gradients" not in advise(summarize([one, outcome("ddp", 2, [0.35])]), ["cpu", "cpu"], 2)[1]


def test_the_reason_is_the_line_that_says_why() -> None:
    traceback = "rank 1 (h, cpu) failed:\nTraceback (most recent call last):\n  x\nValueError: that is why\n"
    noise = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n====\nRoot Cause\n"
    assert find_reason("step 1\nerror: fsdp=x: not so. Do y.\nmore\n") == "fsdp=x: not so. Do y."
    assert find_reason(traceback + "Traceback (most recent call last):\n" + noise) == "ValueError: that is why"
    assert find_reason("torch.OutOfMemoryError: CUDA out of memory. Tried\n") == (
        "torch.OutOfMemoryError: CUDA out of memory. Tried"
    )
    assert find_reason("Segmentation fault\n\n") == "Segmentation fault"


class SlowDataset(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def test_the_loader_counts_the_seconds_in_which_it_keeps_a_rank_waiting() -> None:
    config, context = LoaderConfig(num_workers=0), RankContext(device=torch.device("cpu"))
    loader = TrainLoader(SlowDataset(), config, context, seed=1, global_batch_size=4, micro_batch_size=2)
    loader.start(0, 0)
    for _ in range(2):
        for _micro_batch in loader.next_step():
            time.sleep(0.1)  # computing, which does not count
    assert 0.16 <= loader.seconds_waited < 0.35


def test_chart_has_a_bar_for_each_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = summarize([outcome("one device", 1, [0.4]), outcome("ddp", 2, [0.2, 0.25], final_loss=1.95)])
    report = {"rows": rows, "advised": "ddp", "name": "b", "devices": "2 GPUs", "advice": "x", "global_batch_size": 64}
    draw(json.loads(json.dumps(report)), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")

"""Measures one run: starts a loop in processes of its own and reads the results that the loop wrote.

The generated trainer is measured as a user runs it: `python run.py` in a copy of the project whose model.py and
dataset.py are the workload's. No code of the trainer is patched, and its step times come from its metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from loops.settings import LEARNING_RATE, WEIGHT_DECAY, Settings
from plan import Case, Row
from workload.dataset import Images

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent / "{{cookiecutter.project_slug}}"
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SEED = 42
CONFIG = f"""
name: benchmark
seed: {SEED}
device_ids: cpu
data: {{}}
model: {{}}
optimizer: {{learning_rate: {LEARNING_RATE}, weight_decay: {WEIGHT_DECAY}}}
schedule: {{name: constant}}
training: {{epochs: 1000}}
evaluation: {{every_epochs: null}}
checkpoint: {{every_epochs: null}}
logging: {{tracker: none, report: false}}
"""


class RunError(Exception):
    """A run failed or took too long. The message ends with the last lines that it printed."""


@dataclass(frozen=True)
class Measurement:
    """The results of one run."""

    row: str
    case: str
    microseconds: float
    """Time per step on rank 0: the median over laps (`log_every` steps and their log line) after the warm-up."""
    mean_microseconds: float
    """The mean over the same laps, which includes slow ones: ends of epochs and disturbances."""
    startup_seconds: float
    """Time from the start of the command to the end of the first optimizer step on the slowest rank."""
    peak_memory_mib: list[float]
    """The peak resident memory of each rank or, on a GPU, the peak of its allocated memory."""
    final_loss: float
    """The loss of the last step, averaged over the global batch."""
    waiting_share: float | None = None
    """The part of the training time that the generated trainer waited for data."""
    spread: float = 0.0
    """The slowest counted lap less the fastest one, as a part of the median."""


class Bench:
    """A folder with a copy of the project and the order of the samples. Runs are measured in this folder."""

    def __init__(
        self, folder: Path, cases: Sequence[Case], environment: dict[str, str] = ON_CPU
    ) -> None:
        self._folder, self._numbers, self._environment = folder, count(1), environment
        self._project = folder / "project"
        self._project.mkdir()
        shutil.copy(PROJECT / "run.py", self._project)
        package = self._project / "template_package"
        shutil.copytree(
            PROJECT / "template_package", package, ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("model.py", "networks.py", "dataset.py"):
            shutil.copy(HERE / "workload" / name, package)
        (self._project / "config.yaml").write_text(CONFIG, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            str(self._project),
            str(HERE / "workload"),
        ]
        subprocess.run(command, check=True)
        self._orders = self._write_orders(cases)
        self._images = folder / "images"
        Images(
            str(self._images),
            max((case.num_samples for case in cases if case.data == "images"), default=0),
        ).write()

    def run(self, row: Row, case: Case) -> Measurement:
        """Run the row's command for this case and return the measurement."""
        settings, output, environment = self._prepare(row, case)
        is_ours = row.script == "run.py"
        if is_ours:
            words = [*row.launcher, "run.py", *self._words(settings, output.name, case)]
        else:
            words = [
                *(row.launcher if case.num_ranks > 1 else ()),
                str(HERE / "loops" / row.script),
            ]
        folder, num_tries = (self._project, 1) if is_ours or case.device != "cpu" else (output, 2)
        command, printed = [sys.executable, *words], output / "output.txt"
        started = run_process(
            command, folder, environment, printed, case.timeout_seconds, num_tries
        )
        first_steps = [
            float(path.read_text(encoding="utf-8")) for path in output.glob("first_step_*")
        ]
        assert len(first_steps) == case.num_ranks, (
            f"{row.name}, {case.name}: {len(first_steps)} ranks made a step"
        )
        startup = max(first_steps) - started
        laps, *rest = (
            self._read_ours(settings, output.name, startup)
            if is_ours
            else _read_loop(settings, output)
        )
        assert len(laps) == case.num_steps // case.log_every, (
            f"{row.name}, {case.name}: {len(laps)} laps"
        )
        counted = [seconds / case.log_every * 1e6 for seconds in laps[case.num_warmup_laps :]]
        median, spread = (
            statistics.median(counted),
            (max(counted) - min(counted)) / statistics.median(counted),
        )
        return Measurement(
            row.name, case.name, median, statistics.mean(counted), startup, *rest, spread=spread
        )

    def run_script(self, script: Path, case: Case) -> Any:
        """Run a script that takes its own times, and return its result.json."""
        _, output, environment = self._prepare(Row(script.stem, is_tuned=True), case)
        run_process(
            [sys.executable, str(script)],
            output,
            environment,
            output / "output.txt",
            case.timeout_seconds,
        )
        return json.loads((output / "result.json").read_text(encoding="utf-8"))

    def _prepare(self, row: Row, case: Case) -> tuple[Settings, Path, dict[str, str]]:
        """Return a run's settings, a new folder for its results, and its environment."""
        output = self._folder / f"run_{next(self._numbers)}"
        output.mkdir()
        settings = Settings(
            work=case.work,
            num_ranks=case.num_ranks,
            num_steps=case.num_steps,
            global_batch_size=case.batch_size * case.num_ranks,
            num_samples=case.num_samples,
            log_every=case.log_every,
            is_tuned=row.is_tuned,
            orders=str(self._orders[case.num_samples]),
            data=case.data,
            num_workers=case.num_workers,
            images=str(self._images),
            device=case.device,
            precision=case.precision,
            is_compiled=case.is_compiled,
            size=case.size,
            port=_free_port(),
        )
        environment = self._environment | {
            "BENCHMARK_OUTPUT": str(output),
            **settings.to_environment(),
        }
        paths = (HERE, row.extra_path, os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
        return settings, output, environment

    def _words(self, settings: Settings, name: str, case: Case) -> list[str]:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        device_ids = ",".join(["cpu"] * settings.num_ranks) if case.device == "cpu" else gpu
        return [
            f"name={name}",
            f"device_ids={device_ids if gpu.isdecimal() or case.device == 'cpu' else 'auto:1'}",
            f"model.work={settings.work}",
            f"model.size={settings.size}",
            f"data.work={settings.work}",
            f"data.size={settings.size}",
            f"data.num_samples={settings.num_samples}",
            f"data.data={settings.data}",
            f"data.images={settings.images}",
            f"loader.num_workers={settings.num_workers}",
            f"training.max_steps={settings.num_steps}",
            f"training.global_batch_size={settings.global_batch_size}",
            f"training.precision={settings.precision}",
            f"training.tf32={str(case.use_tf32).lower()}",
            f"training.compile={str(settings.is_compiled).lower()}",
            f"logging.every_steps={settings.log_every}",
        ]

    def _read_ours(
        self, settings: Settings, name: str, startup: float
    ) -> tuple[list[float], list[float], float, float]:
        directory = self._project / "runs" / name
        text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        # Between two lines the trainer counts the seconds of its steps, their log line included.
        num_samples = settings.log_every * settings.global_batch_size
        laps = [num_samples / line["samples_per_second"] for line in lines]
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        assert summary["steps"] == settings.num_steps
        share = summary["seconds_waiting_for_data"] / summary["train_seconds"]
        if settings.size == "tiny":  # a rehearsal, perhaps on a busy machine
            return laps, summary["peak_memory_mib"], lines[-1]["loss"], share
        told = summary["startup_seconds"]
        assert abs(told - startup) < 0.5 + 0.1 * startup, f"{told} s, {startup} s"
        # No lap is lost between the lines: together they are the training time that the summary tells.
        lost = summary["train_seconds"] - sum(laps)
        assert lost < 0.01 * summary["train_seconds"] + 0.05, (
            f"{lost} s of training between the laps"
        )
        shutil.rmtree(directory)  # the checkpoints of large models would soon fill the disk
        return laps, summary["peak_memory_mib"], lines[-1]["loss"], share

    def _write_orders(self, cases: Sequence[Case]) -> dict[int, Path]:
        """Write the trainer's order of the samples to a file for each size of data set. Return {size: path}."""
        num_epochs: dict[int, int] = {}
        for case in cases:
            number = -(-case.num_steps * case.batch_size * case.num_ranks // case.num_samples)
            num_epochs[case.num_samples] = max(number, num_epochs.get(case.num_samples, 0))
        program = (
            "import pathlib, torch; from template_package.core.data import epoch_order\n"
            f"for size, epochs in {num_epochs}.items():\n"
            f"    order = torch.cat([epoch_order(size, {SEED}, epoch) for epoch in range(epochs)])\n"
            "    pathlib.Path(f'../orders_{size}').write_bytes(order.numpy().tobytes())"
        )
        subprocess.run([sys.executable, "-c", program], cwd=self._project, check=True)
        return {size: self._folder / f"orders_{size}" for size in num_epochs}


def run_process(
    command: list[str],
    cwd: Path,
    own_environment: dict[str, str],
    printed: Path,
    timeout_seconds: float,
    num_tries: int = 1,
) -> float:
    """Run the command to its end, and return its start time. `printed` is the file for its output.

    Kill one that hangs, and try at most `num_tries` times. Raise RunError if it fails.
    """
    launcher_variables = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    environment = {key: value for key, value in os.environ.items() if key not in launcher_variables}
    environment |= own_environment | {"HF_HUB_OFFLINE": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    started = time.time()
    with printed.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code != 0:
                with suppress(ProcessLookupError):  # with all that it has started
                    os.killpg(process.pid, signal.SIGKILL)
    if code is None and num_tries > 1:
        print(
            f"{' '.join(command)} did not end in {timeout_seconds:.0f} s: tried again", flush=True
        )
        for left in printed.parent.glob("first_step_*"):
            left.unlink()
        return run_process(command, cwd, own_environment, printed, timeout_seconds, num_tries - 1)
    if code != 0:
        text = printed.read_text(encoding="utf-8", errors="replace")[-4000:]
        how = (
            f"ended with exit code {code}"
            if code is not None
            else f"did not end in {timeout_seconds:.0f} s"
        )
        raise RunError(f"{' '.join(command)} {how}\n{text}")
    # a fork server still ends: let it not share the cores with the next run
    with suppress(ProcessLookupError):
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    return started


def _read_loop(settings: Settings, output: Path) -> tuple[list[float], list[float], float]:
    paths = [output / f"result_{rank}.json" for rank in range(settings.num_ranks)]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    assert len({result["final_loss"] for result in results}) == 1, (
        "the ranks disagree about the reduced loss"
    )
    peaks = [result["peak_memory_mib"] for result in results]
    return results[0]["lap_seconds"], peaks, results[0]["final_loss"]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

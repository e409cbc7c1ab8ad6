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
from pathlib import Path

from loops.settings import LEARNING_RATE, WEIGHT_DECAY, Settings
from plan import LOG_EVERY, Case, Row
from workload.dataset import Images

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent / "{{cookiecutter.project_slug}}"
TIMEOUT_SECONDS = 180.0
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
logging: {{every_steps: {LOG_EVERY}, tracker: none}}
"""


@dataclass(frozen=True)
class Measurement:
    """The results of one run."""

    row: str
    case: str
    microseconds: float
    """Time per step on rank 0: the median over laps (LOG_EVERY steps and their log line) after the warm-up."""
    mean_microseconds: float
    """The mean over the same laps, which includes slow ones: ends of epochs and disturbances."""
    startup_seconds: float
    """Time from the start of the command to the end of the first optimizer step on the slowest rank."""
    peak_memory_mib: list[float]
    """The peak resident memory of each rank."""
    final_loss: float
    """The loss of the last step, averaged over the global batch."""


class Bench:
    """A folder with a copy of the project and the order of the samples. Runs are measured in this folder."""

    def __init__(self, folder: Path, cases: Sequence[Case]) -> None:
        self._folder, self._count = folder, 0
        self._project = folder / "project"
        self._project.mkdir()
        shutil.copy(PROJECT / "run.py", self._project)
        package = self._project / "template_package"
        shutil.copytree(PROJECT / "template_package", package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("model.py", "dataset.py"):
            shutil.copy(HERE / "workload" / name, package)
        (self._project / "config.yaml").write_text(CONFIG, encoding="utf-8")
        command = [sys.executable, "-m", "compileall", "-q", str(self._project), str(HERE / "workload")]
        subprocess.run(command, check=True)
        kinds = {(case.work, case.num_samples) for case in cases}
        self._orders = {kind: self._write_orders(cases, *kind) for kind in kinds}
        self._images = folder / "images"
        Images(str(self._images), max((case.num_samples for case in cases if case.data == "images"), default=0)).write()

    def run(self, row: Row, case: Case) -> Measurement:
        """Run the row's command for this case and return the measurement."""
        self._count += 1
        output = self._folder / f"run_{self._count}"
        output.mkdir()
        settings = Settings(
            work=case.work,
            num_ranks=case.num_ranks,
            num_steps=case.num_steps,
            global_batch_size=case.batch_size * case.num_ranks,
            num_samples=case.num_samples,
            log_every=LOG_EVERY,
            is_tuned=row.is_tuned,
            orders=str(self._orders[case.work, case.num_samples]),
            data=case.data,
            num_workers=case.num_workers,
            images=str(self._images),
            port=_free_port(),
        )
        is_ours = row.script == "run.py"
        if is_ours:
            words = [*row.launcher, "run.py", *self._words(settings, output.name)]
        else:
            words = [*(row.launcher if case.num_ranks > 1 else ()), str(HERE / "loops" / row.script)]
        environment = {"BENCHMARK_OUTPUT": str(output), **settings.to_environment()}
        environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in (HERE, row.extra_path) if path is not None)
        folder, num_tries = (self._project, 1) if is_ours else (output, 2)
        started = _run([sys.executable, *words], folder, environment, output / "output.txt", num_tries)
        first_steps = [float(path.read_text(encoding="utf-8")) for path in output.glob("first_step_*")]
        assert len(first_steps) == case.num_ranks, f"{row.name}, {case.name}: {len(first_steps)} ranks made a step"
        startup = max(first_steps) - started
        laps, peaks, loss = self._read_ours(settings, output.name, startup) if is_ours else _read_loop(settings, output)
        assert len(laps) == case.num_steps // LOG_EVERY, f"{row.name}, {case.name}: {len(laps)} laps"
        counted = [seconds / LOG_EVERY * 1e6 for seconds in laps[case.num_warmup_laps :]]
        return Measurement(
            row.name, case.name, statistics.median(counted), statistics.mean(counted), startup, peaks, loss
        )

    def _words(self, settings: Settings, name: str) -> list[str]:
        return [
            f"name={name}",
            f"device_ids={','.join(['cpu'] * settings.num_ranks)}",
            f"model.work={settings.work}",
            f"data.work={settings.work}",
            f"data.num_samples={settings.num_samples}",
            f"data.data={settings.data}",
            f"data.images={settings.images}",
            f"loader.num_workers={settings.num_workers}",
            f"training.max_steps={settings.num_steps}",
            f"training.global_batch_size={settings.global_batch_size}",
        ]

    def _read_ours(self, settings: Settings, name: str, startup: float) -> tuple[list[float], list[float], float]:
        directory = self._project / "runs" / name
        text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        # Between two lines the trainer counts the seconds of its steps, their log line included.
        laps = [LOG_EVERY * settings.global_batch_size / line["samples_per_second"] for line in lines]
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        assert summary["steps"] == settings.num_steps
        assert abs(summary["startup_seconds"] - startup) < 0.5, f"{summary['startup_seconds']} s, {startup} s"
        # No lap is lost between the lines: together they are the training time that the summary tells.
        lost = summary["train_seconds"] - sum(laps)
        assert lost < 0.01 * summary["train_seconds"] + 0.05, f"{lost} s of training between the laps"
        return laps, summary["peak_memory_mib"], lines[-1]["loss"]

    def _write_orders(self, cases: Sequence[Case], work: str, num_samples: int) -> Path:
        own = [case for case in cases if (case.work, case.num_samples) == (work, num_samples)]
        num_epochs = max(-(-case.num_steps * case.batch_size * case.num_ranks // case.num_samples) for case in own)
        path = self._folder / f"orders_{work}_{num_samples}"
        program = (
            "import pathlib, sys, torch; from template_package.data.loader import epoch_order; "
            f"orders = [epoch_order({own[0].num_samples}, {SEED}, epoch) for epoch in range({num_epochs})]; "
            "pathlib.Path(sys.argv[1]).write_bytes(torch.cat(orders).numpy().tobytes())"
        )
        subprocess.run([sys.executable, "-c", program, str(path)], cwd=self._project, check=True)
        return path


def _run(command: list[str], cwd: Path, own_environment: dict[str, str], words: Path, num_tries: int) -> float:
    """Run the command to its end, and return its start time. Kill one that hangs, and try at most `num_tries` times."""
    launcher_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in launcher_variables}
    environment |= own_environment | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    started = time.time()
    with words.open("w", encoding="utf-8") as file:
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
            code = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code != 0:
                with suppress(ProcessLookupError):  # with all that it has started
                    os.killpg(process.pid, signal.SIGKILL)
    if code is None and num_tries > 1:
        print(f"{' '.join(command)} did not end in {TIMEOUT_SECONDS:.0f} s: tried again", flush=True)
        for left in words.parent.glob("first_step_*"):
            left.unlink()
        return _run(command, cwd, own_environment, words, num_tries=num_tries - 1)
    if code != 0:
        text = words.read_text(encoding="utf-8")[-4000:]
        how = f"ended with exit code {code}" if code is not None else f"did not end in {TIMEOUT_SECONDS:.0f} s"
        raise SystemExit(f"{' '.join(command)} {how}\n{text}")
    with suppress(ProcessLookupError):  # a fork server still ends: let it not share the cores with the next run
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    return started


def _read_loop(settings: Settings, output: Path) -> tuple[list[float], list[float], float]:
    paths = [output / f"result_{rank}.json" for rank in range(settings.num_ranks)]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    assert len({result["final_loss"] for result in results}) == 1, "the ranks disagree about the reduced loss"
    peaks = [result["peak_memory_mib"] for result in results]
    return results[0]["lap_seconds"], peaks, results[0]["final_loss"]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

"""Tests of `run.py sweep`: its runs equal single runs, even after kills, and mistakes are reported before any run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from template_package.commands import sweep as commands_sweep
from template_package.commands.sweep import Sweep, read_sweep
from template_package.config import load_config
from template_package.core.launch import Gpu
from template_package.core.settings import CommandLine, read_command_line
from template_package.errors import ConfigError

from conftest import ROOT, Project, children

RATES, SEEDS = ("1e-2", "3e-2"), ("1", "2", "3")
GRID = {
    "name": "s",
    "devices": "cpu",
    "grid": {"optimizer.learning_rate": [*RATES], "seed": [*SEEDS]},
}
SLOWLY = "model.seconds_per_step=0.05"
needs_proc = pytest.mark.skipif(
    not Path("/proc").is_dir(), reason="no /proc: processes cannot be found"
)


def write_sweep(project: Project, content: dict[str, Any]) -> str:
    (project.folder / "sweep.yaml").write_text(
        yaml.safe_dump(content, allow_unicode=True), encoding="utf-8"
    )
    return "sweep.yaml"


def sweep(project: Project, *words: str) -> tuple[int, str]:
    """Run the sweep, whose runs are real processes, and return its exit code and its output."""
    process = project.start("sweep", "sweep.yaml", *words)
    output = "".join(process.communicate(timeout=500))
    return process.returncode, output


def results(project: Project) -> dict[str, dict[str, Any]]:
    """Return the runs of sweep.json by name."""
    return {run["name"]: run for run in project.json("s", "sweep.json")["runs"]}


def wait_for_steps(process: subprocess.Popen[str], folder: Path, num_files: int) -> None:
    """Wait until `num_files` runs in `folder` have trained a step."""
    deadline = time.monotonic() + 120
    while len([path for path in folder.glob("*/metrics.jsonl") if path.stat().st_size]) < num_files:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(folder: Path) -> list[str]:
    """Return all command lines of living processes that contain the path `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if str(folder) in line else []
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute on idle cores: each run imports torch
@needs_proc
def test_sweep_that_is_killed_again_and_again_ends_as_single_runs_do(project: Project) -> None:
    cases = {
        f"{rate}-{seed}": [f"optimizer.learning_rate={rate}", f"seed={seed}"]
        for rate in RATES
        for seed in SEEDS
    }
    project.run_many(cases)
    expected = [project.json(name, "summary.json")["best"] for name in cases]
    assert len({best["loss"] for best in expected}) == 6

    write_sweep(project, GRID)
    generator = random.Random(time.time_ns() // 10**9)
    for victim in ("sweep", "run", "sweep"):
        process = project.start("sweep", "sweep.yaml", SLOWLY)
        num_begun = len([*project.directory("s").glob("*/metrics.jsonl")])
        wait_for_steps(process, project.directory("s"), min(6, num_begun + 1))
        time.sleep(generator.uniform(0, 1))
        os.kill(process.pid if victim == "sweep" else children(process.pid)[0], signal.SIGKILL)
        process.communicate(timeout=500)
        assert process.returncode == (-signal.SIGKILL if victim == "sweep" else 1)
        time.sleep(0.5)
        assert processes_of(project.folder) == []
    code, output = sweep(project, SLOWLY)

    assert code == 0, output
    runs = results(project)
    assert [{"loss": run["value"], "step": run["step"]} for run in runs.values()] == expected
    assert all(run["status"] == "complete" for run in runs.values())
    rows = re.findall(r"^ +([\d.]+) +\d+  (\S+)  complete$", output, re.MULTILINE)
    best_first = sorted(runs, key=lambda name: float(runs[name]["value"]))
    assert [name for _, name in rows] == best_first and len(rows) == 6
    means = project.json("s", "sweep.json")["means"]
    assert [entry["num_runs"] for entry in means] == [3, 3]
    losses = [best["loss"] for best in expected]
    assert {round(entry["mean"], 9) for entry in means} == {
        round(sum(part) / 3, 9) for part in (losses[:3], losses[3:])
    }
    command = re.search(r"DDP_RUNS_FOLDER=(\S+) python run.py (evaluate name=\S+)", output)
    assert command is not None
    done = project.start(*command[2].split(), "device_ids=cpu", DDP_RUNS_FOLDER=command[1])
    assert done.communicate(timeout=200) and done.returncode == 0
    assert project.json("s", f"{best_first[0]}/evaluation.json")["loss"] == pytest.approx(
        runs[best_first[0]]["value"]
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute on idle cores: each run imports torch
def test_failing_run_ends_no_other_and_new_runs_are_added(project: Project) -> None:
    line = "    inputs = batch.inputs\n"
    project.edit(
        "model.py",
        line,
        f"    if config.dropout > 0.5:\n        raise ArithmeticError('too hot')\n{line}",
    )
    write_sweep(
        project, {"name": "s", "runs": [{"model": {"dropout": "0.6"}}, {"model.dropout": "0.1"}]}
    )
    code, output = sweep(project, "training.epochs=1", "device_ids=cpu")
    assert code == 1
    bad, good = results(project).values()
    assert (bad["status"], bad["reason"], good["status"]) == (
        "failed",
        "ArithmeticError: too hot",
        "complete",
    )
    assert "01-dropout-0.6  failed  ArithmeticError: too hot" in output

    write_sweep(
        project, {"name": "s", "runs": [{"model.dropout": "0.2"}, {"model.dropout": "0.1"}]}
    )
    code, output = sweep(project, "training.epochs=1", "device_ids=cpu")
    assert (
        code == 0 and "02-dropout-0.1: begins" not in output and "03-dropout-0.2: begins" in output
    )
    assert [*results(project)] == ["03-dropout-0.2", "02-dropout-0.1", "01-dropout-0.6"]

    code, output = sweep(project, "training.epochs=2", "device_ids=cpu")
    assert code == 0 and project.json("s", "02-dropout-0.1/summary.json")["epochs"] == 2, (
        "more epochs train on"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute on idle cores: each run imports torch
@needs_proc
def test_ctrl_c_stops_all_runs_after_their_step(project: Project) -> None:
    process = project.start(
        "sweep", write_sweep(project, {**GRID, "at_once": 2}), "model.seconds_per_step=0.3"
    )
    wait_for_steps(process, project.directory("s"), 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert processes_of(project.folder) == []
    stopped = [run for run in results(project).values() if run["status"] == "stopped"]
    assert len(stopped) == 2 and "asked to stop" in output
    for run in stopped:
        summary = project.json("s", f"{run['name']}/summary.json")
        assert summary["status"] == "stopped"
        assert (
            project.directory("s") / run["name"] / "checkpoints" / f"step_{summary['steps']:08d}.pt"
        ).exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"grid": {"seed": ["1"]}}, "sweep.yaml: name: Field required"),
        ({"name": "s", "grid": {"seed": ["1"]}, "at_onec": "2"}, "at_onec=2"),
        ({"name": "s", "grid": {"seed": ["1", "x"]}}, "seed=x"),
        (
            {"name": "s", "grid": {"optimizer.learnin_rate": ["1"]}},
            "Did you mean optimizer.learning_rate",
        ),
        ({"name": "s", "grid": {"seed": "1"}}, "grid.seed=1: Input should be a valid list"),
        ({"name": "s"}, "sweep.yaml: Value error, one of the keys grid, runs and search"),
        ({"name": "s", "grid": {"seed": ["1"]}, "runs": [{"seed": "1"}]}, "grid, runs and search"),
        ({"name": "s", "grid": {"seed": ["1"]}, "devices": "gpu"}, "devices=gpu"),
        (
            {"name": "s", "search": {"trials": "2", "space": {"seed": {"low": "3", "high": "1"}}}},
            "low must be less",
        ),
        (
            {
                "name": "s",
                "search": {"trials": "2", "space": {"model.dropout": {"low": "0", "high": "x"}}},
            },
            "high",
        ),
        (
            {
                "name": "s",
                "search": {
                    "trials": "2",
                    "space": {"training.epochs": {"low": "-9", "high": "-1"}},
                },
            },
            "epochs=-",
        ),
    ],
)
def test_mistake_is_one_line_before_anything_starts(
    project: Project, content: dict[str, Any], words: str
) -> None:
    output = project.run("sweep", write_sweep(project, content), code=2)
    assert output.startswith("error: ") and output.count("\n") == 1 and words in output, output
    assert not project.directory("s").exists()


@pytest.mark.parametrize(
    ("num_gpus", "devices", "expected"),
    [
        (6, None, (6, "auto:1")),
        (6, "auto:2", (3, "auto:2")),
        (7, "auto:2", (3, "auto:2")),
        (6, "auto", (1, "auto")),
        (6, [0, 2], (1, [0, 2])),
        (0, None, (4, ["cpu"])),
        (6, "cpu,cpu", (2, ["cpu", "cpu"])),
        (6, "cpu,cpu,cpu,cpu,cpu", (1, ["cpu"] * 5)),
    ],
)
def test_as_many_runs_at_once_as_the_machine_has_devices_for(
    num_gpus: int, devices: Any, expected: tuple[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(index) for index in range(num_gpus)]
    monkeypatch.setattr(commands_sweep, "find_gpus", lambda _: gpus)
    monkeypatch.setattr(commands_sweep, "num_usable_cores", lambda: 4)
    line, grid = CommandLine(ROOT / "config.yaml"), {"seed": ["1", "2"]}
    runner = commands_sweep.SweepRunner(
        line, Sweep(name="s", grid=grid, **({"devices": devices} if devices else {}))
    )
    config = load_config(
        ROOT / "config.yaml", runner.list_arguments(commands_sweep.Run("a", {"seed": "1"}))
    )
    assert (runner.num_slots, config.device_ids) == expected
    assert config.launch.wait_minutes > 60 * 24, "a run waits for GPUs that others use"
    assert commands_sweep.SweepRunner(line, Sweep(name="s", grid=grid, at_once=9)).num_slots == 9


def test_sweep_takes_one_file(project: Project) -> None:
    assert "takes one input. Type: python run.py sweep FILE" in project.run("sweep", code=2)
    assert "cannot be read" in project.run("sweep", "missing.yaml", code=2)


def test_random_search_draws_the_same_trials_again_and_within_their_bounds(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    space = (
        "{a.rate: {low: 1e-4, high: 1e-1, log: true}, b: {low: 2, high: 5}, c: [x, null, [1, 2]],"
    )
    space += " d: {low: 0.0, high: 1.0}}"
    path.write_text(f"name: s\nsearch: {{trials: 200, space: {space}}}\n", encoding="utf-8")
    drawn = read_sweep(path).list_settings()
    path.write_text(f"name: s\nsearch: {{trials: 300, space: {space}}}\n", encoding="utf-8")
    assert read_sweep(path).list_settings()[:200] == drawn == read_sweep(path).list_settings()[:200]
    rates = [float(each["a.rate"]) for each in drawn]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert sum(rate < 1e-3 for rate in rates) == pytest.approx(200 / 3, abs=25), (
        "one of three orders of magnitude"
    )
    assert {each["b"] for each in drawn} == {"2", "3", "4", "5"}
    assert {each["c"] for each in drawn} == {"x", "null", '["1", "2"]'}
    assert len({each["d"] for each in drawn}) > 150 and all("." in each["d"] for each in drawn)
    path.write_text(
        f"name: s\nseed: 1\nsearch: {{trials: 200, space: {space}}}\n", encoding="utf-8"
    )
    assert read_sweep(path).list_settings() != drawn


def test_unreadable_file_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: [", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sweep(tmp_path / "a.yaml")


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute on idle cores: each run imports torch
def test_optuna_goes_on_with_the_trials_of_a_killed_sweep(project: Project) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    space = {
        "optimizer.learning_rate": {"low": "1e-4", "high": "1e-1", "log": "true"},
        "seed": ["1", "2"],
    }
    write_sweep(
        project,
        {
            "name": "s",
            "devices": "cpu",
            "search": {"method": "optuna", "trials": "4", "space": space},
        },
    )
    process = project.start("sweep", "sweep.yaml", SLOWLY)
    wait_for_steps(process, project.directory("s"), 1)
    process.kill()
    process.communicate()
    first = results(project)
    code, output = sweep(project, SLOWLY)
    assert code == 0, output
    runs = results(project)
    assert len(runs) == 4 and [*runs][: len(first)] == [*first]
    assert len({json.dumps(run["settings"]) for run in runs.values()}) == 4, (
        "a second start draws other trials"
    )
    assert sweep(project, SLOWLY)[0] == 0 and results(project) == runs


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute on idle cores: each run imports torch
def test_optuna_prunes_a_trial_that_is_worse_than_the_others(project: Project) -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    search = {
        "method": "optuna",
        "prune": "true",
        "trials": "6",
        "space": {"optimizer.learning_rate": ["0.01"]},
    }
    write_sweep(project, {"name": "s", "devices": "cpu", "at_once": "1", "search": search})
    former = {"settings": {"optimizer.learning_rate": "0.01"}, "status": "complete", "value": -1.0}
    folder = project.directory("s")
    folder.mkdir(parents=True)
    study = optuna.create_study(
        storage=f"sqlite:///{folder}/study.db", study_name="sweep", direction="minimize"
    )
    space = {"optimizer.learning_rate": optuna.distributions.CategoricalDistribution(["0.01"])}
    for _ in range(5):
        trial = study.ask(space)
        trial.report(-1.0, 7)
        study.tell(trial, -1.0)
    runs = [{"name": str(number), **former} for number in range(5)]
    line = read_command_line(["model.seconds_per_step=0.3"], project.folder / "config.yaml")
    (project.directory("s") / "sweep.json").write_text(
        json.dumps({"runs": runs, "config": line.settings}), encoding="utf-8"
    )
    code, output = sweep(project, "model.seconds_per_step=0.3")
    assert code == 0, output
    assert [run["status"] for run in results(project).values()] == ["complete"] * 5 + ["pruned"]

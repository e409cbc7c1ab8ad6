"""Tests of a run's output: metrics.jsonl, trackers, media, the console, the progress bar and the ranks' logs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from template_package.config import load_config
from template_package.core.logs import Tracking, rank_log
from template_package.core.ranks import Rank
from template_package.errors import FailureError
from template_package.training.media import Log

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, time, warnings
from pathlib import Path
from template_package.config import load_config
from template_package.core.logs import Tracking, rank_log
from template_package.core.ranks import Rank

directory, tracker = Path(sys.argv[1]), sys.argv[2]
with rank_log(directory, Rank()):
    config = load_config(Path(sys.argv[3]), [f"logging.tracker={tracker}"])
    tracking = Tracking(directory, config, Rank(), step=0, total_steps=60, is_evaluation_pending=False)
    for step in range(1, 61):
        time.sleep(0.01)  # the bar is drawn several times
        if step % 20 == 0:
            counts = {"step": step, "epoch": step // 20}
            values = {"split": "train", **counts, "loss": 0.25, "samples_per_second": 5000.5}
            tracking.record(values)
            tracking.record({"split": "validation", **counts, "loss": 0.125, "accuracy": 0.75, "num_samples": 9})
        if step == 30:
            print("printed", "words", flush=True)
            print("in two", end=" ")
        if step == 40:
            print("parts")
            warnings.warn("a warning")
        if step == 50:
            print("whole")
            print("unfinished, ", end="")
        tracking.advance(step)
    tracking.close()
print("after the run")
"""


def open_tracking(
    directory: Path,
    step: int,
    total_steps: int,
    *,
    tracker: str = "none",
    is_main: bool = True,
    is_pending: bool = False,
) -> Tracking:
    config = load_config(ROOT / "config.yaml", [f"logging.tracker={tracker}"])
    rank = Rank(rank=0 if is_main else 1, world_size=2)
    return Tracking(
        directory,
        config,
        rank,
        step=step,
        total_steps=total_steps,
        is_evaluation_pending=is_pending,
    )


def track(
    directory: Path,
    resumed_step: int,
    last_step: int,
    *,
    tracker: str = "none",
    is_main: bool = True,
) -> None:
    """Record a training line for each step, a validation line for every second step, and log's kinds at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    tracking = open_tracking(directory, resumed_step, 12, tracker=tracker, is_main=is_main)
    for step in range(resumed_step + 1, last_step + 1):
        tracking.record(
            {
                "split": "train",
                "step": step,
                "epoch": 1,
                "loss": 1 / step,
                "samples_per_second": 10.0,
            }
        )
        if step % 2 == 0:
            tracking.record(
                {
                    "split": "validation",
                    "step": step,
                    "epoch": 1,
                    "loss": 2 / step,
                    "num_samples": 9,
                }
            )
        tracking.advance(step)
    log = Log(tracking, last_step)
    log.image("samples/first", torch.full((3, 4, 5), 0.5))
    log.text("words", "several\nlines")
    log.scalar("extra", torch.tensor(0.25))
    tracking.close()


def environment(*paths: Path) -> dict[str, str]:
    """Return the environment of a process that imports from `paths` first, and then from this project."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
        "PYTHONUTF8": "1",
    }


def screen(output: str) -> list[str]:
    """Return the lines that a terminal shows after `output`. Text after a carriage return overwrites the line."""
    lines, column = [""], 0
    for character in output:
        if character == "\n":
            lines, column = [*lines, ""], 0
        elif character == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


def test_metrics_keep_order_and_every_digit(tmp_path: Path) -> None:
    tracking, speed = open_tracking(tmp_path, 0, 9), {"samples_per_second": 1.0}
    tracking.record(
        {
            "split": "train",
            "step": 1,
            "loss": 0.1 + 0.2,
            "epoch": 1,
            "gradient_norm": float("inf"),
            **speed,
        }
    )
    tracking.record(
        {"split": "validation", "step": 1, "epoch": 1, "loss": float("nan"), "名": -1e-300}
    )
    # written at once, not at the end
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    first, second = (json.loads(line) for line in text.splitlines())
    assert list(first) == ["split", "step", "loss", "epoch", "gradient_norm", "samples_per_second"]
    assert first["loss"] == 0.1 + 0.2 and first["gradient_norm"] == float("inf")
    assert second["loss"] != second["loss"] and second["名"] == -1e-300
    tracking.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_line_that_the_disk_refuses_ends_the_run_in_one_line(tmp_path: Path) -> None:
    tracking = open_tracking(tmp_path, 0, 9)
    tracking._metrics = Path("/dev/full").open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - the tracking closes it
    with pytest.raises(
        FailureError, match=r"cannot write .*metrics.jsonl: No space left on device.*same command"
    ):
        tracking.record(
            {"split": "train", "step": 1, "epoch": 1, "loss": 0.5, "samples_per_second": 1.0}
        )


@pytest.mark.parametrize(
    "ending", ["", '{"split": "train", "st', '{"split": "train", "step": 8, "loss": 1}', "\0\0"]
)
def test_resumed_metrics_equal_undisturbed_ones(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "metrics.jsonl"
    track(tmp_path, 0, 10)
    expected = path.read_bytes()
    assert expected.count(b"\n") == 15
    track(tmp_path, 0, 7)  # from the start: nothing of the former run is left
    assert expected.startswith(path.read_bytes())
    path.write_text(path.read_text(encoding="utf-8") + ending, encoding="utf-8")
    track(tmp_path, 4, 10)
    assert path.read_bytes() == expected


def test_other_ranks_write_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    track(tmp_path, 0, 4, is_main=False, tracker="tensorboard")
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(tmp_path, 0, 7, tracker="tensorboard")
    track(tmp_path, 4, 10, tracker="tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    # float32 in the event file
    assert losses == [(step, pytest.approx(1 / step)) for step in range(1, 11)]
    assert [event.step for event in events.Scalars("validation/loss")] == [2, 4, 6, 8, 10]


def test_missing_tracker_is_one_warning_and_files_hold_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "tensorboard.py").write_text(
        "raise ModuleNotFoundError('No module named tensorboard')\n"
    )
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(tmp_path),
        "tensorboard",
        str(ROOT / "config.yaml"),
    ]
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, encoding="utf-8", check=True
    )
    warning, *lines = done.stdout.splitlines()
    assert warning.startswith("warning:") and "pip install tensorboard" in warning
    assert lines == [
        "epoch 1, step 20: train loss 0.25, 5000 samples/s",
        "epoch 1, step 20: validation loss 0.125, accuracy 0.75",
        "printed words",
        "epoch 2, step 40: train loss 0.25, 5000 samples/s",
        "epoch 2, step 40: validation loss 0.125, accuracy 0.75",
        "in two parts",
        "whole",
        "epoch 3, step 60: train loss 0.25, 5000 samples/s",
        "epoch 3, step 60: validation loss 0.125, accuracy 0.75",
        "unfinished, after the run",
    ]
    assert "\r" not in done.stdout + done.stderr
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 6


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the package's warnings are appended."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: found.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("template_package"), "handlers", [handler])
    return found


def test_tracker_whose_folder_vanishes_is_left_out(tmp_path: Path, warnings: list[str]) -> None:
    pytest.importorskip("tensorboard")
    tracking = open_tracking(tmp_path, 0, 60, tracker="tensorboard")
    for step in range(1, 8):
        tracking.record(
            {"split": "train", "step": step, "epoch": 1, "loss": 1.0, "samples_per_second": 1.0}
        )
        if step == 3:
            shutil.rmtree(tmp_path / "tensorboard")
    tracking.close()
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 7
    assert ["logging.tracker=tensorboard has failed" in warning for warning in warnings] == [True]


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_prints_and_warnings_stand_above_the_progress_bar(tmp_path: Path) -> None:
    import pty
    import termios

    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "none", str(ROOT / "config.yaml")]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment()) as process:
        os.close(end)
        output = b""
        try:
            while part := os.read(terminal, 65536):
                output += part
        except OSError:  # Linux's way to say that the other end is closed
            pass
    os.close(terminal)
    assert process.returncode == 0, output.decode()
    assert output.count(b"|") >= 6  # drawn several times
    source = '  warnings.warn("a warning")'  # below the warning, from Python 3.13 on
    lines = [line for line in screen(output.decode()) if line != source]
    evaluated = r"epoch {}, step {}: validation loss 0\.125, accuracy 0\.75"
    expected = [
        evaluated.format(1, 20),
        "printed words",
        evaluated.format(2, 40),
        "in two parts",
        ".*UserWarning: a warning",
        "whole",
        evaluated.format(3, 60),
        r"step 60/60 100%\|█+\| 00:00 left, loss 0\.25",
        "unfinished, after the run",
    ]
    assert len(lines) == len(expected) and all(map(re.fullmatch, expected, lines)), "\n".join(lines)
    first, *log = (tmp_path / "logs" / "rank_0.log").read_text(encoding="utf-8").splitlines()
    log = [line for line in log if not line.endswith(source)]
    assert all(
        f"{word}=" in first
        for word in ("host", "pid", "rank", "local_rank", "world_size", "device")
    )
    for pattern, line in zip([*expected[:7], "unfinished, "], log, strict=True):  # not the bar
        assert re.fullmatch(f"(.* )?{pattern}", line), line


def fail_as_rank_1(directory: Path, attempt: int) -> None:
    with rank_log(directory, Rank(rank=1, world_size=2, local_rank=1)):
        print("printed", attempt)
        logging.getLogger("template_package.trainer").info("logged %d", attempt)
        subprocess.run(["echo", "from another program"], check=True)
        os.write(2, b"written as C++ writes\n")
        if (process := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        os.waitpid(process, 0)
        print(1 / 0)


def test_run_goes_on_in_silence_when_nobody_reads_its_console(tmp_path: Path) -> None:
    script = SCRIPT.replace('print("after the run")', "")
    command = [sys.executable, "-c", script, str(tmp_path), "none", str(ROOT / "config.yaml")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        process.stdout.close()  # type: ignore[union-attr]  # as `| head` does when it has enough
        errors = process.stderr.read().decode()  # type: ignore[union-attr]
    assert process.returncode == 0, errors
    assert "Logging error" not in errors and "Traceback" not in errors
    assert len((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 6
    assert "printed words" in (tmp_path / "logs" / "rank_0.log").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_other_ranks_say_everything_to_their_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stderr__", sys.__stderr__)  # rank_log() replaces it
    for attempt in range(2):
        with pytest.raises(ZeroDivisionError):
            fail_as_rank_1(tmp_path, attempt)
        print("on the console again", flush=True)
    output, errors = capfd.readouterr()
    assert output == "on the console again\n" * 2 and errors == ""
    starts = re.split(
        r"\n(?=\S+ \S+ host=)", (tmp_path / "logs" / "rank_1.log").read_text(encoding="utf-8")
    )
    assert len(starts) == 2
    for attempt, start in enumerate(starts):
        first, *lines = start.splitlines()
        assert f"pid={os.getpid()} rank=1 local_rank=1 world_size=2 device=cpu" in first
        assert lines[0] == f"printed {attempt}" and lines[1].endswith(f"logged {attempt}")
        assert lines[2:4] == ["from another program", "written as C++ writes"]
        assert lines[4] == "Fatal Python error: Segmentation fault"
        assert lines[-1] == "ZeroDivisionError: division by zero"


def read_media(directory: Path) -> dict[str, Any]:
    """Return a dict from the file names of a run's media to their pixels or text."""
    return {
        path.name: path.read_text(encoding="utf-8")
        if path.suffix == ".txt"
        else np.asarray(Image.open(path)).tolist()
        for path in (directory / "media").iterdir()
    }


def test_pictures_of_each_kind_are_written_with_their_pixels(tmp_path: Path) -> None:
    color = torch.arange(2 * 4 * 3, dtype=torch.uint8).reshape(2, 4, 3) * 10  # (H, W, 3)
    grey = color[:, :, 0]
    floats = (color / 255).permute(2, 0, 1).bfloat16()  # (C, H, W)
    pictures = {
        "color": color.numpy(),
        "channels_first": color.permute(2, 0, 1),
        "pil": Image.fromarray(color.numpy()),
        "float": (color / 255).requires_grad_(),
        "bfloat16": floats,
        "grey": grey.numpy(),
        "one_channel": grey[None],
        "grey_float": (grey / 255).double().numpy(),
        "too_bright": torch.tensor([[-3.0, 0.0], [1.0, 7.0]]),
    }
    tracking = open_tracking(tmp_path, 0, 200)
    for name, picture in pictures.items():
        Log(tracking, 120).image(f"a/{name}", picture)
    tracking.close()
    media = {
        name.removeprefix("step_00000120_a_"): pixels
        for name, pixels in read_media(tmp_path).items()
    }
    assert media.keys() == {f"{name}.png" for name in pictures}
    for name in ("color", "channels_first", "pil", "float"):
        assert media[f"{name}.png"] == color.tolist(), name
    for name in ("grey", "one_channel", "grey_float"):
        assert media[f"{name}.png"] == grey.tolist(), name
    assert media["too_bright.png"] == [[0, 0], [255, 255]]
    error = np.abs(np.array(media["bfloat16.png"]) - color.numpy())
    assert error.max() <= 1  # 8 bits of precision


def test_what_rank_0_logs_stands_in_tensorboard_and_a_resumed_run_writes_it_again(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(tmp_path / "main", 0, 7, tracker="tensorboard")
    picture, text = "step_00000007_samples_first.png", "step_00000007_words.txt"
    expected = {picture: np.full((4, 5, 3), 128).tolist(), text: "several\nlines"}
    assert read_media(tmp_path / "main") == expected
    (tmp_path / "main" / "media" / text).write_text("of a step that comes again", encoding="utf-8")
    track(tmp_path / "main", 4, 7, tracker="tensorboard")
    assert read_media(tmp_path / "main") == expected
    events = EventAccumulator(str(tmp_path / "main" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("extra")] == [(7, 0.25)]
    (image,), tensors = events.Images("samples/first"), events.Tensors("words/text_summary")
    assert (image.step, image.width, image.height) == (7, 5, 4)
    assert {(event.step, *event.tensor_proto.string_val) for event in tensors} == {
        (7, b"several\nlines")
    }
    track(tmp_path / "other", 0, 7, tracker="tensorboard", is_main=False)
    assert [*(tmp_path / "other").iterdir()] == []


def test_figure_is_written_on_rank_0_and_closed_on_each_rank(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    open_before = pyplot.get_fignums()  # of earlier tests in this process
    for is_main in (True, False):
        tracking = open_tracking(tmp_path, 0, 9, is_main=is_main)
        figure, _ = pyplot.subplots(figsize=(2, 1), dpi=50)
        Log(tracking, 3).figure("curve", figure)
        assert pyplot.get_fignums() == open_before
        tracking.close()
    assert [*read_media(tmp_path)] == ["step_00000003_curve.png"]
    assert Image.open(tmp_path / "media" / "step_00000003_curve.png").size == (100, 50)


def test_media_that_cannot_be_written_are_one_warning_each(
    tmp_path: Path, warnings: list[str]
) -> None:
    tracking = open_tracking(tmp_path, 0, 9)
    log: Any = Log(tracking, 1)
    log.image("channels", torch.zeros(2, 3, 5))
    log.image("integers", torch.zeros(4, 4, dtype=torch.int64))
    log.image("no picture", "text")
    log.figure("no figure", 3)
    log.text("no text", 3)
    log.text("long" * 99, "text")
    log.image(7, torch.zeros(4, 4))
    Log(open_tracking(tmp_path, 0, 9, is_main=False), 1).image("other rank", "text")
    names = ["channels", "integers", "no picture", "no figure", "no text", "long" * 99, 7]
    found = [message for message in warnings if message.startswith("warning: ")]
    assert len(found) == len(names)
    for name, message in zip(names, found, strict=True):
        assert message.startswith(f"warning: log of {name!r} has failed: ") and "\n" not in message
    log.text("good", "text")
    tracking.close()
    assert read_media(tmp_path) == {"step_00000001_good.txt": "text"}


def test_tracker_that_fails_leaves_the_others_going(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "template_package.tracking.wandb", raising=False)
    track(tmp_path, 0, 4, tracker="wandb,tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    (warning,) = warnings
    assert "logging.tracker=wandb has failed" in warning and warning.endswith(
        "Try: pip install wandb."
    )


def track_twice(directory: Path, tracker: str, **variables: str) -> None:
    """Track steps 1 to 7 of a run in one process, then resume after step 4 in another and track until step 10."""
    for words in (f"Path({str(directory)!r}), 0, 7", f"Path({str(directory)!r}), 4, 10"):
        code = f"from pathlib import Path; from test_tracking import track; track({words}, tracker={tracker!r})"
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            check=False,
            env=environment(Path(__file__).parent) | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            cwd=directory.parents[1],
        )
        assert done.returncode == 0 and "has failed" not in done.stdout, done.stdout


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the folder project/runs/run. Only its parents exist."""
    directory = tmp_path / "project" / "runs" / "run"
    directory.parent.mkdir(parents=True)
    return directory


needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
needs_trackio = pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
REPEATED = [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10]  # these trackers cannot take points back


@needs_mlflow
def test_mlflow_keeps_one_run_in_a_database_among_the_runs(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    track_twice(directory, "mlflow", MLFLOW_DISABLE_TELEMETRY="true")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory.parent.as_posix()}/mlflow.db")
    experiment = client.get_experiment_by_name("project")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["optimizer.betas"] == "[0.9, 0.999]" and run.data.params["seed"] == "42"
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in points] == [
        (step, 1 / step) for step in REPEATED
    ]
    folder = directory.parent / "mlartifacts" / run.info.run_id / "artifacts"
    assert (folder / "media" / "step_00000010_words.txt").read_text(
        encoding="utf-8"
    ) == "several\nlines"
    pictures = [path.name for path in (folder / "images").glob("*.png")]
    assert len(pictures) == 2 and all(name.startswith("samples~first+step+") for name in pictures)
    assert [path.name for path in directory.parents[1].iterdir()] == ["runs"]


@needs_trackio
def test_trackio_keeps_one_run_on_this_machine(directory: Path, tmp_path: Path) -> None:
    track_twice(directory, "trackio", TRACKIO_DIR=str(tmp_path / "store"), HF_HUB_OFFLINE="1")
    with sqlite3.connect(tmp_path / "store" / "project.db") as database:
        rows = database.execute(
            "select run_id, run_name, step, metrics from metrics order by id"
        ).fetchall()
    assert len({(run_id, name) for run_id, name, *_ in rows}) == 1 and rows[0][1] == "run"
    points = [(step, json.loads(metrics)) for *_, step, metrics in rows]
    losses = [(step, values["train/loss"]) for step, values in points if "train/loss" in values]
    assert losses == [(step, 1 / step) for step in REPEATED]
    pictures = [
        (step, values["samples/first"]["file_path"])
        for step, values in points
        if "samples/first" in values
    ]
    assert [step for step, _ in pictures] == [7, 10]
    assert all((tmp_path / "store" / "media" / path).is_file() for _, path in pictures)
    assert [step for step, values in points if "words" in values] == [7, 10]


@needs_wandb
def test_wandb_keeps_one_run_offline(directory: Path) -> None:
    track_twice(directory, "wandb", WANDB_MODE="offline")
    parts = list((directory / "wandb").glob("offline-run-*"))
    run_id = (directory / "wandb_id.txt").read_text(encoding="utf-8")
    assert len(parts) == 2 and all(part.name.endswith(f"-{run_id}") for part in parts)
    for part in parts:
        media = part / "files" / "media"
        assert len(list(media.glob("images/**/*.png"))) == 1
        assert "several\nlines" in next(media.glob("html/*.html")).read_text(encoding="utf-8")


def test_evaluation_that_is_still_due_at_the_end_reaches_the_tracker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = open_tracking(tmp_path, 12, 12, tracker="tensorboard", is_pending=True)
    tracking.record({"split": "validation", "step": 12, "epoch": 1, "loss": 0.5, "num_samples": 9})
    tracking.close()
    assert (
        "validation/loss"
        in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    )

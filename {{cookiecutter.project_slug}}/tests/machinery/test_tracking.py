"""The files and words of a run while it trains: metrics.jsonl, tracker, console, progress bar, the ranks' logs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from template_package.config import load_config
from template_package.errors import FailureError
from template_package.launching.distributed import RankContext
from template_package.tracking import Tracking
from template_package.tracking.logs import console, rank_logs

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, time, warnings
from pathlib import Path
from template_package.config import load_config
from template_package.launching.distributed import RankContext
from template_package.tracking import Tracking
from template_package.tracking.logs import rank_logs

directory, tracker = Path(sys.argv[1]), sys.argv[2]
with rank_logs(directory, RankContext()):
    config = load_config(Path(sys.argv[3]), [f"logging.tracker={tracker}"])
    tracking = Tracking(directory, config, RankContext(), step=0, total_steps=60, is_evaluation_pending=False)
    for step in range(1, 61):
        time.sleep(0.01)  # the bar is drawn several times
        if step % 20 == 0:
            counts = {"step": step, "epoch": step // 20}
            epoch_loss = 0.5 if step == 40 else None
            tracking.record({"split": "train", **counts, "loss": 0.25, "samples_per_second": 5000.5}, epoch_loss)
            tracking.record({"split": "validation", **counts, "loss": 0.125, "accuracy": 0.75, "num_samples": 9})
        if step == 30:
            print("printed", "words", flush=True)
            print("in two", end=" ", flush=True)
        if step == 40:
            print("parts")
            warnings.warn("a warning")
        if step == 50:
            print("whole\\nunfinished, ", end="", flush=True)
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
    context = RankContext(rank=0 if is_main else 1, world_size=2)
    return Tracking(directory, config, context, step=step, total_steps=total_steps, is_evaluation_pending=is_pending)


def track(directory: Path, resumed_step: int, last_step: int, *, tracker: str = "none", is_main: bool = True) -> None:
    """Steps of a run, each with a line for training and, every second step, one for validation."""
    tracking = open_tracking(directory, resumed_step, 12, tracker=tracker, is_main=is_main)
    for step in range(resumed_step + 1, last_step + 1):
        tracking.record({"split": "train", "step": step, "epoch": 1, "loss": 1 / step, "samples_per_second": 10.0})
        if step % 2 == 0:
            tracking.record({"split": "validation", "step": step, "epoch": 1, "loss": 2 / step, "num_samples": 9})
        tracking.advance(step)
    tracking.close()


def environment(*paths: Path) -> dict[str, str]:
    """The environment of a process that imports from `paths` first, and from this project."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])), "PYTHONUTF8": "1"}


def screen(output: str) -> list[str]:
    """The lines on a terminal after `output`: a carriage return goes back to the line's start, and text overwrites."""
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
        {"split": "train", "step": 1, "loss": 0.1 + 0.2, "epoch": 1, "gradient_norm": float("inf"), **speed}
    )
    tracking.record({"split": "validation", "step": 1, "epoch": 1, "loss": float("nan"), "名": -1e-300})
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")  # written at once, not at the end
    first, second = (json.loads(line) for line in text.splitlines())
    assert list(first) == ["split", "step", "loss", "epoch", "gradient_norm", "samples_per_second"]
    assert first["loss"] == 0.1 + 0.2 and first["gradient_norm"] == float("inf")
    assert second["loss"] != second["loss"] and second["名"] == -1e-300
    tracking.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_line_that_the_disk_refuses_ends_the_run_in_one_line(tmp_path: Path) -> None:
    tracking = open_tracking(tmp_path, 0, 9)
    tracking._metrics = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115 - the tracking closes it
    with pytest.raises(FailureError, match=r"cannot write .*metrics.jsonl: No space left on device.*same command"):
        tracking.record({"split": "train", "step": 1, "epoch": 1, "loss": 0.5, "samples_per_second": 1.0})


@pytest.mark.parametrize("ending", ["", '{"split": "train", "st', '{"split": "train", "step": 8, "loss": 1}', "\0\0"])
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
    assert losses == [(step, pytest.approx(1 / step)) for step in range(1, 11)]  # float32 in the event file
    assert [event.step for event in events.Scalars("validation/loss")] == [2, 4, 6, 8, 10]


def test_missing_tracker_is_one_warning_and_files_hold_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "tensorboard.py").write_text("raise ModuleNotFoundError('No module named tensorboard')\n")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "tensorboard", str(ROOT / "config.yaml")]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, encoding="utf-8", check=True)
    warning, *lines = done.stdout.splitlines()
    assert warning.startswith("warning:") and "pip install tensorboard" in warning
    assert [re.sub(r"\d\d:\d\d", "T", line) for line in lines] == [
        "step 20/60: loss 0.25, 5000 samples/s, T left",
        "step 20: validation loss 0.125, accuracy 0.75",
        "printed words",
        "in two epoch 2 (step 40/60): training loss 0.5, 5000 samples/s, T left",
        "step 40: validation loss 0.125, accuracy 0.75",
        "parts",
        "whole",
        "unfinished, step 60/60: loss 0.25, 5000 samples/s, T left",
        "step 60: validation loss 0.125, accuracy 0.75",
        "after the run",
    ]
    assert "\r" not in done.stdout + done.stderr
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 6


def test_tracker_whose_folder_vanishes_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(logging.getLogger("template_package"), "propagate", True)
    tracking = open_tracking(tmp_path, 0, 60, tracker="tensorboard")
    for step in range(1, 8):
        tracking.record({"split": "train", "step": step, "epoch": 1, "loss": 1.0, "samples_per_second": 1.0})
        if step == 3:
            shutil.rmtree(tmp_path / "tensorboard")
    tracking.close()
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 7
    assert caplog.text.count("logging.tracker=tensorboard has failed") == 1


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
    lines = screen(output.decode())
    evaluated = r"step {}: validation loss 0\.125, accuracy 0\.75"
    expected = [
        evaluated.format(20),
        "printed words",
        r"epoch 2 \(step 40/60\): training loss 0\.5, 5000 samples/s, \d\d:\d\d left",
        evaluated.format(40),
        "in two parts",
        ".*UserWarning: a warning",
        "whole",
        evaluated.format(60),
        r"step 60/60 100%\|█+\| 00:00 left, loss 0\.25",
        "unfinished, after the run",
    ]
    assert len(lines) == len(expected) and all(map(re.fullmatch, expected, lines)), "\n".join(lines)
    first, *log = (tmp_path / "logs" / "rank_0.log").read_text(encoding="utf-8").splitlines()
    assert all(f"{word}=" in first for word in ("host", "pid", "rank", "local_rank", "world_size", "device"))
    for pattern, line in zip([*expected[:8], "unfinished, "], log, strict=True):  # not the bar
        assert re.fullmatch(f"(.* )?{pattern}", line), line


def fail_as_rank_1(directory: Path, attempt: int) -> None:
    with rank_logs(directory, RankContext(rank=1, world_size=2, local_rank=1)):
        print("printed", attempt)
        logging.getLogger("template_package.trainer").info("logged %d", attempt)
        subprocess.run(["echo", "from another program"], check=True)
        os.write(2, b"written as C++ writes\n")
        print("fatal", attempt, file=console())
        if (process := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        os.waitpid(process, 0)
        print(1 / 0)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_other_ranks_say_everything_to_their_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for attempt in range(2):
        with pytest.raises(ZeroDivisionError):
            fail_as_rank_1(tmp_path, attempt)
        print("on the console again", flush=True)
        os.write(1, b"the descriptor too\n")
    output, errors = capfd.readouterr()
    assert output == "on the console again\nthe descriptor too\n" * 2 and errors == "fatal 0\nfatal 1\n"
    starts = re.split(r"\n(?=\S+ \S+ host=)", (tmp_path / "logs" / "rank_1.log").read_text(encoding="utf-8"))
    assert len(starts) == 2
    for attempt, start in enumerate(starts):
        first, *lines = start.splitlines()
        assert f"pid={os.getpid()} rank=1 local_rank=1 world_size=2 device=cpu" in first
        assert lines[0] == f"printed {attempt}" and lines[1].endswith(f"logged {attempt}")
        assert lines[2:4] == ["from another program", "written as C++ writes"]
        assert lines[4] == "Fatal Python error: Segmentation fault"
        assert lines[-1] == "ZeroDivisionError: division by zero"


def test_evaluation_that_is_still_due_at_the_end_reaches_the_tracker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = open_tracking(tmp_path, 12, 12, tracker="tensorboard", is_pending=True)
    tracking.record({"split": "validation", "step": 12, "epoch": 1, "loss": 0.5, "num_samples": 9})
    tracking.close()
    assert "validation/loss" in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]

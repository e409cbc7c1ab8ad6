"""What a run writes while it goes on: metrics.jsonl, tracker, console, progress bar, the ranks' logs."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from template_package.config import load_config
from template_package.launching.distributed import RankContext
from template_package.training.logs import console, get_logger, rank_logs
from template_package.training.progress import Progress
from template_package.training.tracking import Tracking

ROOT = Path(__file__).parents[1]

SCRIPT = """
import sys, time, warnings
from pathlib import Path
from template_package.config import load_config
from template_package.launching.distributed import RankContext
from template_package.training.logs import rank_logs
from template_package.training.progress import Progress
from template_package.training.tracking import Tracking

directory, tracker = Path(sys.argv[1]), sys.argv[2]
with rank_logs(directory, RankContext()):
    config = load_config(Path(sys.argv[3]), [f"logging.tracker={tracker}"])
    tracking = Tracking(directory, config, RankContext(), progress=Progress(60, 1), total_steps=60)
    for step in range(1, 61):
        time.sleep(0.01)  # the bar is drawn several times
        if step % 20 == 0:
            counts = {"step": step, "epoch": step // 20}
            tracking.record({"split": "train", **counts, "loss": 0.25, "samples_per_second": 5000.5})
            tracking.end_epoch(step // 20, 0.5)
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


def track(directory: Path, resumed_step: int, last_step: int, *, tracker: str = "none", is_main: bool = True) -> None:
    """Steps of a run, each with a line for training and, every second step, one for validation."""
    config = load_config(ROOT / "config.yaml", [f"logging.tracker={tracker}"])
    progress = Progress(num_samples=12, global_batch_size=1, step=resumed_step)
    context = RankContext(rank=0 if is_main else 1, world_size=2)
    tracking = Tracking(directory, config, context, progress=progress, total_steps=12)
    for step in range(resumed_step + 1, last_step + 1):
        tracking.record({"split": "train", "step": step, "epoch": 1, "loss": 1 / step, "learning_rate": 0.1 * step})
        if step % 2 == 0:
            tracking.record({"split": "validation", "step": step, "epoch": 1, "loss": 2 / step, "num_samples": 9})
        tracking.advance(step)
    tracking.close()


def environment(*paths: Path) -> dict[str, str]:
    """Of a process that imports from `paths` first, and from this project."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])), "PYTHONUTF8": "1"}


def screen(output: str) -> list[str]:
    """What a terminal shows after `output`: a carriage return goes back to the line's start, and text overwrites."""
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


def test_metrics_keep_order_and_every_digit_and_stay_json(tmp_path: Path) -> None:
    config = load_config(ROOT / "config.yaml", ["logging.tracker=none"])
    tracking = Tracking(tmp_path, config, RankContext(), progress=Progress(9, 1), total_steps=9)
    tracking.record({"split": "train", "step": 1, "loss": 0.1 + 0.2, "epoch": 1, "gradient_norm": float("inf")})
    tracking.record({"split": "validation", "step": 1, "epoch": 1, "loss": float("nan"), "名": -1e-300})
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")  # written at once, not at the end
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in text.splitlines())
    assert list(first) == ["split", "step", "loss", "epoch", "gradient_norm"] and first["loss"] == 0.1 + 0.2
    assert float(first["gradient_norm"]) == float("inf") and float(second["loss"]) != float(second["loss"])
    assert second["名"] == -1e-300
    tracking.close()


def test_line_that_a_full_disk_takes_later_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)

    class Stumbling(io.FileIO):
        def write(self, content: Any) -> int:
            if len(pauses) < 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    config = load_config(ROOT / "config.yaml", ["logging.tracker=none"])
    tracking = Tracking(tmp_path, config, RankContext(), progress=Progress(9, 1), total_steps=9)
    path = tmp_path / "metrics.jsonl"
    tracking._metrics = io.TextIOWrapper(io.BufferedWriter(Stumbling(path, "a")), encoding="utf-8")
    tracking.record({"split": "train", "step": 1, "epoch": 1, "loss": 0.5})
    assert pauses == [1.0, 2.0] and json.loads(path.read_text(encoding="utf-8"))["loss"] == 0.5


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


@pytest.mark.parametrize("damage", [b"\0\xff", b"[" * 100_000, b'{"split": "train", "step": 1%s}' % (b"0" * 400)])
def test_line_that_nobody_can_read_stays(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    track(tmp_path, 0, 10)
    lines = path.read_bytes().split(b"\n")
    for number in (0, 3):
        lines[number] = damage
    path.write_bytes(b"\n".join(lines))
    track(tmp_path, 7, 10)
    assert path.read_bytes() == b"\n".join(lines)
    path.write_bytes(b"\n".join([*lines[:10], damage, b""]))  # where a step comes again
    track(tmp_path, 7, 10)
    assert path.read_bytes() == b"\n".join(lines)
    track(tmp_path, 0, 10)
    assert damage not in path.read_bytes(), "a new run begins a new file"


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
    lines = [re.sub(r"\d+\.\d s$", "T s", re.sub(r"\d:\d\d:\d\d", "T", line)) for line in lines]
    assert lines == [
        "step 20/60: loss 0.25, 5000 samples/s, T left",
        "epoch 1: training loss 0.5, validation loss 0.125, accuracy 0.75, T s",
        "printed words",
        "in two step 40/60: loss 0.25, 5000 samples/s, T left",
        "parts",
        "epoch 2: training loss 0.5, validation loss 0.125, accuracy 0.75, T s",
        "whole",
        "unfinished, step 60/60: loss 0.25, 5000 samples/s, T left",
        "epoch 3: training loss 0.5, validation loss 0.125, accuracy 0.75, T s",
        "after the run",
    ]
    assert "\r" not in done.stdout + done.stderr
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 6


def test_tracker_whose_folder_vanishes_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(get_logger(), "propagate", True)
    config = load_config(ROOT / "config.yaml", ["logging.tracker=tensorboard"])
    tracking = Tracking(tmp_path, config, RankContext(), progress=Progress(60, 1), total_steps=60)
    for step in range(1, 8):
        tracking.record({"split": "train", "step": step, "epoch": 1, "loss": 1.0})
        if step == 3:
            shutil.rmtree(tmp_path / "tensorboard")
    tracking.close()
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 7
    assert caplog.text.count("logging.tracker=tensorboard has failed") == 1


def test_output_that_never_ends_its_line_does_not_pile_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rank_logs(tmp_path, RankContext()):
        for number in range(20_000):  # a bar of the user's own
            sys.stderr.write(f"\r{number} of 20000" + 60 * "#")
        assert len(sys.stderr._line) < 100  # type: ignore[union-attr]
        sys.stderr.write("\r\ndone\r\n")
    log = (tmp_path / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert log.endswith("19999 of 20000" + 60 * "#" + "\ndone\n")


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
    epoch = r"epoch {}: training loss 0\.5, validation loss 0\.125, accuracy 0\.75, \d+\.\d s"
    expected = [
        epoch.format(1),
        "printed words",
        "in two parts",
        ".*UserWarning: a warning",
        epoch.format(2),
        "whole",
        epoch.format(3),
        r"step 60/60 100%\|█+\| 00:00 left, loss 0\.25, 5000 samples/s",
        "unfinished, after the run",
    ]
    assert len(lines) == len(expected) and all(map(re.fullmatch, expected, lines)), "\n".join(lines)
    first, *log = (tmp_path / "logs" / "rank_0.log").read_text(encoding="utf-8").splitlines()
    assert all(f"{word}=" in first for word in ("host", "pid", "rank", "local_rank", "world_size", "device"))
    for pattern, line in zip([*expected[:7], "unfinished, "], log, strict=True):  # not the bar
        assert re.fullmatch(f"(.* )?{pattern}", line), line


def fail_as_rank_1(directory: Path, attempt: int) -> None:
    with rank_logs(directory, RankContext(rank=1, world_size=2, local_rank=1)):
        print("printed", attempt)
        get_logger().info("logged %d", attempt)
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
    starts = re.split(r"\n\n(?=\d{4}-)", (tmp_path / "logs" / "rank_1.log").read_text(encoding="utf-8"))
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

    config = load_config(ROOT / "config.yaml", ["logging.tracker=tensorboard"])
    progress = Progress(12, 1, step=12, is_evaluation_pending=True)
    tracking = Tracking(tmp_path, config, RankContext(), progress=progress, total_steps=12)
    tracking.record({"split": "validation", "step": 12, "epoch": 1, "loss": 0.5, "num_samples": 9})
    tracking.close()
    assert "validation/loss" in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]

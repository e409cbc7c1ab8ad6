"""Tests of a run that is asked to stop, in any of its processes and in any phase.

All ranks end after the same step, which is saved. The same command then resumes the run as if nothing had happened.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import Project, children

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 10.0
WAITING = """
def build_datasets(config: DataConfig) -> tuple[Numbers, Numbers, Numbers]:
    from pathlib import Path

    (Path(__file__).parents[1] / "waits").unlink(missing_ok=True)
    time.sleep(2.0)
    return build_sets(config)


def build_sets(config: DataConfig)"""
WORDS = (
    "device_ids=cpu,cpu", "model.dropout=0.3", "data.noise=0.1", "loader.num_workers=1", "model.seconds_per_step=0.02",
    "evaluation.micro_batch_size=1", "checkpoint.every_steps=1", "training.epochs=10",
)  # fmt: skip
NUM_STEPS = 70
SLOW_SAVE = (
    "core/checkpoint.py",
    "        write_whole(path, ",
    "        __import__('time').sleep(0.4); write_whole(path, ",
)


def tell_launcher(project: Project, number: int) -> None:
    os.kill(project.session.pid, number)


def tell_group(project: Project, number: int) -> None:
    os.killpg(os.getpgid(project.session.pid), number)


def tell_every_process(project: Project, number: int) -> None:
    """Send the signal to the launcher, to both ranks and to their loader workers."""
    ranks = [pid_of(project, 0), pid_of(project, 1)]
    for pid in (
        *(worker for rank in ranks for worker in children(rank)),
        *ranks,
        project.session.pid,
    ):
        os.kill(pid, number)


def tell_one_rank(project: Project, number: int) -> None:
    os.kill(pid_of(project, 1), number)


def pid_of(project: Project, rank: int) -> int:
    log = (project.directory("run") / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
    return int(re.findall(r"pid=(\d+)", log)[-1])


@pytest.mark.parametrize("phase", ["training", "evaluation", "saving"])
def test_run_saves_and_continues_whichever_process_is_told_in_whichever_phase(
    project: Project, phase: str
) -> None:
    words = (*WORDS, *(["evaluation.every_steps=1"] if phase == "evaluation" else []))
    project.run(*words, "name=undisturbed")
    if phase == "saving":
        project.edit(*SLOW_SAVE)
    elif phase == "evaluation":
        (project.folder / "seconds_per_evaluation").write_text("0.05", encoding="utf-8")
    targets: list[Callable[[Project, int], None]] = [
        tell_one_rank,
        tell_launcher,
        tell_group,
        tell_every_process,
    ]
    stopped_after = [0]
    numbers = [signal.SIGTERM, signal.SIGUSR1] * 2
    # workers ignore the others in any case
    numbers = [
        *numbers[phase == "evaluation" :][:3],
        signal.SIGTERM,
    ]
    for tell, number in zip(targets, numbers, strict=True):
        with signalled(project, tell, number, after_lines=1, after_seconds=0.1) as sent:
            output = project.run(*words, code=143)
        assert time.monotonic() - sent[0] < LIMIT_SECONDS, output
        step = project.lines("run")[-1]["step"]
        assert stopped_after[-1] < step < NUM_STEPS, (
            "it has continued from there, and has not reached its end"
        )
        saved = project.checkpoint("run", step)
        assert saved["step"] == step and project.json("run", "summary.json")["status"] == "stopped"
        assert phase != "evaluation" or saved["early_stopping"]["is_evaluation_pending"]
        stopped_after.append(step)
    if phase == "saving":
        project.edit(SLOW_SAVE[0], *reversed(SLOW_SAVE[1:]))
    (project.folder / "seconds_per_evaluation").unlink(missing_ok=True)
    project.run(*words)
    for split in ("train", "validation"):
        assert project.lines("run", split) == project.lines("undisturbed", split)
    assert project.json("run", "summary.json")["status"] == "complete"


def test_rank_that_is_asked_before_it_can_stop_stops_as_soon_as_it_can(project: Project) -> None:
    project.edit("dataset.py", "def build_datasets(config: DataConfig)", WAITING)
    for last_rank, devices, number in ((1, "cpu,cpu", signal.SIGTERM), (0, "cpu", signal.SIGUSR1)):
        (project.folder / "waits").touch()
        process = project.start(f"device_ids={devices}")
        deadline = time.monotonic() + 60
        log = project.directory("run") / "logs" / f"rank_{last_rank}.log"
        while (project.folder / "waits").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        while (
            not (log.exists() and "pid=" in log.read_text("utf-8")) and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        os.kill(pid_of(project, last_rank), number)
        output = "".join(process.communicate(timeout=60))
        assert process.returncode == 143, output
        assert num_lines(project) <= last_rank, "the other rank may have begun a step"
        shutil.rmtree(project.directory("run"))
    project.run("device_ids=cpu,cpu", "training.epochs=1")


def test_stop_before_step_1_saves_nothing_so_that_a_mistake_can_be_mended(project: Project) -> None:
    project.append(
        "model.py",
        """
former_loss = compute_loss


def compute_loss(model, batch):
    if not os.path.exists("asked"):  # in the rehearsal
        open("asked", "w").close()
        os.kill(os.getpid(), 15)
    return former_loss(model, batch)
""",
    )
    project.run("optimizer.learning_rate=30.0", code=143, command=[sys.executable])
    assert not (project.directory("run") / "checkpoints").exists()
    assert "complete: 21 steps" in project.run("optimizer.learning_rate=0.03")


def test_evaluation_that_was_interrupted_stands_once_in_the_metrics(project: Project) -> None:
    words = (
        "device_ids=cpu,cpu",
        "training.max_steps=4",
        "evaluation.micro_batch_size=1",
        "logging.every_steps=4",
    )
    (project.folder / "seconds_per_evaluation").write_text("0.1", encoding="utf-8")
    with signalled(project, tell_launcher, signal.SIGTERM, after_lines=1, after_seconds=0.5):
        project.run(*words, code=143)
    stopped = project.checkpoint("run", 4)
    assert stopped["early_stopping"]["is_evaluation_pending"]
    (project.folder / "seconds_per_evaluation").unlink()
    project.run(*words)
    # no step was made
    rates = [group["lr"] for group in project.checkpoint("run", 4)["optimizer"]["param_groups"]]
    assert rates == [group["lr"] for group in stopped["optimizer"]["param_groups"]]
    assert "run run is complete" in project.run(*words)
    assert [line["step"] for line in project.lines("run", "validation")] == [4]


def test_ctrl_c_ends_the_command_even_if_an_import_swallows_it(project: Project) -> None:
    swallow = "try:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    pass\n"  # torch imports NumPy so
    project.append("model.py", f"import os\n\n{swallow}")
    project.run("device_ids=cpu", code=130, command=[sys.executable])
    assert not project.directory("run").exists()


def test_sigterm_before_training_ends_with_143(project: Project) -> None:
    project.append("model.py", "import os\n\nos.kill(os.getpid(), 15)")
    project.run("device_ids=cpu", code=143, command=[sys.executable])


def test_ctrl_c_saves_and_one_after_another_signal_does_not_wait(project: Project) -> None:
    for words in (["device_ids=cpu"], ["device_ids=cpu,cpu"]):
        with signalled(project, tell_launcher, signal.SIGINT, after_lines=2):
            project.run(*words, "model.seconds_per_step=0.05", code=130)
        step = project.lines("run")[-1]["step"]
        assert step < 21 and project.checkpoint("run", step)["step"] == step

    def then_ctrl_c(project: Project, number: int) -> None:
        tell_launcher(project, number)
        time.sleep(1.0)
        tell_launcher(project, signal.SIGINT)

    for first, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with signalled(project, then_ctrl_c, first, name=f"stuck-{code}", after_lines=2) as sent:
            project.run(f"name=stuck-{code}", "device_ids=cpu,cpu", "model.fault=hang", code=code)
        assert time.monotonic() - sent[0] < LIMIT_SECONDS


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_ctrl_c_that_ends_the_reader_of_the_console_too_saves(
    project: Project, devices: str
) -> None:
    process = project.start(f"device_ids={devices}", "model.seconds_per_step=0.05")
    while num_lines(project) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    # as Ctrl-C does in `python run.py 2>&1 | tee log`
    for stream in (
        process.stdout,
        process.stderr,
    ):
        assert stream is not None
        stream.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=LIMIT_SECONDS) == 130
    step = project.lines("run")[-1]["step"]
    assert project.checkpoint("run", step)["step"] == step


def test_two_ctrl_c_do_not_wait_for_a_loader_worker(project: Project) -> None:
    process = project.start("loader.num_workers=1", "data.stuck_index=50")
    while num_lines(project) < 1:
        assert process.poll() is None
        time.sleep(0.02)
    for _ in range(2):
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130 and "Traceback" not in errors


def test_only_rank_that_is_asked_in_the_step_in_which_memory_runs_out_does_not_begin_again(
    project: Project,
) -> None:
    words = ("model.fault=memory_later", "model.fault_rank=0", "model.seconds_per_step=1.0")
    process, deadline = project.start(*words), time.monotonic() + 60
    while num_lines(project) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output = "".join(process.communicate(timeout=60))
    assert process.returncode == 143 and "trying 8" in output and "starting again" not in output, (
        output
    )


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_signal_between_two_starts_after_memory_ran_out_is_heeded(
    project: Project, devices: str
) -> None:
    project.edit("dataset.py", "def build_datasets(config: DataConfig)", WAITING)
    words = ("model.fault=memory_later", "model.fault_rank=0")
    process = project.start(f"device_ids={devices}", *words)
    assert process.stderr is not None
    while "starting again" not in (line := process.stderr.readline()):
        assert line, process.wait()
    if devices == "cpu":
        time.sleep(0.5)  # the second start builds its data
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LIMIT_SECONDS) == 143


def test_watch_of_the_first_start_does_not_end_the_second(project: Project) -> None:
    project.edit("dataset.py", "def build_datasets(config: DataConfig)", WAITING)
    project.edit("dataset.py", "    time.sleep(2.0)\n", "    time.sleep(8.0)\n")
    words = ("model.fault=memory_later", "model.fault_rank=0", "launch.timeout_minutes=0.1")
    assert "starting again" in project.run(*words)


@pytest.mark.slow
@pytest.mark.timeout(300)  # six starts one after the other
def test_under_torchrun_the_agent_passes_the_warning_on_and_one_rank_alone_ends_all(
    project: Project,
) -> None:
    options = "--nproc-per-node=2 --standalone --signals-to-handle=SIGTERM,SIGUSR1"
    words = (*WORDS, "evaluation.every_steps=1")
    project.run(*words, "name=undisturbed")
    # the second in an evaluation
    for number, seconds in (
        (signal.SIGUSR1, 0.0),
        (signal.SIGTERM, 0.05),
        (0, 0.0),
    ):
        (project.folder / "seconds_per_evaluation").write_text(str(seconds), encoding="utf-8")
        wanted = num_lines(project) + 1
        restarts = f"--max-restarts={2 if number else 0}"  # the agent, told, does not start again
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split(), restarts]
        process = project.start(*words, command=torchrun)
        while num_lines(project) < wanted:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(2 * seconds)
        process.send_signal(number) if number else tell_one_rank(project, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        step = project.lines("run")[-1]["step"]
        # The agent's own code: 1, or -6 where a thread of torch's was still running.
        assert process.returncode != 0 and step < NUM_STEPS, errors
        saved = project.checkpoint("run", step)["early_stopping"]
        assert saved["is_evaluation_pending"] or not seconds
    (project.folder / "seconds_per_evaluation").unlink()
    project.run(*words)
    for split in ("train", "validation"):
        assert project.lines("run", split) == project.lines("undisturbed", split)


def num_lines(project: Project, name: str = "run") -> int:
    """Return the number of training lines in the run's metrics.jsonl."""
    metrics = project.directory(name) / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count('"train"') if metrics.exists() else 0


FORKS = """
import os, sys, time
import torch.distributed as dist
from template_package.core.group import StopRequest
from template_package.core.ranks import Rank
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
stop = StopRequest(Rank(rank=rank, world_size=2), 1.0, sys.stderr)
dist.barrier()
time.sleep(rank)  # the other rank's request is on its way so long
stop.code()
begun_at = time.monotonic()
if (child := os.fork()) == 0:
    begun_at = time.monotonic()
    if os.fork() > 0:
        print(time.monotonic() - begun_at, flush=True)
    os._exit(0)
seconds = time.monotonic() - begun_at
os.waitpid(child, 0)
print(seconds)
stop.close()
"""


def test_no_worker_is_forked_while_gloo_is_at_work() -> None:
    """A fork while a thread of gloo's asks for Python's lock gives a worker that hangs (Python 3.11)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-c", FORKS]
    options: Any = {"cwd": ROOT, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    ranks = [subprocess.Popen([*command, str(rank), str(port)], **options) for rank in (0, 1)]
    seconds = [[*map(float, rank.communicate(timeout=100)[0].split())] for rank in ranks]
    assert all(of_child < 0.5 for of_child, _ in seconds)  # it has none of gloo's threads
    assert seconds[0][1] > 0.5 and 0.001 < seconds[1][1] < 0.5


@contextmanager
def signalled(
    project: Project,
    tell: Callable[[Project, int], None],
    number: int,
    *,
    name: str = "run",
    after_lines: int,
    after_seconds: float = 0.0,
) -> Iterator[list[float]]:
    """Call `tell` while the `with` body runs a command in the session.

    The call comes `after_seconds` after the run has written `after_lines` more training lines to metrics.jsonl.
    Yield a list to which the time of the call is appended.
    """
    project.session.start()
    wanted, deadline, sent = (
        num_lines(project, name) + after_lines,
        time.monotonic() + 60,
        list[float](),
    )

    def send() -> None:
        while num_lines(project, name) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(after_seconds)
        sent.append(time.monotonic())
        tell(project, number)

    sender = threading.Thread(target=send)
    sender.start()
    yield sent
    sender.join()

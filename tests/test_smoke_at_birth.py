"""Tests of the first smoke test: it prints the right state, keeps the project and leaves no process or stray file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pexpect
import pytest

from baking import (
    PROJECT,
    bake,
    cookiecutter_command,
    files_of,
    plain_environment,
    run_cookiecutter,
)

from conftest import StubPython, marked_processes

NAME = "ddp-experiment"


def restore_ctrl_c() -> None:
    """Make this process react to Ctrl-C (SIGINT), which the background jobs of a shell ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def with_python(python: str, **more: str) -> dict[str, str]:
    """Return environment variables that make the hook try this Python first."""
    return {"DDP_TEMPLATE_PYTHON": python, **more}


def state_of(output: str) -> str:
    """Return the state that the hook printed, and assert that it printed exactly one."""
    states = re.findall(
        r"^smoke test: (PASSED|FAILED|NOT RUN|SKIPPED|INTERRUPTED) \(.+\)\s*$", output, re.MULTILINE
    )
    assert len(states) == 1, output
    return str(states[0])


# ---- with stand-ins for Python


def test_failure_keeps_the_project_and_shows_the_first_traceback(
    template: Path, tmp_path: Path, stub_python: StubPython
) -> None:
    run_py = """mkdir .smoke
    printf 'noise\\nTraceback (most recent call last):\\n  in the log\\nValueError: odd\\n' > .smoke/log.txt
    echo 'smoke test: FAILED (rank 1 raised)'
    exit 1"""
    result = run_cookiecutter(template, tmp_path / "out", with_python(stub_python(run_py)))
    assert state_of(result.stdout) == "FAILED"
    assert result.returncode == 0
    assert "smoke test: FAILED (rank 1 raised)" in result.stdout
    assert (
        "  | Traceback (most recent call last):\n  |   in the log\n  | ValueError: odd\n"
        in result.stdout
    )
    assert str(tmp_path / "out" / NAME / ".smoke" / "log.txt") in result.stdout
    assert (tmp_path / "out" / NAME / "run.py").is_file()


@pytest.mark.parametrize(
    "run_py",
    [
        "exit 0",
        "echo 'smoke test: PASSED (a lie)'; exit 3",
        "echo 'smoke test: FAILED (but exit 0)'; exit 0",
        "echo 'all is well: smoke test: PASSED'; exit 0",
        "kill -9 $$",
    ],
)
def test_passed_needs_the_word_and_the_exit_code(
    template: Path, tmp_path: Path, stub_python: StubPython, run_py: str
) -> None:
    result = run_cookiecutter(template, tmp_path / "out", with_python(stub_python(run_py)))
    assert state_of(result.stdout) == "FAILED"
    assert (tmp_path / "out" / NAME / ".smoke" / "log.txt").is_file()


def test_passed_is_printed_as_the_project_printed_it(
    template: Path, tmp_path: Path, stub_python: StubPython
) -> None:
    run_py = "echo 'smoke test: training'; echo 'a warning' >&2; echo 'smoke test: PASSED (2 ranks, 3.1 s)'"
    result = run_cookiecutter(
        template, tmp_path / "out", with_python(stub_python(run_py), DDP_TEMPLATE_STRICT="1")
    )
    assert result.returncode == 0
    assert state_of(result.stdout) == "PASSED"
    assert "smoke test: training\na warning\nsmoke test: PASSED (2 ranks, 3.1 s)\n" in result.stdout


def test_strict_failure_removes_the_project_and_keeps_the_log(
    template: Path, tmp_path: Path, stub_python: StubPython
) -> None:
    environment = with_python(stub_python("echo 'the reason'; exit 1"), DDP_TEMPLATE_STRICT="1")
    result = run_cookiecutter(template, tmp_path / "out", environment)
    assert state_of(result.stdout) == "FAILED"
    assert result.returncode == 1
    assert files_of(tmp_path / "out") == {f"{NAME}-smoke-log.txt": b"the reason\n"}


def test_skipped_is_printed(template: Path, tmp_path: Path) -> None:
    result = run_cookiecutter(
        template, tmp_path / "out", {"DDP_TEMPLATE_STRICT": "1"}, smoke_test="skip"
    )
    assert result.returncode == 0
    assert state_of(result.stdout) == "SKIPPED"
    assert "python run.py smoke" in result.stdout


@pytest.mark.parametrize("strict", ["0", "1"])
def test_without_torch_the_test_is_not_run_and_the_reason_is_printed(
    template: Path, tmp_path: Path, isolated_python: str, stub_python: StubPython, strict: str
) -> None:
    old = stub_python(anything_else="echo '[[3, 8, 18], {}]'")
    environment = with_python(old, PATH=str(tmp_path), DDP_TEMPLATE_STRICT=strict)
    result = run_cookiecutter(template, tmp_path / "out", environment, isolated_python)
    assert state_of(result.stdout) == "NOT RUN"
    assert result.returncode == int(strict)
    assert f"{old} is Python 3.8.18" in result.stdout
    assert f"{isolated_python} lacks torch, numpy" in result.stdout
    assert "pip install -c constraints.txt -e ." in result.stdout
    assert (tmp_path / "out" / NAME).exists() == (strict == "0")


def test_failed_installation_is_not_run(
    template: Path, tmp_path: Path, stub_python: StubPython
) -> None:
    no_venv = 'case "$*" in *venv*) echo no venv here; exit 5;; esac'
    python = stub_python(anything_else=f"{no_venv}\necho '[[3, 12, 0], {{}}]'")
    result = run_cookiecutter(template, tmp_path / "out", with_python(python), smoke_test="venv")
    assert result.returncode == 0
    assert state_of(result.stdout) == "NOT RUN"
    assert "no venv here" in result.stdout
    assert f"`{python} -m venv .venv` ended with exit code 5" in result.stdout


HANGING = "(trap '' TERM; exec sleep 600) & setsid sleep 600 & echo step 1; sleep 600"


def test_time_out_ends_all_processes(
    template: Path, tmp_path: Path, stub_python: StubPython, mark: str
) -> None:
    environment = with_python(stub_python(HANGING), DDP_TEMPLATE_SMOKE_TIMEOUT="1.5")
    result = run_cookiecutter(template, tmp_path / "out", environment)
    assert state_of(result.stdout) == "FAILED"
    assert result.returncode == 0
    assert "timed out after 1.5 s" in result.stdout
    assert (tmp_path / "out" / NAME / ".smoke" / "log.txt").read_text(
        encoding="utf-8"
    ) == "step 1\n"
    assert marked_processes(mark) == []


def interrupt(
    template: Path,
    output_dir: Path,
    environment: dict[str, str],
    moment: str,
    delay_seconds: float = 0.0,
) -> str:
    """Run cookiecutter in a terminal, press Ctrl-C `delay_seconds` after `moment` is printed, and return the output."""
    command = cookiecutter_command(template, output_dir, {}, sys.executable)
    environment = plain_environment(environment)
    child = pexpect.spawn(
        command[0],
        command[1:],
        env=environment,
        encoding="utf-8",
        timeout=60,
        preexec_fn=restore_ctrl_c,
    )
    child.expect_exact(moment)
    output = f"{child.before}{moment}"
    time.sleep(delay_seconds)
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1  # cookiecutter's exit code after Ctrl-C
    return f"{output}{child.before}"


def assert_ended_within(seconds: float, mark: str) -> None:
    deadline = time.monotonic() + seconds
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked_processes(mark) == []


def test_ctrl_c_ends_all_processes(
    template: Path, tmp_path: Path, stub_python: StubPython, mark: str
) -> None:
    output = interrupt(template, tmp_path / "out", with_python(stub_python(HANGING)), "step 1")
    assert "Aborted!" in output
    assert_ended_within(8, mark)
    assert (tmp_path / "out" / NAME / "run.py").is_file()
    assert not (tmp_path / "out" / NAME / ".smoke").exists()


def test_closed_terminal_ends_all_processes(
    template: Path, tmp_path: Path, stub_python: StubPython, mark: str
) -> None:
    command = cookiecutter_command(template, tmp_path / "out", {}, sys.executable)
    environment = plain_environment(with_python(stub_python(HANGING)))
    child = pexpect.spawn(command[0], command[1:], env=environment, encoding="utf-8", timeout=60)
    child.expect_exact("step 1")
    child.close(force=True)
    assert_ended_within(8, mark)
    assert (tmp_path / "out" / NAME / "run.py").is_file()


# ---- with real training


@pytest.mark.smoke
def test_cookiecutter_with_torch_passes_and_leaves_nothing(
    template: Path, tmp_path: Path, mark: str
) -> None:
    skipped = run_cookiecutter(template, tmp_path / "skipped", smoke_test="skip")
    result = run_cookiecutter(template, tmp_path / "out", {"PATH": os.defpath})
    assert state_of(result.stdout) == "PASSED"
    assert (skipped.returncode, result.returncode) == (0, 0)
    assert f"Smoke test with {sys.executable}" in result.stdout
    assert files_of(tmp_path / "out") == files_of(tmp_path / "skipped")
    # ranks need a moment to end with their parent
    assert_ended_within(3, mark)


@pytest.mark.smoke
@pytest.mark.slow
def test_default_project_reaches_its_accuracy_on_two_ranks_and_one_evaluates_it_the_same(
    template: Path, tmp_path: Path
) -> None:
    project = bake(template, tmp_path)
    for words in (["device_ids=cpu,cpu"], ["evaluate", "device_ids=cpu"]):
        subprocess.run(
            [sys.executable, "run.py", *words],
            cwd=project,
            check=True,
            capture_output=True,
            timeout=300,
        )
    best = json.loads((project / "runs" / "baseline" / "summary.json").read_text(encoding="utf-8"))[
        "best"
    ]
    evaluation = json.loads(
        (project / "runs" / "baseline" / "evaluation.json").read_text(encoding="utf-8")
    )
    assert best["accuracy"] >= 0.97
    assert evaluation["accuracy"] == best["accuracy"]


@pytest.mark.smoke
@pytest.mark.slow
def test_isolated_cookiecutter_finds_the_python_of_the_active_environment(
    template: Path, tmp_path: Path, isolated_python: str
) -> None:
    environment = {"VIRTUAL_ENV": sys.prefix, "PATH": str(tmp_path), "RANK": "1", "WORLD_SIZE": "8"}
    output_dir = tmp_path / "a folder 名"
    result = run_cookiecutter(
        template, output_dir, environment, isolated_python, example="text", tracker="wandb"
    )
    assert state_of(result.stdout) == "PASSED", result.stdout
    assert f"Smoke test with {Path(sys.prefix) / 'bin' / 'python'}" in result.stdout


@pytest.mark.smoke
@pytest.mark.slow
def test_ctrl_c_ends_real_training(template: Path, tmp_path: Path, mark: str) -> None:
    interrupt(
        template,
        tmp_path / "out",
        with_python(sys.executable),
        "training on two ranks",
        delay_seconds=4,
    )
    assert_ended_within(8, mark)
    assert not (tmp_path / "out" / NAME / ".smoke").exists()


@pytest.mark.smoke
@pytest.mark.slow
def test_time_out_ends_real_training(template: Path, tmp_path: Path, mark: str) -> None:
    environment = with_python(sys.executable, DDP_TEMPLATE_SMOKE_TIMEOUT="5")
    result = run_cookiecutter(template, tmp_path / "out", environment)
    assert state_of(result.stdout) == "FAILED"
    assert marked_processes(mark) == []


BROKEN_RESUME = """

_find_run = find_run


def find_run(*arguments, **options):
    found = _find_run(*arguments, **options)
    {line}
    return found
"""


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("return {}", "did not resume"),
        (
            "if found: found['model'] = {name: 0 * weight for name, weight in found['model'].items()}",
            "the resumed run's loss is",
        ),
    ],
    ids=["nothing is resumed", "other weights are resumed"],
)
def test_broken_resume_fails(template: Path, tmp_path: Path, line: str, reason: str) -> None:
    project = bake(template, tmp_path, example="stub", package_name="net")
    with (project / "net" / "core" / "checkpoint.py").open("a", encoding="utf-8") as module:
        module.write(BROKEN_RESUME.format(line=line))
    command = [sys.executable, "run.py", "smoke"]
    result = subprocess.run(
        command, check=False, cwd=project, env=plain_environment(), capture_output=True, text=True
    )
    assert result.returncode == 1, result.stdout
    assert state_of(result.stdout) == "FAILED"
    assert reason in result.stdout
    assert [path.name for path in (project / ".smoke").iterdir()] == ["log.txt"]


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_new_environment_is_made_installed_and_passes(
    template: Path, tmp_path: Path, isolated_python: str
) -> None:
    environment = with_python(isolated_python)  # it has no torch
    result = run_cookiecutter(
        template, tmp_path / "out", environment, smoke_test="venv", license="none", tracker="none"
    )
    assert state_of(result.stdout) == "PASSED", result.stdout
    project = tmp_path / "out" / NAME
    assert f"Smoke test with {project / '.venv' / 'bin' / 'python'}" in result.stdout
    assert [*project.glob(".venv/lib/python*/site-packages/torch")]
    assert (project / "constraints.txt").read_bytes() == (
        template / PROJECT / "constraints.txt"
    ).read_bytes()


@pytest.mark.smoke
@pytest.mark.slow
def test_new_environment_keeps_the_torch_that_is_there(template: Path, tmp_path: Path) -> None:
    environment = with_python(sys.executable, PIP_CONSTRAINT="/a/container/names/a/file")
    result = run_cookiecutter(
        template, tmp_path / "out", environment, smoke_test="venv", tracker="none"
    )
    assert state_of(result.stdout) == "PASSED", result.stdout
    assert f"torch {version('torch')} of {sys.executable} stays" in result.stdout
    project = tmp_path / "out" / NAME
    python = project / ".venv" / "bin" / "python"
    assert f"Smoke test with {python}" in result.stdout
    assert not [*project.glob(".venv/lib/python*/site-packages/torch*")]
    found = subprocess.check_output(
        [python, "-c", "import torch; print(torch.__file__)"], text=True
    )
    assert Path(found).is_relative_to(sys.prefix)
    pin = f"\ntorch=={version('torch').partition('+')[0]}\n"
    assert pin in (project / "constraints.txt").read_text(encoding="utf-8")

"""`python run.py doctor`: tells what breaks runs here, one line a check, with its remedy; `--json` for machines.

The checks run in a process of their own (`run.py doctor checks`). This one needs neither torch nor your files and only
waits, so it ends in time, whatever hangs there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from select import select

from ...errors import ConfigError, one_line
from .. import CommandLine
from .checks import CHECKS, Finding, run_checks

SECONDS = 26.0


def main(line: CommandLine) -> int:
    """0, or 1 if something is broken."""
    if line.rest == ["checks"]:
        return run_checks(line)
    if line.rest not in ([], ["--json"]):
        raise ConfigError(f"{one_line(' '.join(line.rest))}: doctor takes --json, and settings of the form key=value.")
    findings = []
    for finding in _consult(line):
        findings.append(finding)
        if not line.rest:
            remedy = f". {finding.remedy}" if finding.remedy else ""
            print(f"{finding.status:8} {finding.check}: {finding.detail}{remedy}", flush=True)
    counts = Counter(finding.status for finding in findings)
    if line.rest:
        print(json.dumps({"checks": [finding._asdict() for finding in findings]}, indent=2))
    else:
        print(f"doctor: {counts['ok']} ok, {counts['warning']} to look at, {counts['broken']} broken")
    return int(counts["broken"] > 0)


def _consult(line: CommandLine) -> Iterator[Finding]:
    """The findings, each check's as soon as they are there; the check that hangs, and those that it kept waiting."""
    deadline = time.monotonic() + SECONDS
    script = Path(__file__).parents[3] / "run.py"
    process = subprocess.Popen(
        [sys.executable, str(script), "doctor", "checks", "--config", str(line.config_path), *line.overrides],
        env=os.environ | {"RES_OPTIONS": "timeout:2 attempts:1"},  # a lost name service would take all the time
        stdout=subprocess.PIPE,
        bufsize=0,  # select() does not see what a buffer holds
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for number, check in enumerate(CHECKS, start=1):
            is_answered, *_ = select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            answer = process.stdout.readline() if is_answered else b""
            yield from (Finding(*finding) for finding in json.loads(answer or b"[]"))
            if not answer:
                reason = "the process that checks it has died" if is_answered else f"no answer within {SECONDS:g} s"
                yield Finding(check.name, "broken", reason, check.remedy)
                if others := ", ".join(other.name for other in CHECKS[number:]):
                    yield Finding("the rest", "warning", f"not checked: {others}", f"Mend {check.name} first.")
                return
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # no wait: a process that waits for a dead disk does not even die

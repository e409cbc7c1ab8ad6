"""`python run.py doctor`: what breaks runs, one line a check, with the remedy; `--json` for machines.

The checks run in other processes (doctor/checks.py). This one needs neither torch nor your files and only waits, so it
ends in time, whatever hangs there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from ..doctor.checks import CHECKS, run_checks
from ..doctor.findings import Finding
from . import CommandLine

SECONDS = 25.0


def main(line: CommandLine) -> int:
    """0, or 1 if something is broken."""
    deadline = time.monotonic() + SECONDS
    processes, reports = _start(line, deadline)
    findings = []
    try:
        for finding in _receive(reports, deadline):
            findings.append(finding)
            if not line.is_json:
                remedy = f". {finding.remedy}" if finding.remedy else ""
                print(f"{finding.status:8} {finding.check}: {finding.detail}{remedy}", flush=True)
    finally:
        is_left = not all([_end(process) for process in processes])
    counts = Counter(finding.status for finding in findings)
    if line.is_json:
        print(json.dumps({"checks": [finding._asdict() for finding in findings]}, indent=2))
    else:
        print(f"doctor: {counts['ok']} ok, {counts['warning']} to look at, {counts['broken']} broken")
    code = int(counts["broken"] > 0)
    if is_left:
        sys.stdout.flush()
        os._exit(code)  # leaves it behind: a normal exit would wait for it
    return code


def _start(line: CommandLine, deadline: float) -> tuple[list[BaseProcess], dict[bool, Connection]]:
    """A process for the checks without torch, one for those with it, and the pipes through which these answer."""
    context = multiprocessing.get_context("spawn")
    processes, reports = list[BaseProcess](), {}
    for needs_torch in (False, True):
        reports[needs_torch], sender = context.Pipe(duplex=False)
        arguments = (needs_torch, line.config_path, line.overrides, deadline, sender)
        processes.append(context.Process(target=run_checks, args=arguments))
        processes[-1].start()
        sender.close()
    return processes, reports


def _receive(reports: dict[bool, Connection], deadline: float) -> Iterator[Finding]:
    """The findings in the order of CHECKS, each as soon as it is there; broken are those that are not by deadline."""
    found: dict[str, list[Finding]] = {}
    for check in CHECKS:
        report, reason = reports[check.needs_torch], f"no answer within {SECONDS:g} s"
        while check.name not in found and report.poll(max(0.0, deadline - time.monotonic())):
            try:
                name, findings = report.recv()
            except EOFError:
                reason = "the process that checks it has died"
                break
            found[name] = findings
        yield from found.get(check.name, [Finding(check.name, "broken", reason, check.if_silent)])


def _end(process: BaseProcess) -> bool:
    """Kill it and what it has started; False if it does not even die, as when a file system hangs."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a group since run_checks began
    process.kill()
    process.join(timeout=1.0)
    return process.exitcode is not None

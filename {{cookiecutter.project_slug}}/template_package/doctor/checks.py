"""The list of checks, and what runs them: each in a thread, so that one that hangs keeps no other from answering; and
in two processes, since a thread that imports torch or your files may keep the others of its process from running.

commands/doctor.py waits for the answers, and ends these processes when it has waited long enough.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from ..launching.starting import die_with_parent
from . import gpus, host, links, software
from .findings import Finding, Surroundings

if TYPE_CHECKING:
    from ..config import Config


class Check(NamedTuple):
    """if_silent: what to do if there is no answer in time."""

    name: str
    find: Callable[[Surroundings], Iterable[Finding]]
    needs_torch: bool
    if_silent: str


CHECKS = (
    Check("python", software.check_python, False, "See whether this folder can be read."),
    Check("libraries", software.check_libraries, False, "Is the environment on a slow file system?"),
    Check("hostname", host.check_hostname, False, "The name service does not answer: add this host to /etc/hosts."),
    Check("disk", host.check_disk, False, "Its file system does not answer: let runs be a link to another."),
    Check("shared memory", host.check_shared_memory, False, "See df /dev/shm"),
    Check("open files", host.check_open_files, False, "See ulimit -n"),
    Check("clock", host.check_clock, False, "The file system of runs/ does not answer: see disk."),
    Check("torch", software.check_torch, True, "Is the environment on a slow file system?"),
    Check("config", software.check_config, True, "Let the import of model.py and dataset.py do nothing slow."),
    Check("driver", gpus.check_driver, True, gpus.DRIVER_REMEDY),
    Check("memory", gpus.check_memory, True, gpus.DRIVER_REMEDY),
    Check("devices", gpus.check_devices, True, "See the lines above; if they are fine, nvidia-smi."),
    Check("gloo", links.check_gloo, True, "See the lines above; does a firewall stand in the way?"),
)


def run_checks(
    needs_torch: bool, config_path: Path, overrides: Sequence[str], deadline: float, report: Connection
) -> None:
    """What a process of its own does: run those checks, and send (name, findings) of each as soon as they are there."""
    os.setsid()  # a group of its own, that can be ended together
    die_with_parent()
    os.dup2(2, 1)  # stdout is the doctor's: what model.py or a library prints goes to stderr
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # ids as nvidia-smi shows them; CUDA has not started yet
    pool = ThreadPoolExecutor(len(CHECKS) + 2)
    torch: Future[ModuleType] = Future()
    config: Future[Config] = Future()
    if needs_torch:
        torch = pool.submit(import_module, "torch")
        config = pool.submit(_load_config, torch, config_path, overrides)
    around = Surroundings(os.environ, deadline, torch, config)
    running = {pool.submit(check.find, around): check.name for check in CHECKS if check.needs_torch is needs_torch}
    for done in as_completed(running):
        is_without_torch = torch.done() and done.exception() is torch.exception() is not None  # said by one line
        report.send((running[done], [] if is_without_torch else _findings(running[done], done)))
    os._exit(0)


def _load_config(torch: Future[ModuleType], path: Path, overrides: Sequence[str]) -> Config:
    torch.result()  # two threads that import the same modules get in each other's way
    from ..config import load_config

    return load_config(path, overrides)


def _findings(name: str, done: Future[Iterable[Finding]]) -> list[Finding]:
    try:
        return list(done.result())
    except Exception as error:
        traceback.print_exception(error)
        return [Finding(name, "broken", f"the check failed with {type(error).__name__}: {error}", "See above.")]

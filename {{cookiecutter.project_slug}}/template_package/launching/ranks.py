"""What a rank does, however it was started: meet the others, join the group, run, leave, and say what went wrong."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist

from ..config import Config
from ..validation import ConfigError
from .distributed import RankContext, join_group, leave_group, set_context
from .environment import RUNS_FOLDER, Launched
from .meeting import agree, arrival_timeout, fingerprint
from .processes import STOPPED, Failure, Report
from .starting import RunEnds, num_usable_cores, requests_end_it

RunFunction = Callable[[int, int, Config], None]
Address = tuple[str, int, str]
"""Host, port and prefix of the store where ranks started here meet."""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN)
SLOW_DISK = (errno.ETIMEDOUT, errno.EAGAIN)
"""Of a disk's if a file is named; a connection's otherwise."""
IN_THE_WAY = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""In the run's folder; of a file of the user's the traceback tells more."""
MAX_TEXT = 15_000
"""Characters of a failure's text: a pipe holds 64 KiB, and the launching process reads after the rank has ended."""


def run_rank_here(run_fn: RunFunction, config: Config, context: RankContext) -> int:
    """The exit code of the only rank, in the calling process: a debugger works."""
    with requests_end_it():
        return _run_rank(run_fn, config, context, partial(print_failure, place=context))


def run_started_rank(run_fn: RunFunction, config: Config, place: RankContext, address: Address, report: Report) -> int:
    """The exit code of a rank that our own launching process has started."""
    host, port, prefix = address
    timeout = timedelta(minutes=config.launch.timeout_minutes)
    store = dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, timeout=timeout))
    return _run_rank(run_fn, config, replace(place, store=store), report)


def run_launched_rank(run_fn: RunFunction, config: Config, place: RankContext, launched: Launched) -> int:
    """Run this process's rank of a launcher's, and end the process with its exit code."""
    store = place.store
    assert store is not None
    if launched.attempt > 0:
        config = go_on(config)
    # Other ranks' stderr is their log while they train.
    console = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)

    def report(failure: Failure) -> None:
        try:
            if store.add("failures", 1) == 1:  # the others' lost connections follow from the first
                print_failure(failure, place, console)
        except dist.DistError:  # whoever held the store is gone; had it failed by itself, it has told why
            last = failure.text.strip().splitlines()[-1]
            print_failure(replace(failure, text=f"rank 0, or who started it, is gone ({last})"), place, console)

    context = place if place.world_size > 1 else replace(place, store=None)
    code = _run_rank(run_fn, config, context, report, fingerprint(config))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads abort about one interpreter exit in ten (torch 2.13)


def go_on(config: Config) -> Config:
    """For another attempt at the same run: resume=never was said of what lay there before the first."""
    if config.checkpoint.resume != "never":
        return config
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto"))


def print_failure(failure: Failure, place: RankContext, console: TextIO | None = None) -> None:
    """The traceback, headed by rank, host and device; or the one line of a user's mistake (on stderr)."""
    if failure.exit_code == 2:
        text = f"error: {failure.text}"
    else:
        text = f"rank {place.rank} ({socket.gethostname()}, {place.device}) failed:\n{failure.text}"
    print(text, file=console or sys.stderr, flush=True)


def _run_rank(
    run_fn: RunFunction, config: Config, context: RankContext, report: Report, identity: dict[str, object] | None = None
) -> int:
    # Idle OpenMP threads spin: two ranks with a thread for each core run 15 times slower than with their share.
    torch.set_num_threads(max(1, num_usable_cores() // context.local_world_size))
    timeout = timedelta(minutes=config.launch.timeout_minutes)

    def fail(text: str, code: int = 1) -> None:
        report(Failure(context.local_rank, code, text[-MAX_TEXT:], time.time()))

    set_context(replace(context, abort=fail))
    code = 0
    try:
        if config.launch.debug:
            is_nccl = context.device.type == "cuda" and config.launch.backend != "gloo"
            # torch 2.13: DistributedDataParallel on gloo dies of SIGSEGV under DETAIL.
            os.environ.update(TORCH_DISTRIBUTED_DEBUG="DETAIL" if is_nccl else "INFO", NCCL_DEBUG="INFO")
            dist.set_debug_level_from_env()  # torch has read the environment when it was imported
        if context.store is not None:
            # Wait for all ranks, and refuse those that run something else.
            count, arrival = context.world_size, arrival_timeout(config.launch)
            agree(context.store, "rank", context.rank, count, identity or {}, arrival)
            context.store.set_timeout(2 * timeout)
        # Twice, since a hang is found by training/watchdog.py before, which knows it from a run that was halted.
        join_group(context, config.launch.backend, 2 * timeout)
        run_fn(context.rank, context.world_size, config)
    except ConfigError as error:
        fail(str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return STOPPED[0]
    except RunEnds as end:
        code = int(cast(Any, end.code))
    except SystemExit as leaving:  # a rank that leaves by itself leaves the others waiting
        fail(f"{traceback.format_exc()}sys.exit({leaving.code!r}) ended the rank before the run's end")
        return 1
    except BaseException as error:
        fail(_disk_failure(error, config.name) or traceback.format_exc())
        return 1
    if code in (0, *STOPPED):  # otherwise the other ranks may sit in a collective, and leaving would wait for them
        leave_group()
    return code


def _disk_failure(error: BaseException, name: str) -> str:
    """One line if a file of the run's could not be used for the disk's sake. name: the run's."""
    if not isinstance(error, OSError) or hasattr(error, "__notes__"):  # they name the sample that was read
        return ""
    path, folder = Path(str(error.filename)), Path(os.environ.get(RUNS_FOLDER, "runs"))
    is_runs_own = path == folder or path.is_relative_to(folder / name)
    if error.errno not in DISK_ERRORS + SLOW_DISK * bool(error.filename) + IN_THE_WAY * is_runs_own:
        return ""
    return (
        f"cannot read or write {error.filename or 'the disk'}: {error.strerror}. The last checkpoint is whole: mend "
        "the disk, and the same command continues."
    )

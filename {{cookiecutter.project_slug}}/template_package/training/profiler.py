"""Profiles the steps of logging.profile_steps."""

from pathlib import Path
from typing import Any


def start_profiler(directory: Path, rank: int, steps: list[int] | None, steps_done: int) -> Any:
    """Start a profiler for steps[0] to steps[1]. Return None if `steps` is None or those steps are already done."""
    if steps is None or steps_done >= steps[1]:
        return None
    from torch.profiler import profile, schedule

    path, skipped = directory / "profile" / f"rank_{rank}.json", max(0, steps[0] - 1 - steps_done)
    path.parent.mkdir(exist_ok=True)
    active = schedule(
        wait=0, warmup=0, active=steps[1] - skipped - steps_done, repeat=1, skip_first=skipped
    )
    profiler = profile(
        schedule=active, on_trace_ready=lambda done: done.export_chrome_trace(str(path))
    )
    profiler.start()
    return profiler

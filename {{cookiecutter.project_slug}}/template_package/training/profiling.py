"""`logging.profile_steps: [first, last]`: a trace of these steps, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ..launching.distributed import RankContext


class StepProfiler:
    """Records the steps from `first` to `last` into runs/<name>/profile/rank_<r>.json."""

    def __init__(self, steps: list[int] | None, directory: Path, context: RankContext) -> None:
        self.first, self.last = steps or (0, -1)  # none
        self._path = directory / "profile" / f"rank_{context.rank}.json"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if context.device.type == "cuda" else [])
        self._profile = profile(activities=activities, record_shapes=True)
        self._is_running = False

    def toggle(self, step: int) -> None:
        """Called with the number of finished steps: begins before the first of the range, writes after the last."""
        if not self._is_running and self.first - 1 <= step < self.last:
            self._profile.start()
            self._is_running = True
        elif step == self.last:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, also of a run that ends within the range."""
        if self._is_running:
            self._is_running = False
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))

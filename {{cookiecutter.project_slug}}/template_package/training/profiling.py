"""`logging.profile_steps: [first, last]`: a trace of these steps, for TensorBoard, Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ..launching.distributed import RankContext


class StepProfiler:
    """Records the steps from `first` to `last` into runs/<name>/profile/rank_<r>.json."""

    def __init__(self, steps: list[int], directory: Path, context: RankContext) -> None:
        self.first, self.last = steps
        self._path = directory / "profile" / f"rank_{context.rank}.json"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if context.device.type == "cuda" else [])
        self._profile = profile(activities=activities, record_shapes=True)

    def toggle(self, step: int) -> None:
        """Called with the number of finished steps: begins before the first of the range, writes after the last."""
        if step == self.first - 1:
            self._profile.start()
        elif step == self.last:
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))

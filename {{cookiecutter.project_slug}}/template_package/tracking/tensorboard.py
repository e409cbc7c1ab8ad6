"""TensorBoard tracker: writes curves to runs/<name>/tensorboard, for `tensorboard --logdir runs`."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """Writes scalars. A resumed run hides the points of steps that come again."""

    def __init__(self, directory: Path, config: dict[str, Any], resumed_step: int) -> None:
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=resumed_step + 1)
        self.close = self._writer.close

    def record(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to each curve."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

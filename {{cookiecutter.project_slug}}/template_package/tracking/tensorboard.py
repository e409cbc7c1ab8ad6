"""TensorBoard tracker. It writes to runs/<name>/tensorboard. To see the curves, type `tensorboard --logdir runs`."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """Writes scalars, images and text. If a resumed run repeats steps, TensorBoard hides the old points for them."""

    def __init__(self, directory: Path, config: dict[str, Any], resumed_step: int) -> None:
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=resumed_step + 1)
        self.close = self._writer.close

    def record(self, step: int, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def show(self, step: int, name: str, path: Path) -> None:
        """Add the file at `path`: a picture, or a .txt file, which TensorBoard shows as Markdown."""
        if path.suffix == ".txt":
            self._writer.add_text(name, path.read_text(encoding="utf-8"), step)
        else:
            self._writer.add_image(
                name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC"
            )

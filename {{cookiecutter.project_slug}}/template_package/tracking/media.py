"""Writes pictures and texts to runs/<name>/media and hands them to the trackers."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files import write_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MediaLog:
    """The `log` of functions in model.py. Rank 0 writes, other ranks do nothing; a failure is a warning."""

    step: int
    folder: Path | None  # None on the other ranks
    show: Callable[..., None]  # hands the file to the trackers

    def image(self, name: str, picture: Any) -> None:
        """Write a PNG of an array or tensor (H, W), (H, W, 3) or (C, H, W), uint8 or floats in [0, 1]; or PIL image."""
        self._write(name, ".png", lambda path: _as_image(picture).save(path, format="PNG"))

    def figure(self, name: str, figure: Any) -> None:
        """Write a PNG of a matplotlib figure, and close it."""
        self._write(name, ".png", lambda path: figure.savefig(path, format="png"))
        with suppress(KeyError, TypeError):  # on each rank: pyplot keeps a figure until it is closed
            sys.modules["matplotlib.pyplot"].close(figure)

    def text(self, name: str, text: str) -> None:
        """Write a text file. Most trackers show it as Markdown."""
        self._write(name, ".txt", lambda path: path.write_text(text, encoding="utf-8"))

    def _write(self, name: str, suffix: str, save: Callable[[Path], object]) -> None:
        if self.folder is not None:
            try:
                self.folder.mkdir(exist_ok=True)
                path = self.folder / f"step_{self.step:08}_{name.replace('/', '_')}{suffix}"
                write_whole(path, save)
                self.show("show", self.step, name, path)
            except Exception as error:  # no run ends for a picture
                logger.warning("warning: log of %r has failed: %s", name, " ".join(str(error).split()))


def _as_image(picture: Any) -> Any:
    from PIL import Image

    if isinstance(picture, Image.Image):
        return picture
    pixels = torch.as_tensor(picture).detach().cpu()
    if pixels.is_floating_point():
        pixels = (pixels.clamp(0, 1) * 255).round().byte()
    if pixels.ndim == 3 and len(pixels) in (1, 3):
        pixels = pixels.movedim(0, 2)  # (C, H, W) -> (H, W, C)
    return Image.fromarray((pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels).numpy())  # refuses other shapes

"""Lets functions of model.py log pictures, besides the numbers and texts of core/logs.py."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..core import logs as core

logger = logging.getLogger(__name__)


class Log(core.Log):
    """What functions of model.py get as `log`, on rank 0. Errors become warnings."""

    def image(self, name: str, picture: Any) -> None:
        """Save `picture` as PNG. It can be a PIL image, or a tensor or array of uint8 values or floats from 0 to 1.
        A tensor or array should have shape (H, W), (H, W, 3), (3, H, W) or (1, H, W).
        """
        self.write(name, ".png", lambda path: as_image(picture).save(path, format="PNG"))

    def figure(self, name: str, figure: Any) -> None:
        """Write a matplotlib figure as PNG, and close the figure."""
        self.write(name, ".png", lambda path: figure.savefig(path, format="png"))
        # on each rank: pyplot keeps a figure until it is closed
        with suppress(KeyError, TypeError):
            sys.modules["matplotlib.pyplot"].close(figure)

    def write(self, name: str, suffix: str, save: Callable[[Path], object]) -> None:
        try:
            super().write(name, suffix, save)
        except Exception as error:  # a failed picture must not end the run
            text = " ".join(str(error).split())
            logger.warning("warning: log of %r has failed: %s", name, text)


def as_image(picture: Any) -> Any:
    from PIL import Image

    if isinstance(picture, Image.Image):
        return picture
    pixels = torch.as_tensor(picture).detach().cpu()
    if pixels.is_floating_point():
        pixels = (pixels.clamp(0, 1) * 255).round().byte()
    if pixels.ndim == 3 and len(pixels) in (1, 3):
        pixels = pixels.movedim(0, 2)  # (C, H, W) -> (H, W, C)
    # refuses other shapes
    return Image.fromarray((pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels).numpy())

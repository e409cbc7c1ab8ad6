"""Trackio tracker. It stores curves in a local folder, which TRACKIO_DIR can set. To see them, type `trackio show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trackio


class Tracker:
    """Logs to one Trackio run. A resumed run continues the same Trackio run."""

    def __init__(self, directory: Path, config: dict[str, Any], resumed_step: int) -> None:
        project = Path.cwd().name
        # a run of this name may be from a folder that was deleted
        resume = "allow" if resumed_step else "never"
        self._run = trackio.init(project=project, name=directory.name, config=config, resume=resume)
        self.close = trackio.finish

    def record(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to the curve of each scalar."""
        self._run.log(scalars, step=step)

    def show(self, step: int, name: str, path: Path) -> None:
        """Log the file at `path`: a picture, or a .txt file, which Trackio shows as Markdown."""
        is_text = path.suffix == ".txt"
        content = (
            trackio.Markdown(path.read_text(encoding="utf-8")) if is_text else trackio.Image(path)
        )
        self._run.log({name: content}, step=step)

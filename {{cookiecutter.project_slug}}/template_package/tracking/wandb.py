"""Weights & Biases tracker. Before the first run, type `wandb login`, or set WANDB_MODE=offline."""

from __future__ import annotations

import uuid
from html import escape
from pathlib import Path
from typing import Any

import wandb

from ..files import write_whole


class Tracker:
    """Logs scalars, pictures and texts to one W&B run. A resumed run continues the same W&B run."""

    def __init__(self, directory: Path, config: dict[str, Any], resumed_step: int) -> None:
        id_file = directory / "wandb_id.txt"
        if not id_file.exists():
            write_whole(
                id_file, lambda beside: beside.write_text(uuid.uuid4().hex, encoding="utf-8")
            )
        self._run = wandb.init(
            project=wandb.setup().settings.project or Path.cwd().name,  # WANDB_PROJECT, or ours
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            name=directory.name,
            dir=str(directory),
            config=config,
        )
        # Steps after the checkpoint come again after a resume; wandb's own step cannot go back.
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to the curve of each scalar."""
        self._run.log({"step": step, **scalars})

    def show(self, step: int, name: str, path: Path) -> None:
        """Log the file at `path`: a picture or a .txt file."""
        text = (
            f"<pre>{escape(path.read_text(encoding='utf-8'))}</pre>"
            if path.suffix == ".txt"
            else ""
        )
        self._run.log({"step": step, name: wandb.Html(text) if text else wandb.Image(str(path))})

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()

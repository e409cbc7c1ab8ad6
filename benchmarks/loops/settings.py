"""What one run does, as the driver tells every loop: in the environment, so that it passes through any launcher."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "BENCHMARK_SETTINGS"
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.01


@dataclass(frozen=True)
class Settings:
    """One run."""

    work: str
    """mlp or transformer."""
    num_ranks: int
    num_steps: int
    global_batch_size: int
    num_samples: int
    """Of the training set; a multiple of the global batch size, so no epoch ends with a short batch."""
    log_every: int
    is_tuned: bool
    """Whole batches from the data set, and the fused AdamW."""
    orders: str
    """A file of int64: the order of the samples in one epoch after another, as the generated trainer shuffles them."""
    data: str
    """How samples are read, see workload/dataset.py."""
    num_workers: int
    images: str
    """The folder of the PNGs."""
    port: int
    """A free one, for loops that meet at an address of their own."""

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Settings:
        return cls(**json.loads(os.environ[VARIABLE]))

    @property
    def output(self) -> Path:
        """Where the run's results go."""
        return Path(os.environ["BENCHMARK_OUTPUT"])

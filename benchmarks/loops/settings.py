"""The settings of one run. The driver passes them in an environment variable, which any launcher hands on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "BENCHMARK_SETTINGS"
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.01
PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Lightning's names of the precisions."""


@dataclass(frozen=True)
class Settings:
    work: str
    """The model: mlp, transformer, or one of workload/networks.py."""
    num_ranks: int
    num_steps: int
    global_batch_size: int
    num_samples: int
    """The size of the training set: a multiple of the global batch size, so that no epoch ends with a short batch."""
    log_every: int
    is_tuned: bool
    """The loop takes whole batches from data sets that can give them, and uses the fused AdamW. On a GPU it also copies
    batches from pinned memory, without waiting."""
    orders: str
    """The path of a file of int64 sample indices, epoch after epoch, in the generated trainer's shuffled order."""
    data: str
    """How samples are read: see make_dataset() in workload/dataset.py."""
    num_workers: int
    images: str
    """The folder of the PNG files, for `data` = images."""
    device: str
    """cpu or cuda."""
    precision: str
    """fp32, bf16 or fp16 (autocast)."""
    is_compiled: bool
    size: str
    port: int
    """A free port on which the ranks of bare.py and recipe.py find each other."""

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Settings:
        return cls(**json.loads(os.environ[VARIABLE]))

    @property
    def output(self) -> Path:
        """The folder for the run's results."""
        return Path(os.environ["BENCHMARK_OUTPUT"])

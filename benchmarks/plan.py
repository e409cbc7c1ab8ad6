"""The plan of the measurements: loops (the rows of the tables), and models with numbers of ranks (the cases)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

LOG_EVERY = 50
"""Steps between two log lines of each loop, unless a case says otherwise; the time between two lines is a lap."""
OURS, BARE, AGAIN, TUNED = "generated trainer", "bare", "bare, again", "bare, tuned"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TRANSFORMERS = Path(sys.prefix) / "only_transformers"
"""The folder that holds only transformers. requirements-transformers.txt gives the reason."""


@dataclass(frozen=True)
class Row:
    """A loop that is measured: one row of the tables."""

    name: str
    script: str = "bare.py"
    is_tuned: bool = False
    """The loop takes whole batches from data sets that can give them, and uses the fused AdamW."""
    launcher: tuple[str, ...] = ()
    """Arguments in front of the script, for two ranks. If empty, the script starts the second rank itself."""
    extra_path: Path | None = None
    """A folder of packages that only this row can import."""
    num_ranks: tuple[int, ...] = (1, 2)
    works: tuple[str, ...] = ("mlp", "transformer")


@dataclass(frozen=True)
class Case:
    """A model that is trained on a number of ranks: one table."""

    work: str
    num_ranks: int
    num_steps: int
    batch_size: int
    """The number of samples in a step of each rank."""
    num_samples: int
    num_warmup_laps: int
    """The number of laps at the start that the results leave out."""
    data: str = "batches"
    """How samples are read: see workload/dataset.py. For "batches", only tuned loops and ours read whole batches."""
    num_workers: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    use_tf32: bool = True
    is_compiled: bool = False
    size: str = "full"
    """Of the large works of gpu.py: full, or tiny for a rehearsal on the CPU."""
    log_every: int = LOG_EVERY
    timeout_seconds: float = 180.0

    @property
    def name(self) -> str:
        data = "" if self.data == "batches" else f" on {self.data}"
        workers = f", {self.num_workers} workers" if self.num_workers else ""
        return (
            f"{self.work}{data}{workers}, {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        )


PEERS = [
    Row("Accelerate", "accelerate_loop.py", launcher=TORCHRUN),
    Row("Fabric", "fabric.py"),
    Row("Lightning Trainer", "lightning_trainer.py"),
    Row(
        "transformers Trainer",
        "transformers_trainer.py",
        launcher=TORCHRUN,
        extra_path=TRANSFORMERS,
    ),
    Row("tutorials' recipe", "recipe.py"),
]
ROWS = [
    Row(BARE),
    Row(AGAIN),  # the noise
    Row("bare, by torchrun", launcher=TORCHRUN, num_ranks=(2,), works=("mlp",)),
    Row(TUNED, is_tuned=True),
    *PEERS,
    # The two lightest with the tuned loop's batches and optimizer: what is left is theirs.
    *(replace(row, name=f"{row.name}, tuned", is_tuned=True, works=("mlp",)) for row in PEERS[:2]),
    Row(OURS, "run.py", is_tuned=True),
]
CASES = [
    Case("mlp", 1, num_steps=1000, batch_size=32, num_samples=16000, num_warmup_laps=2),
    Case("mlp", 2, num_steps=600, batch_size=32, num_samples=16000, num_warmup_laps=2),
    Case("transformer", 1, num_steps=250, batch_size=4, num_samples=1600, num_warmup_laps=1),
    Case("transformer", 2, num_steps=250, batch_size=4, num_samples=1600, num_warmup_laps=1),
]
CASES += [
    Case("mlp", ranks, 400, 32, num_samples=12_800 if data == "images" else 16000, num_warmup_laps=1, data=data,
         num_workers=workers)
    for data, workers in [("tensors", 0), ("tuples", 0), ("torch draws", 0), ("other draws", 0), ("images", 0),
                          ("images", 2)]
    for ranks in (1, 2)
]  # fmt: skip
DATA_ROWS = (BARE, AGAIN, TUNED, "Accelerate", "Fabric", "Lightning Trainer", OURS)
"""The loops that are measured on every kind of data set."""


def rows_of(case: Case) -> list[Row]:
    """Return the loops that are measured in this case."""
    rows = [row for row in ROWS if case.num_ranks in row.num_ranks and case.work in row.works]
    return [row for row in rows if case.data == "batches" or row.name in DATA_ROWS]


def shorten(case: Case) -> Case:
    """Return the case with only three laps, for a trial."""
    return replace(case, num_steps=3 * LOG_EVERY, num_warmup_laps=1)

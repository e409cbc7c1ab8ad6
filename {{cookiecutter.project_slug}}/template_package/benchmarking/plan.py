"""The rows of the benchmark: each is a way to train, given by what a user would type for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..config import Config
from ..config_rules import available_strategies
from ..launching.devices import Devices, take_devices
from ..launching.environment import find_launcher
from ..launching.gpus import find_gpus
from ..validation import ConfigError


class Row(NamedTuple):
    """One way to train. overrides: key=value words; launcher: who starts its processes."""

    name: str
    device_ids: list[str]
    overrides: list[str]
    launcher: str = "run.py"
    obstacle: str = ""
    """Why it cannot run here, if that is known beforehand."""
    asked: tuple[str, ...] = ()
    """What was typed after `benchmark`."""

    @property
    def strategy(self) -> str:
        """What strategies/ calls it."""
        return self.overrides[0].removeprefix("strategy=")

    @property
    def words(self) -> list[str]:
        """All that sets it apart from config.yaml."""
        return [f"device_ids={','.join(self.device_ids)}", *self.overrides]

    @property
    def command(self) -> str:
        """What a user types to train so."""
        torchrun = f"torchrun --standalone --nproc-per-node={len(self.device_ids)}"
        own = {word.partition("=")[0] for word in self.words}
        kept = [word for word in self.asked if word.partition("=")[0] not in own and not word.startswith("benchmark.")]
        start = torchrun if self.launcher == "torchrun" else "python"
        return f"{start} run.py {shlex.join([*kept, *self.words])}"

    def find_difference(self, run: dict[str, Any]) -> str:
        """What was measured that is not what the row says; nothing if all is."""
        num_devices = len(self.device_ids)
        num_ranks = 1 if self.strategy == "data_parallel" else num_devices
        sizes = [rank["world_size"] for rank in run["ranks"]]
        if run["num_devices"] != num_devices or sizes != [num_ranks] * num_ranks:
            return f"it ran on {run['num_devices']} devices instead of {num_devices} (world sizes {sizes})"
        strategy = "base" if num_devices == 1 else self.strategy  # a single rank has nothing to share
        if others := {rank["strategy"] for rank in run["ranks"]} - {strategy}:
            return f"strategies/{others.pop()}.py trained instead of strategies/{strategy}.py"
        if run["is_compiled"] != ("training.compile=true" in self.overrides):
            return "it was not compiled"
        return ""


def take_all_devices(config: Config) -> tuple[list[str], Devices]:
    """The ids, as device_ids has them, of all devices of this node that the config names, and what keeps others from
    them. A single CPU rank becomes two.
    """
    if find_launcher(os.environ, config.launch) is not None:
        raise ConfigError("benchmark: starts all processes itself. Type `python run.py benchmark`, without a launcher.")
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # ids as nvidia-smi shows them
    devices = take_devices(config.device_ids, config.launch, os.environ)
    if "cpu" in devices.names:
        return ["cpu"] * max(2, len(devices.names)), devices
    visible = find_gpus(os.environ).visible
    return [str(visible[int(name.removeprefix("cuda:"))].index) for name in devices.names], devices


def plan(device_ids: list[str], asked: Sequence[str] = (), *, is_compiled: bool = False) -> list[Row]:
    """Every row, those that cannot run among them. asked: the user's own words, which the rows' commands repeat.

    is_compiled: whether these words and the config ask for torch.compile, which is a row of its own here.
    """
    eager = ["training.compile=false"] if is_compiled else []
    first = device_ids[:1]
    precision = f"training.precision={'bf16' if 'cpu' in device_ids else 'auto'}"  # auto: bf16, fp16 on old GPUs
    fp32, ddp = "training.precision=fp32", "strategy=ddp"
    is_single = len(device_ids) == 1
    name = "one device" if is_single else "ddp"
    rows = [
        Row("one device", first, [ddp, fp32]),
        Row(f"{name}, 16-bit", device_ids, [ddp, precision]),
        Row(f"{name}, compile", device_ids, [ddp, fp32, "training.compile=true"]),
    ]
    shared = [
        Row("data_parallel", device_ids, ["strategy=data_parallel", fp32]),
        Row("ddp", device_ids, [ddp, fp32]),
        Row("ddp, torchrun", device_ids, [ddp, fp32], launcher="torchrun"),
        Row("fsdp", device_ids, ["strategy=fsdp", fp32]),
        Row("accelerate", device_ids, ["strategy=accelerate", fp32]),
        Row("deepspeed, ZeRO-1", device_ids, ["strategy=deepspeed", "deepspeed.zero_stage=1", fp32]),
        Row("horovod", device_ids, ["strategy=horovod", fp32]),
    ]
    if is_single:
        words = f"there is one GPU; device_ids={first[0]},{first[0]} launch.backend=gloo tries it with two ranks on it"
        order = rows + [row._replace(obstacle=words) for row in shared]
    else:
        order = [_checked(row) for row in (rows[0], *shared[:3], *rows[1:], *shared[3:])]
    return [
        row._replace(
            asked=tuple(asked),
            overrides=row.overrides if "training.compile=true" in row.overrides else row.overrides + eager,
        )
        for row in order
    ]


def _checked(row: Row) -> Row:
    if row.strategy in available_strategies():
        return row
    return row._replace(obstacle=f"this project was made without strategies/{row.strategy}.py")


def base_config(config: Config) -> Config:
    """The user's config without what is no training step: evaluation, checkpoints, trackers."""
    return replace(
        config,
        # A warm-up would let no row learn in so few steps: one that does not train at all would look like the others.
        schedule=replace(config.schedule, name="constant", warmup_steps=0, min_learning_rate=0.0),
        launch=replace(config.launch, nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=0),
        training=replace(
            config.training, max_steps=None, compile=False, early_stopping_epochs=None, check_replicas_every_steps=None
        ),
        evaluation=replace(config.evaluation, every_epochs=None, every_steps=None),
        checkpoint=replace(config.checkpoint, every_epochs=None, every_steps=None, resume="never"),
        logging=replace(config.logging, every_steps=10**9, tracker="none", progress_bar=False, profile_steps=None),
    )

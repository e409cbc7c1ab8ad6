"""DeepSpeed itself, which reads environment variables that are not meant for it."""

from __future__ import annotations

import os
import warnings
from typing import Any

from ...launching.distributed import RankContext, changed_environment, launch_variables


def import_deepspeed(context: RankContext) -> Any:
    """The library, told which device to compute on (with a GPU in sight it would not take the CPU), and not to compile
    a module for CPU ranks at its first start, which takes a minute.
    """
    os.environ |= {"DS_ACCELERATOR": context.device.type, "LOCAL_RANK": launch_variables(context)["LOCAL_RANK"]}
    warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor). is deprecated", FutureWarning)
    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    return deepspeed


def create_engine(deepspeed: Any, **parts: Any) -> tuple[Any, Any]:
    """DeepSpeed's engine and optimizer."""
    # mpirun's number of this rank on its node is not LOCAL_RANK, which names the device: DeepSpeed would refuse that.
    with changed_environment({"OMPI_COMM_WORLD_LOCAL_RANK": None}):
        engine, optimizer, *_ = deepspeed.initialize(**parts)
    return engine, optimizer

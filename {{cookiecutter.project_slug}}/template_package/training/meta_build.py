"""fsdp.meta_build: ranks above 0 build the model on the meta device, which takes no memory. Rank 0 sends the values.

A tensor on that device has no values, and some functions that are given one return garbage without a word. So a model
that keeps another such tensor than its parameters and buffers is refused.
"""

import gc
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import Config
from ..core.checks import check_model
from ..core.random_states import seed_generators
from ..core.task import Task
from ..errors import ConfigError, one_line
from ..strategies.base import Strategy

KEY = "fsdp.meta_build=true"


def build_model(
    task: Task, config: Config, strategy: Strategy, load: Callable[[nn.Module, Path, str], None]
) -> nn.Module:
    """Return the model as the first epoch begins with it, with the weights of checkpoint.initial_weights.

    load(model, path, what to call the path) reads them. All ranks must call this.
    """
    path, rank = config.checkpoint.initial_weights, strategy.rank
    is_meta = config.fsdp.meta_build and strategy.has_parts and not rank.is_main
    # again: building the data sets may have drawn, and not alike on all ranks
    seed_generators(config.seed)
    with rank.local_rank_first("model"):
        model = (
            _without_values(task, config)
            if is_meta
            else check_model(task.build_model(config.model))
        )
    if path is not None and not is_meta:
        load(model, Path(path), "checkpoint.initial_weights=")
    task.on_epoch_begin(model, 0)
    if config.fsdp.meta_build:
        seed_generators(config.seed)  # a draw on the meta device leaves them where they were
    return model


def _without_values(task: Task, config: Config) -> nn.Module:
    try:
        with torch.device("meta"):
            model = check_model(task.build_model(config.model))
    except (RuntimeError, NotImplementedError) as error:
        raise _refusal(f"needs values ({one_line(error)})") from error
    drawn = torch.get_rng_state()
    seed_generators(config.seed)
    if not torch.equal(drawn, torch.get_rng_state()):
        raise _refusal("draws on the CPU")
    gc.collect()
    own = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    for value in gc.get_objects():  # those of caches and helper objects too
        if issubclass(type(value), Tensor) and value.is_meta and id(value) not in own:
            raise _refusal(f"keeps a tensor {(*value.shape,)} that is neither parameter nor buffer")
    for name, part in model.named_modules():
        if torch.device("meta") in [
            one for one in vars(part).values() if type(one) is torch.device
        ]:
            raise _refusal(f"keeps the device of a tensor, in {name or 'the model'}")
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise _refusal(f"has extra state, in {name or 'the model'}")
    return model


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"{KEY}: build_model() of model.py {problem}. Mend it, or set it to false.")

"""How gradients and state are shared: one file a strategy, chosen by `strategy:` in config.yaml."""

from importlib import import_module
from typing import Any

from ..config import Config
from ..launching.distributed import RankContext
from ..validation import ConfigError
from .base import Strategy


def create_strategy(config: Config, context: RankContext) -> Strategy:
    """The strategy that the config names; the plain one for `ddp` and `fsdp` if a single rank has nothing to share."""
    is_plain = config.strategy == "ddp" or (config.strategy == "fsdp" and not config.fsdp.cpu_offload)
    if is_plain and context.world_size == 1:
        return Strategy(config.training, context)
    options = getattr(config, config.strategy, config.ddp)  # the strategy's own section, if it has one
    try:
        module = import_module(f".{config.strategy}", __package__)
        own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
        kind: Any = next(value for value in own if isinstance(value, type) and issubclass(value, Strategy))
        strategy: Strategy = kind(config.training, context, options)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"strategy={config.strategy}: {error.name} is not installed. Type: "
            f"python -m pip install -c constraints.txt -e '.[{config.strategy}]'"
        ) from None
    return strategy

"""How gradients and state are shared: one file a strategy, chosen by `strategy:` in config.yaml."""

from importlib import import_module

from ..config import Config
from ..launching.distributed import RankContext
from .base import Strategy

CLASSES = {"ddp": "DistributedDataParallelStrategy"}


def create_strategy(config: Config, context: RankContext) -> Strategy:
    """The strategy that the config names. With one rank `ddp` has nothing to average, so it is the plain one."""
    if config.strategy == "ddp" and context.world_size == 1:
        return Strategy(config.training, context)
    module = import_module(f".{config.strategy}", __package__)
    strategy: Strategy = getattr(module, CLASSES[config.strategy])(
        config.training, context, getattr(config, config.strategy)
    )
    return strategy

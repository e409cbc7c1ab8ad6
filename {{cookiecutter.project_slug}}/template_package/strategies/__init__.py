"""Strategies: how ranks exchange gradients and hold state. Each has its own file. The key `strategy` selects one."""

from importlib import import_module

from ..config import Config
from ..errors import ConfigError
from ..launching.distributed import RankContext
from .base import Strategy, weighted
from .common import settle_precision

__all__ = ["Strategy", "create_strategy", "settle_precision", "weighted"]


def create_strategy(config: Config, context: RankContext) -> Strategy:
    """Build the configured strategy. With one rank, skip the wrapper for ddp, and for fsdp without CPU offload."""
    is_plain = config.strategy == "ddp" or (
        config.strategy == "fsdp" and not config.fsdp.cpu_offload
    )
    if is_plain and context.world_size == 1:
        return Strategy(config.training, context)
    # its own section, if any
    arguments = (
        config.training,
        context,
        getattr(config, config.strategy, config.ddp),
    )
    try:
        strategy: Strategy = import_module(f".{config.strategy}", __package__).STRATEGY(*arguments)
    except ModuleNotFoundError as error:
        remedy = f"Type: python -m pip install -c constraints.txt -e '.[{config.strategy}]'"
        raise ConfigError(
            f"strategy={config.strategy}: {error.name} is not installed. {remedy}"
        ) from None
    return strategy

"""Strategies: how ranks exchange gradients and hold state. Each has its own file. The key `strategy` selects one."""

from importlib import import_module
from typing import Any

from ..config import Config
from ..core.ranks import Rank
from ..core.strategies import settle_precision
from ..errors import ConfigError
from .base import Strategy

__all__ = ["Strategy", "create_strategy", "settle_precision"]


def create_strategy(config: Config, rank: Rank) -> Strategy:
    """Build the configured strategy. With one rank, skip the wrapper for ddp, and for fsdp without CPU offload."""
    is_plain = config.strategy == "ddp" or (
        config.strategy == "fsdp" and not config.fsdp.cpu_offload
    )
    if is_plain and rank.world_size == 1:
        return Strategy(config, rank)
    try:
        chosen: Any = import_module(f".{config.strategy}", __package__)
        strategy: Strategy = chosen.STRATEGY(config, rank)
    except ModuleNotFoundError as error:
        remedy = f"Type: python -m pip install -c constraints.txt -e '.[{config.strategy}]'"
        raise ConfigError(
            f"strategy={config.strategy}: {error.name} is not installed. {remedy}"
        ) from None
    return strategy

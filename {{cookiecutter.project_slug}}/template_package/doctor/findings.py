"""What a check finds, and what all checks are given."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it imports model.py and dataset.py, which may be what is broken
    from ..config import Config

PATIENCE_SECONDS = 8.0


class Finding(NamedTuple):
    """One line of the answer. status: ok, warning (a run may work) or broken (it will not)."""

    check: str
    status: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What the checks share. Both futures may hold an error, which the checks `torch` and `config` report."""

    environment: Mapping[str, str]
    deadline: float
    """When all findings must be there, as time.monotonic() says it."""
    torch: Future[ModuleType]
    """torch, once it has been imported."""
    config: Future[Config]

    def find_config(self, timeout: float | None = PATIENCE_SECONDS) -> Config | None:
        """The config; None if it is broken, or not there after so many seconds."""
        try:
            return self.config.result(timeout)
        except Exception:
            return None


def in_one_line(error: BaseException) -> str:
    """`ImportError: no such file`, shortened."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

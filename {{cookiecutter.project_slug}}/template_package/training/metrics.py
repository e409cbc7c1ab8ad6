"""The values of torchmetrics over all ranks.

torchmetrics itself gathers a list state (of ROUGEScore, say) entry by entry: ranks with different numbers of entries
wait for each other or crash, and one without samples computes nan (1.9). Here rank 0 receives all states and computes.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..launching.distributed import from_main, gather_objects, pack, unpack

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


def keep_apart(metrics: MetricCollection) -> MetricCollection:
    """The metrics, each of which now computes from its own rank's state alone."""
    for metric in _all_metrics(metrics):
        metric.distributed_available_fn = lambda: False
    return metrics


def names_of_scalars(metrics: MetricCollection) -> list[str]:
    """The names under which single numbers will be computed (one metric may give several)."""
    from torchmetrics import MetricCollection

    names: list[str] = []
    for name, metric in metrics.items():
        try:
            values = _compute(MetricCollection({name: metric}))
        except Exception:  # it can compute nothing without a sample
            values = {name: 0.0}
        names += [key for key, value in values.items() if not isinstance(value, list)]
        metric.reset()
    return names


def higher_is_better(metrics: MetricCollection, name: str) -> bool | None:
    """What the metric says of itself; None if it does not, or is one of several that a metric gives."""
    metric = metrics[name] if name in metrics.keys() else None  # noqa: SIM118 - torchmetrics has no __contains__
    return getattr(metric, "higher_is_better", None)


def compute_over_ranks(metrics: MetricCollection) -> dict[str, Any]:
    """Numbers by name, or nested lists of them, the same on every rank; all ranks call it. The metrics begin anew."""
    states = gather_objects(pack([metric.metric_state for metric in _all_metrics(metrics)]))
    if states is not None and len(states) > 1:  # on rank 0
        for metric, parts in zip(_all_metrics(metrics), zip(*map(unpack, states), strict=True), strict=True):
            for name, reduce in metric._reductions.items():
                setattr(metric, name, _unite([part[name] for part in parts], reduce, metric.device))
    values: dict[str, Any] = from_main(lambda: _compute(metrics))
    metrics.reset()
    return values


def _all_metrics(metrics: MetricCollection) -> list[Metric]:
    from torchmetrics import Metric

    return [module for module in metrics.modules() if isinstance(module, Metric)]


def _unite(parts: list[Any], reduce: Any, device: torch.device) -> Any:
    """One state of all ranks: lists joined, as one rank with all samples would hold them; tensors reduced."""
    if isinstance(parts[0], list):
        return [entry.to(device) if isinstance(entry, Tensor) else entry for part in parts for entry in part]
    stacked = torch.stack([part.to(device) for part in parts])
    return reduce(stacked) if reduce else stacked


def _compute(metrics: MetricCollection) -> dict[str, Any]:
    with warnings.catch_warnings():  # rank 0 may have seen no sample itself
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
        values = metrics.compute()
    return {str(name): value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}

"""Finds the functions in model.py and dataset.py. The rest of the package is handed them, as a Task.

Only this file imports the two files for their functions. config.py imports their config classes.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .. import dataset as user_data
from .. import model as user_model
from ..errors import ConfigError
from .random_states import generators_of

Function = Callable[..., Any]
IN_DATASET = ("build_datasets", "collate", "read_inputs")  # the other functions are in model.py
RESERVED = {
    "split",
    "step",
    "epoch",
    "loss",
    "epoch_loss",
    "learning_rate",
    "samples_per_second",
    "gradient_norm",
    "num_samples",
}
LIGHTNINGS = {"configure_optimizers": "build_optimizer", "on_train_epoch_start": "on_epoch_begin"}
SAME_TERMS = (
    "the terms of its loss must have the same names for each batch and on each rank. "
    "Let one that does not apply be 0."
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """Holds the user's functions for one run. An optional one that is not written is None, or does the usual."""

    build_model: Function
    compute_loss: Function
    build_metrics: Function
    update_metrics: Function
    build_datasets: Function
    loss_over: Any = "samples"  # "global_batch": it compares all ranks' samples
    complete_config: Function = lambda *_: None
    collate: Function = default_collate
    on_epoch_begin: Function = lambda *_: None
    training_metrics: Function | None = None
    loss_weight: Function | None = None
    build_optimizer: Function | None = None
    learning_rate: Function | None = None
    evaluate_batch: Function | None = None
    before_step: Function | None = None
    after_step: Function | None = None
    on_evaluation_end: Function | None = None
    predict: Any = None  # Any: `run.py predict` looks for these two before it starts the ranks
    read_inputs: Any = None

    @property
    def compares_samples(self) -> bool:
        """Whether the loss is over the global batch, so that no micro-batch may cut a rank's share."""
        return bool(self.loss_over == "global_batch")

    @property
    def model_globals(self) -> dict[str, Any]:
        """The names in model.py."""
        return vars(user_model)

    @property
    def data_globals(self) -> dict[str, Any]:
        """The names in dataset.py. Random generators may be among their values."""
        return vars(user_data)

    # a worker that is spawned finds them anew: a lambda cannot be sent
    def __reduce__(
        self,
    ) -> tuple[Any, ...]:
        return find_task, ()


def find_task() -> Task:
    """Return the functions of model.py and dataset.py. Raise ConfigError if a required one is missing.

    loss_weight() always takes (batch, module), and training_metrics() checks what it returns.
    """
    found: dict[str, Any] = {}
    for item in fields(Task):
        file, module = (
            ("dataset.py", user_data) if item.name in IN_DATASET else ("model.py", user_model)
        )
        value = getattr(module, item.name, None)
        found[item.name] = item.default if value is None else value
        if value is not None and not callable(value) and item.name != "loss_over":
            problem = f"{item.name} is {value!r}, and the trainer calls a function of this name"
            raise ConfigError(f"{file}: {problem}. Rename yours.")
        if found[item.name] is MISSING:
            raise ConfigError(
                f"{file} has no {item.name}(). Write it; README.md says what it takes and returns."
            )
    if (over := found["loss_over"]) not in ("samples", "global_batch"):
        raise ConfigError(f'model.py: loss_over is {over!r}. Write "samples" or "global_batch".')
    loss_weight = found["loss_weight"]
    if loss_weight is not None:
        parameters = signature(loss_weight).parameters.values()
        if sum(parameter.default is parameter.empty for parameter in parameters) < 2:
            found["loss_weight"] = lambda batch, _module: loss_weight(batch)
    found["compute_loss"] = _with_same_terms(found["compute_loss"])
    if found["training_metrics"] is not None:
        found["training_metrics"] = _checked(found["training_metrics"])
    build_datasets = found["build_datasets"]

    def build_checked(config: Any) -> Any:
        built = build_datasets(config)
        if not isinstance(built, tuple | list) or len(built) not in (2, 3):
            rule = "it must return two or three data sets: training, validation and perhaps test"
            raise ConfigError(f"build_datasets in dataset.py: {rule}.")
        return built

    return Task(**{**found, "build_datasets": build_checked})


def _with_same_terms(compute_loss: Function) -> Function:
    first_names: dict[bool, set[str]] = {}  # in training, and in evaluation

    def checked(model: Any, batch: Any) -> Any:
        returned = compute_loss(model, batch)
        loss = returned[0] if isinstance(returned, tuple | list) and returned else None
        names = {*loss} if isinstance(loss, dict) else set()
        if first_names.setdefault(model.training, names) != names:
            raise ConfigError(f"compute_loss in model.py: {SAME_TERMS}")
        return returned

    return checked


def _checked(training_metrics: Function) -> Function:
    first_names = set[str]()

    def checked(outputs: Any, batch: Any) -> Any:
        means = training_metrics(outputs, batch)
        is_right = isinstance(means, Mapping) and all(
            isinstance(v, Tensor) and v.dim() == 0 for v in means.values()
        )
        if not is_right or RESERVED & means.keys() or (first_names and means.keys() != first_names):
            rule = f"a dict of 0-dim tensors with the same names each time, none of them {', '.join(sorted(RESERVED))}"
            raise ConfigError(f"training_metrics() in model.py: it must return {rule}.")
        first_names.update(means)
        return means

    return checked


def inner(dataset: Any) -> list[Any]:
    """Return the data sets that this one holds, such as the one in a Subset, and the ones that those hold in turn."""
    found = [dataset]
    for one in found:  # it grows
        for name, value in getattr(one, "__dict__", {}).items():
            is_named = name in ("dataset", "datasets")  # an inner one may be of any class
            parts = value[:100] if isinstance(value, list) else [value]
            parts = [part for part in parts if is_named or isinstance(part, Dataset)]
            # arrays cannot be compared
            found += [part for part in parts if all(part is not other for other in found)]
    return found[1:]


def tell_of_names(model: Any, *datasets: Any) -> None:
    """Warn of names in model.py, dataset.py and these data sets that look like misspelt names of ours.

    Also of random generators that the model or model.py holds, since no checkpoint has their states.
    """
    known_ones = {id(one) for one in generators_of(*datasets, vars(user_data))}
    if any(id(one) not in known_ones for one in generators_of(model, vars(user_model))):
        message = (
            "warning: model.py or the model holds a random generator, which no checkpoint saves"
        )
        logger.warning("%s and whose draws depend on the ranks. Draw from torch's own.", message)
    places = (
        user_model,
        user_data,
        *(place for dataset in datasets for place in (dataset, *inner(dataset))),
    )
    names = dict.fromkeys(name for place in places for name in getattr(place, "__dict__", ()))
    known = [
        *(item.name for item in fields(Task)),
        "sample_lengths",
        "sample_weights",
        "label_names",
    ]
    for name in names:
        close = [LIGHTNINGS[name]] if name in LIGHTNINGS else []
        close = close or get_close_matches(name, known, n=1, cutoff=0.8)
        if close and close[0] not in names:
            logger.warning("warning: the trainer does not use %s. Did you mean %s?", name, close[0])

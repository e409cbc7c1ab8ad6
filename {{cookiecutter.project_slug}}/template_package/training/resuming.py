"""The same name again: which state a run continues from, and when it must not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import Config, differing_keys, to_dict
from ..launching.distributed import from_main, pack, unpack
from ..strategies.base import Strategy
from ..validation import ConfigError
from .checkpoint import CheckpointFolder, load_checkpoint
from .logs import get_logger
from .optimization import configured
from .progress import Progress
from .weights import check_weights

DECISIVE = ("model", "data", "optimizer", "schedule", "seed", "training.global_batch_size", "training.precision")
"""What makes a run what it is; everything else may change from one start to the next."""


def find_state(config: Config, checkpoints: CheckpointFolder) -> dict[str, Any] | None:
    """The state to continue from, or None for a new run. Rank 0 reads; the others, which may share no disk, receive."""
    state: dict[str, Any] | None = unpack(from_main(lambda: pack(_read_state(config, checkpoints))))
    return state


def take_up(state: dict[str, Any], strategy: Strategy, progress: Progress, config: Config) -> None:
    """Load weights, optimizer state and counts; ConfigError if they are another model's, or of other data."""
    former = state["early_stopping"].get("num_samples", progress.num_samples)  # older files do not tell
    if state["origin"] != "another run" and former != progress.num_samples:
        raise ConfigError(
            f"name={config.name}: was begun with {former} training samples, and there are {progress.num_samples} now. "
            "Put the data back to continue, or choose another name=… for a new run (its weights and its place in the "
            "epochs: checkpoint.resume=PATH of a checkpoint)."
        )
    check_weights(strategy.shapes(), state["model"], f"name={config.name}")
    with configured(strategy.optimizer):  # a run that starts from another's file has settings of its own
        strategy.load_state_dict(state)
    progress.load_state_dict(state)
    if state["origin"] == "another run":
        progress.count_anew()
    progress.saved_step = progress.step if state["origin"] == "step" else None


def announce(state: dict[str, Any], config: Config, step: int, total_steps: int) -> None:
    """Say from where the run goes on, and what a new length does to the schedule."""
    get_logger().info("resuming after step %d of %d", step, total_steps)
    if step != state["step"]:
        words = "its %d steps are counted as %d: so many make its %d epochs with this run's batches and data"
        get_logger().info(words, state["step"], step, state["epoch"])
    for key in ("epochs", "max_steps"):
        former, now = state["config"]["training"][key], getattr(config.training, key)
        if former != now:
            words = "training.%s was %s, is %s: the learning rate follows the schedule of the new length from here on"
            get_logger().info(words, key, former, now)


def announce_end(config: Config, progress: Progress) -> None:
    """Say that nothing is left to do, and what would be."""
    words = "To train on, raise training.epochs (or early_stopping_epochs); for a new run, choose another name=…"
    get_logger().info("run %s is complete: %s. %s", config.name, progress.describe(), words)


CONTINUE = "Put them back to continue, or choose another name=… for a new run."


def check_same_values(
    stored: dict[str, Any], present: dict[str, Any], keys: Sequence[str], what: str, remedy: str = CONTINUE
) -> None:
    """ConfigError if two plain configs differ in one of the (dotted) keys or below it."""
    if lines := differing_keys({key: _pick(stored, key) for key in keys}, {key: _pick(present, key) for key in keys}):
        raise ConfigError(f"{what}: was begun with other values: {'; '.join(lines)}. {remedy}")


def _read_state(config: Config, checkpoints: CheckpointFolder) -> dict[str, Any] | None:
    resume = config.checkpoint.resume
    paths = checkpoints.newest_first()
    if not paths and (weights := checkpoints.folder.with_name("model.safetensors")).exists():
        raise ConfigError(
            f"name={config.name}: {weights} is what the run ended with, and a new run would replace it; no checkpoint "
            f"is left in {checkpoints.folder} to continue from. Put them back, choose another name=…, or remove "
            f"{checkpoints.folder.parent}."
        )
    if not paths and resume in ("auto", "never"):
        return None
    if not paths:
        state = load_checkpoint(Path(resume))
        remedy = f"Put them back; or take the weights alone, for a new optimizer: checkpoint.initial_weights={resume}."
        check_same_values(state["config"], to_dict(config), ("optimizer.name",), f"checkpoint.resume={resume}", remedy)
        check_same_values(state["config"], to_dict(config), ("model",), f"checkpoint.resume={resume}")
        early_stopping = {"best_epoch": state["epoch"], "epochs_without_improvement": 0}
        own = {"best": None, "early_stopping": early_stopping}  # not the other run's
        return state | own | {"origin": "another run"}
    if resume == "never":
        raise ConfigError(
            f"checkpoint.resume=never: {checkpoints.folder} holds checkpoints, which a new run would mix with its own. "
            f"Choose another name=…, or remove {checkpoints.folder.parent}."
        )
    for path in paths:
        try:
            state = load_checkpoint(path)
        except ConfigError as error:
            get_logger().warning("%s The one before it is tried.", error)
            continue
        check_same_values(state["config"], to_dict(config), DECISIVE, f"name={config.name}")
        if resume not in ("auto", state["config"]["checkpoint"]["resume"]):
            raise ConfigError(
                f"checkpoint.resume={resume}: {checkpoints.folder} holds checkpoints of a run that began otherwise. "
                "Choose another name=… to start from that file, or set checkpoint.resume=auto to continue."
            )
        return state | {"origin": "best" if path == checkpoints.best else "step"}
    raise ConfigError(f"{checkpoints.folder}: none of its {len(paths)} checkpoints can be read. Choose another name=….")


def _pick(config: dict[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value

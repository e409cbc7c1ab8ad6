"""The same name again: which state a run continues from, and when it must not."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config import Config, differing_keys, to_dict
from ..data.random_state import derive_seed, get_random_states, seed_generators, set_random_states
from ..errors import ConfigError
from ..launching.distributed import from_main, gather_objects, pack, unpack
from ..strategies.base import Strategy
from .checkpoint import FORMAT_VERSION, CheckpointFolder, check_weights, load_checkpoint
from .optimization import settings_kept
from .progress import Progress

DECISIVE = ("model", "data", "optimizer", "schedule", "seed", "training.global_batch_size", "training.precision")
"""The keys that make a run what it is; everything else may change from one start to the next."""
CONTINUE = "Put them back to continue, or choose another name=… for a new run."  # a remedy
logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """A state to continue from."""

    state: dict[str, Any]
    is_best: bool = False  # read from best.pt, since no checkpoint of a later step is left
    is_other_run: bool = False  # named by checkpoint.resume=PATH


def find_state(config: Config, checkpoints: CheckpointFolder, *, is_restart: bool) -> Found | None:
    """The state to continue from, or None for a new run. Rank 0 reads; the others, which may share no disk, receive."""
    found = unpack(from_main(lambda: pack(tuple(_read_state(config, checkpoints, is_restart) or ()))))
    return Found(*found) if found else None


def resume(found: Found | None, strategy: Strategy, progress: Progress, config: Config) -> None:
    """Load weights, optimizer, counts and random states; ConfigError if they are another model's, or of other data."""
    context = strategy.context
    if found is not None:
        state = found.state
        former = state["early_stopping"].get("num_samples", progress.num_samples)  # older files do not tell
        if not found.is_other_run and former != progress.num_samples:
            words = f"was begun with {former} training samples, and there are {progress.num_samples} now"
            raise ConfigError(f"name={config.name}: {words}. {CONTINUE}")
        check_weights(strategy.shapes(), state["model"], f"name={config.name}")
        with settings_kept(strategy.optimizer):
            strategy.load_state_dict(state)
        progress.load_state_dict(state, is_other_run=found.is_other_run)
        if not found.is_best and not found.is_other_run:
            progress.saved = progress.step, progress.is_evaluation_pending
    # Each rank has its own (dropout differs by rank), derived from the step; a checkpoint of as many ranks replaces it.
    seed_generators(derive_seed(config.seed, -1 - context.rank, progress.step))
    if found is not None and len(found.state["random_states"]) == context.world_size:
        set_random_states(found.state["random_states"][context.rank], *context.devices)


def collect_state(strategy: Strategy, progress: Progress, config: Config) -> dict[str, Any] | None:
    """The content of a checkpoint on rank 0, None on the others. All ranks call it."""
    state = {"format_version": FORMAT_VERSION, "config": to_dict(config), **progress.state_dict()}
    state |= strategy.state_dict()
    packed = gather_objects(pack(get_random_states(*strategy.context.devices)))
    return None if packed is None else state | {"random_states": [unpack(content) for content in packed]}


def describe_resume(found: Found, config: Config, step: int, total_steps: int) -> None:
    """Log where the run continues, and what a new length does to the schedule."""
    logger.info("resuming after step %d of %d", step, total_steps)
    if step != found.state["step"]:
        words = "its %d steps count as %d: as many as its epochs have with this run's batches and data"
        logger.info(words, found.state["step"], step)
    for key in ("epochs", "max_steps"):
        former, now = found.state["config"]["training"][key], getattr(config.training, key)
        if former != now:
            words = "training.%s was %s, is %s: the learning rate follows the schedule of the new length from here on"
            logger.info(words, key, former, now)


def check_same_values(
    stored: dict[str, Any], present: dict[str, Any], keys: Sequence[str], source: str, remedy: str = CONTINUE
) -> None:
    """ConfigError if two plain configs differ in one of the (dotted) keys or below it."""
    lines = [line for line in differing_keys(stored, present) if re.match(rf"({'|'.join(keys)})[.:]", line)]
    if lines:
        raise ConfigError(f"{source}: was begun with other values: {'; '.join(lines)}. {remedy}")


def _read_state(config: Config, checkpoints: CheckpointFolder, is_restart: bool) -> Found | None:
    resume, present = config.checkpoint.resume, to_dict(config)
    if resume == "never" and is_restart:  # it was about files from before the first start
        resume = "auto"
    paths = checkpoints.newest_first()
    run, weights = checkpoints.folder.parent, checkpoints.folder.with_name("model.safetensors")
    if not paths and weights.exists():
        problem = f"a new run would replace {weights}, and no checkpoint is left to continue from"
        raise ConfigError(f"name={config.name}: {problem}. Choose another name=…, or remove {run}.")
    if not paths and resume in ("auto", "never"):
        return None
    if not paths:
        state, source = load_checkpoint(Path(resume)), f"checkpoint.resume={resume}"
        remedy = f"Put them back; or take the weights alone, for a new optimizer: checkpoint.initial_weights={resume}."
        check_same_values(state["config"], present, ("optimizer.name", "model"), source, remedy)
        return Found(state, is_other_run=True)
    if resume == "never":
        raise ConfigError(f"checkpoint.resume=never: {run} holds checkpoints. Choose another name=…, or remove {run}.")
    readable = checkpoints.load_first(paths)
    if readable is None:
        problem = f"none of its {len(paths)} checkpoints can be read"
        raise ConfigError(f"{checkpoints.folder}: {problem}. Choose another name=….")
    path, state = readable
    check_same_values(state["config"], present, DECISIVE, f"name={config.name}")
    if resume not in ("auto", state["config"]["checkpoint"]["resume"]):
        remedy = "Choose another name=… to start from that file, or set checkpoint.resume=auto to continue."
        raise ConfigError(f"checkpoint.resume={resume}: {run} holds a run that began otherwise. {remedy}")
    return Found(state, is_best=path == checkpoints.best)

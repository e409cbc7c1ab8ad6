"""The training loop. It is yours to edit: train() is the order of a step, from top to bottom.

core/data.py decides which samples each rank sees, core/strategies.py how ranks share gradients.
"""

import logging
import math
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .core.checkpoint import (
    CONTINUE,
    FORMAT_VERSION,
    export_weights,
    find_run,
    read_once,
    recount,
    tell_changes,
)
from .core.checkpoint import CheckpointFolder as Checkpoints
from .core.checks import (
    check_finite,
    check_global_batch,
    check_model,
    check_replicas,
    check_samples,
    rehearse,
    rehearse_last,
    settings_without_effect,
)
from .core.config import Config, to_dict
from .core.data import Plan, TrainLoader
from .core.evaluation import Evaluator, figures_of, total_of
from .core.group import StopRequest
from .core.logs import Log, StepClock, Tracking, summary_of, write_start
from .core.optimizer import (
    check_factor,
    choose_optimizer,
    learning_rate,
    set_learning_rate,
    set_mode,
)
from .core.random_states import seed_alike, seed_generators
from .core.ranks import Rank, all_reduce, from_main
from .core.settings import NEEDS_FULL
from .core.strategies import create_strategy, settle_precision, total_norm
from .core.task import Task, tell_of_names
from .errors import ConfigError, Interrupted
from .files import write_json

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where a run is. With the seed, it determines the next samples and the learning rate."""

    step: int = 0
    epoch: int = 0  # completed
    position: int = 0  # samples of the present epoch already seen
    loss_sum: float = 0.0  # of its steps' losses, each times its samples
    best: dict[str, Any] | None = None  # {evaluation.metric: value, "step": step}
    is_evaluation_pending: bool = False  # due after this step, and not ended

    @property
    def current_epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        return self.epoch if self.position == 0 else self.epoch + 1

    def is_due(self, section: Any) -> bool:
        """Return True if an evaluation or a checkpoint is due after this step."""
        is_epoch_end = self.position == 0 and section.every_epochs
        is_step = section.every_steps and self.step % section.every_steps == 0
        return bool(is_step or (is_epoch_end and self.epoch % section.every_epochs == 0))


class Trainer:
    """Trains on one rank. All ranks must call the same methods in the same order."""

    def __init__(self, config: Config, rank: Rank, directory: Path, task: Task) -> None:
        settle_precision(config, rank)
        self.config, self.rank, self.directory, self.task = config, rank, directory, task
        seed_generators(config.seed)
        with rank.local_rank_first("data"):
            train_data, validation_data, *_ = task.build_datasets(config.data)
        training = config.training
        self.loader = TrainLoader(
            Plan(train_data, task, "training", config.seed),
            config.loader,
            rank,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            drop_last=training.drop_last,
        )
        self.evaluator = Evaluator(validation_data, "validation", config, rank, task)
        steps = (training.epochs or sys.maxsize) * self.loader.steps_per_epoch
        self.total_steps = min(steps, training.max_steps or steps)
        self.progress = Progress()
        self.checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint)
        self.losses: list[tuple[Tensor, int, int]] = []  # those that check_finite() has not seen
        self.startup_seconds: float | None = None
        self.num_saves = 0  # by this process
        seed_generators(config.seed)  # building the data sets may have drawn
        with rank.local_rank_first("model"):
            model = check_model(task.build_model(config.model))
        task.on_epoch_begin(model, 0)
        self.num_epochs_begun = 1  # for which this process called on_epoch_begin()
        self.strategy = create_strategy(config, rank)
        self.strategy.prepare(model, partial(choose_optimizer, task, config=config.optimizer))
        check_factor(task.learning_rate, config.optimizer.learning_rate, self.total_steps)
        tell_of_names(self.strategy.module, train_data, validation_data)
        for line in settings_without_effect(config, task):
            logger.info(line)

    @property
    def is_complete(self) -> bool:
        return self.progress.step >= self.total_steps and not self.progress.is_evaluation_pending

    def fit(self, stop: StopRequest, started_at: float) -> int:
        """Start or continue the run. Return 0 at its end, or 130 or 143 if a signal stopped it."""
        self.resume()
        if self.is_complete and from_main((self.directory / "summary.json").exists):
            remedy = "To train on, raise training.epochs or training.max_steps"
            message = "run %s is complete: %d steps. %s; for a new run, choose another name=…"
            logger.info(message, self.config.name, self.progress.step, remedy)
            return 0
        stop.beat()
        self.rehearse()
        progress = self.progress
        self.tracking = Tracking(
            self.directory,
            self.config,
            self.rank,
            step=progress.step,
            total_steps=self.total_steps,
            is_evaluation_pending=progress.is_evaluation_pending,
        )
        write_start(self.directory, self.config, self.rank)
        self.loader.start(progress.epoch, progress.position)
        self.clock = StepClock(self.num_samples_seen)
        stop.listen()
        try:
            code = self.train(stop, started_at)
        finally:
            self.tracking.close()
        self.finish(code, stop)
        return code

    def train(self, stop: StopRequest, started_at: float) -> int:
        """Run steps until the end, or until a request to stop. The order of a step is here."""
        config, progress = self.config, self.progress
        with suppress(Interrupted):  # by a request to stop, in an evaluation, which stays pending
            if progress.is_evaluation_pending:
                self.evaluate(stop)
            while not self.is_complete:
                if code := stop.code():
                    return code
                is_first = self.startup_seconds is None  # of this process
                self.begin_epochs(progress.epoch)
                progress.step += 1
                size = self.loader.global_batch_size
                progress.position += size
                if progress.position >= self.loader.num_samples:
                    progress.epoch, progress.position = progress.epoch + 1, 0
                is_last = progress.step == self.total_steps
                is_logged = (
                    progress.step % config.logging.every_steps == 0 or progress.position == 0
                )

                sums, gradient_norm = self.train_step(is_logged or is_last)

                if progress.position == 0:
                    size = self.loader.num_samples % size or size
                self.losses.append((sums["loss"], progress.step, size))
                if is_first:
                    self.startup_seconds = time.time() - started_at
                    check_replicas(self.strategy, progress.step, self.rank)
                    self.strategy.check_optimizer()
                if is_logged or is_last:
                    self.log(sums, gradient_norm)
                evaluation = config.evaluation
                is_evaluated = bool(evaluation.every_epochs or evaluation.every_steps)
                is_due = progress.is_due(evaluation) or (is_last and is_evaluated)
                progress.is_evaluation_pending = is_due
                if progress.is_due(config.checkpoint) or is_last:
                    self.save(stop)  # before the evaluation: the next start repeats one that fails
                if is_due:
                    self.evaluate(stop)
                self.tracking.advance(progress.step)
            return 0
        return stop.code()

    def train_step(self, is_logged: bool) -> tuple[dict[str, Tensor], Tensor | None]:
        """Run one optimizer step. Return this rank's part of each mean, and the gradient norm."""
        task, strategy, step = self.task, self.strategy, self.progress.step
        config, peak = self.config, self.config.optimizer.learning_rate
        rate = learning_rate(config.schedule, peak, step, self.total_steps, task.learning_rate)
        set_learning_rate(strategy.optimizer, rate, peak)
        set_mode(strategy.optimizer, "train")
        sums: dict[str, Tensor] = {}
        for (batch, request), weight in self.loader.next_step(strategy.module):
            with strategy.accumulate(is_last_micro_batch=request.is_last):
                with strategy.autocast():
                    loss, outputs = task.compute_loss(strategy.model, batch)
                total = total_of(loss)
                if not (is_logged and task.training_metrics):
                    outputs = None  # logits are large, and backward needs the memory
                strategy.backward(total, weight)
            # After the backward pass: training_metrics() may change the outputs in place.
            figures = {"loss": total.detach()}
            if is_logged:
                figures = figures_of(task, loss, outputs, batch, weight)
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + value * weight
        strategy.unscale()
        if task.before_step is not None:  # the gradients are averaged over ranks, and not clipped
            seed_alike(config.seed, 2 * step)
            with torch.no_grad():
                task.before_step(strategy.module, step, Log(self.tracking, step))
        norm = strategy.optimizer_step(self.config.training.max_gradient_norm)
        set_mode(strategy.optimizer, "eval")
        if task.after_step is not None:
            seed_alike(config.seed, 2 * step + 1)
            with torch.no_grad(), strategy.autocast():
                task.after_step(strategy.module, step, Log(self.tracking, step))
        return sums, norm

    def log(self, sums: dict[str, Tensor], gradient_norm: Tensor | None) -> None:
        """Log the step's means over all ranks. It waits for the device, so not in every step."""
        progress = self.progress
        check_finite(self.losses, progress, self.rank)
        totals = all_reduce(torch.stack([*sums.values()]).to(self.rank.sum_dtype))
        record = {"split": "train", "step": progress.step, "epoch": progress.current_epoch}
        record |= dict(zip(sums, (totals / self.rank.world_size).tolist(), strict=True))
        if progress.position == 0:
            mean, progress.loss_sum = progress.loss_sum / self.loader.num_samples, 0.0
            if not math.isnan(mean):
                record["epoch_loss"] = mean
        record["learning_rate"] = self.strategy.optimizer.param_groups[0]["lr"]
        record["samples_per_second"] = self.clock.samples_per_second(self.num_samples_seen)
        if gradient_norm is not None:
            record["gradient_norm"] = gradient_norm.item()
        self.tracking.record(record)

    def evaluate(self, stop: StopRequest) -> None:
        """Evaluate the validation split, and save best.pt if the result is the best so far."""
        with self.clock.paused():
            config, progress = self.config.evaluation, self.progress
            check_finite(self.losses, progress, self.rank)
            log = Log(self.tracking, progress.step)
            values = self.evaluator.run(self.strategy, stop.code, log)
            if progress.best is None:
                self.evaluator.check_means(self.strategy)
            progress.is_evaluation_pending = False
            record = {"split": "validation", "step": progress.step, "epoch": progress.current_epoch}
            self.tracking.record({**record, **values, "num_samples": self.evaluator.num_samples})
            value, best = values[config.metric], (progress.best or {}).get(config.metric)
            is_better = best is None or (value > best if config.mode == "max" else value < best)
            if is_better and math.isfinite(value):
                progress.best = {config.metric: value, "step": progress.step}
                self.save(stop, is_best=True)

    def save(self, stop: StopRequest, *, is_best: bool = False) -> None:
        """Write a checkpoint of the last finished step. All ranks must call this."""
        with self.clock.paused():
            state = self.strategy.state_dict()  # first: FSDP drops what evaluation left gathered
            check_replicas(self.strategy, self.progress.step, self.rank)
            # A finite loss may have had a gradient that is not, so look at the weights too.
            weights = [w.detach().float() for w in self.strategy.module.parameters()]
            self.losses.append((total_norm(weights).to(self.rank.device), self.progress.step, 0))
            check_finite(self.losses, self.progress, self.rank)
            if self.rank.is_main:
                own = vars(self.progress).copy()
                own["early_stopping"] = {  # the name of the format, which size=full shares
                    "num_samples": self.loader.plan.num_samples,
                    "is_evaluation_pending": own.pop("is_evaluation_pending"),
                    "loss_sum": own.pop("loss_sum"),
                }
                own["random_states"] = [{}] * self.rank.world_size  # each micro-batch seeds its own
                own |= {"format_version": FORMAT_VERSION, "config": to_dict(self.config)}
                self.checkpoints.save(state | own, is_best=is_best, beat=stop.beat)
            self.num_saves += 1
            self.rank.wait_for_main(f"save {self.num_saves}", stop.beat)

    def resume(self) -> None:
        """Continue from a checkpoint, if there is one. Refuse one of another model or data."""
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        run = self.config, self.checkpoints, self.rank.world_size
        state = read_once(partial(find_run, *run, is_restart=is_restart))
        config, progress, own_name = self.config, self.progress, f"name={self.config.name}"
        if state:
            is_of_other_run = state.pop("is_of_other_run", False)
            if is_of_other_run:
                state = recount(state, self.loader.num_samples, self.loader.global_batch_size)
            counts, now = state["early_stopping"], self.loader.plan.num_samples
            former = counts.get("num_samples", now)
            if former != now:
                problem = f"was begun with {former} training samples, and there are {now} now"
                raise ConfigError(f"{own_name}: {problem}. {CONTINUE}")
            if "average" in state:  # it would no longer follow the weights
                problem = f"was begun with training.ema_decay, which {NEEDS_FULL}"
                raise ConfigError(f"{own_name}: {problem}")
            progress.step, progress.epoch = state["step"], state["epoch"]
            progress.position, progress.best = state["position"], state["best"]
            progress.is_evaluation_pending = counts.get("is_evaluation_pending", False)
            # unknown if another run, or an older version, began the epoch
            progress.loss_sum = counts.get("loss_sum", math.nan if progress.position else 0.0)
            if is_of_other_run and self.is_complete:
                problem = (
                    f"it has done step {progress.step}, and this run ends at {self.total_steps}"
                )
                remedy = "Raise training.epochs or training.max_steps"
                raise ConfigError(
                    f"checkpoint.resume={config.checkpoint.resume}: {problem}. {remedy}."
                )
            # Before the weights: what it did to them then is in the checkpoint.
            self.begin_epochs(progress.epoch if progress.position else progress.epoch - 1)
            self.strategy.load_state_dict(state)
        if state and not self.is_complete:
            tell_changes(state, config, self.total_steps)

    def rehearse(self) -> None:
        """Try out training and evaluation. Raise ConfigError before anything is written."""
        progress, evaluation = self.progress, self.config.evaluation
        if self.task.compares_samples and self.rank.world_size > 1:
            check_global_batch(self.strategy, self.loader, self.task)
        check_samples(self.loader, self.rank)
        self.loader.start(progress.epoch, progress.position)
        first, _ = next(self.loader.next_step(self.strategy.module))
        rehearse(self.strategy, first, self.task)
        self.evaluator.check_means(self.strategy, self.loader)
        rehearse_last(self.strategy, self.loader, self.task, progress.epoch)
        if evaluation.every_epochs or evaluation.every_steps:
            self.evaluator.rehearse(self.strategy)

    def begin_epochs(self, epoch: int) -> None:
        """Call on_epoch_begin() of model.py for the epochs that are new to this process."""
        module = self.strategy.module
        former = [parameter.requires_grad for parameter in module.parameters()]
        for number in range(self.num_epochs_begun, epoch + 1):
            seed_alike(self.config.seed, -1 - number)
            self.task.on_epoch_begin(module, number)  # it may draw new weights
            # It may put BatchNorm layers in eval mode: then forwards read their statistics.
            self.strategy.synchronize_buffers()
            self.num_epochs_begun = number + 1
        if former != [parameter.requires_grad for parameter in module.parameters()]:
            problem = f"it changed requires_grad after the start, which {NEEDS_FULL}"
            raise ConfigError(f"on_epoch_begin in model.py: {problem}")

    @property
    def num_samples_seen(self) -> int:
        return self.progress.epoch * self.loader.num_samples + self.progress.position

    def finish(self, code: int, stop: StopRequest) -> None:
        """Save the last step, and write summary.json and the best weights."""
        progress, seconds, rank = self.progress, self.clock.seconds, self.rank
        if progress.step:
            self.save(stop)
        status = "stopped" if code else "complete"
        speed = (self.num_samples_seen - self.clock.first_sample) / max(seconds, 1e-9)
        summary = {
            "status": status,
            "steps": progress.step,
            "epochs": progress.epoch,
            "best": progress.best,
            "micro_batch_size": self.loader.micro_batch_size,
            "startup_seconds": self.startup_seconds,
            "train_seconds": seconds,
            "samples_per_second": speed,
            **summary_of(self.config, rank),
        }
        if not rank.is_main:
            return
        paths = sorted(self.checkpoints.newest_first(), key=lambda path: path.name != "best.pt")
        if paths:
            state = self.checkpoints.load_first(paths)
            # best.pt may come from steps that a crash lost, and that were repeated.
            summary["best"] = state["best"]
            weights = self.directory / "model.safetensors"
            export_weights(state["model"], self.strategy.module, weights)
        write_json(self.directory / "summary.json", summary)
        message = "%s: %d steps, best %s (%s)%s"
        remedy = ": the same command continues" if code else ""
        logger.info(message, status, progress.step, summary["best"], self.directory, remedy)

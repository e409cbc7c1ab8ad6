"""The training loop, with the methods fit, train_step, evaluate, save and resume. You may edit this file.

core/data.py decides which samples each rank sees. strategies/ has a module for each way to share gradients.
training/ has the trainer's helpers, for example for checkpoints and evaluation.
"""

import logging
import math
import os
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from .config import Config
from .core.checkpoint import export_weights, find_run, read_once, recount, tell_changes
from .core.checks import (
    check_finite,
    check_global_batch,
    check_replicas,
    check_samples,
    rehearse,
    rehearse_last,
    settings_without_effect,
)
from .core.evaluation import figures_of, total_of
from .core.group import StopRequest
from .core.logs import StepClock, Tracking, summary_of, write_start
from .core.optimizer import check_factor, choose_optimizer, set_learning_rate, set_mode
from .core.ranks import Rank, all_reduce, from_main
from .core.task import Task, tell_of_names
from .data import build_datasets, create_loader
from .errors import ConfigError, Interrupted, StopRun
from .files import write_json
from .strategies import create_strategy, settle_precision
from .training.checkpoint import Checkpoints, collect_state, load_run, load_weights
from .training.checks import MemoryLimit
from .training.evaluation import Evaluator
from .training.hooks import (
    call_after_step,
    call_before_step,
    call_on_epoch_begin,
    check_before_step,
)
from .training.media import Log
from .training.meta_build import build_model
from .training.optimization import WeightAverage
from .training.profiler import start_profiler
from .training.progress import Progress
from .training.schedule import learning_rate
from .training.sharded import read_whole

logger = logging.getLogger(__name__)


class Trainer:
    """Trains the user's model on one rank. All ranks must call the same Trainer methods in the same order."""

    def __init__(self, config: Config, rank: Rank, directory: Path, task: Task) -> None:
        # a run continues in the precision that it began with
        settle_precision(config, rank)
        self.config, self.rank, self.directory, self.task = config, rank, directory, task
        train_data, validation_data, *_ = build_datasets(task, config, rank)
        training = config.training
        self.loader = create_loader(train_data, task, config, rank)
        self.evaluator = Evaluator(validation_data, "validation", config, rank, task)
        num_samples = self.loader.plan.num_samples
        self.progress = Progress(num_samples, training.global_batch_size, training.drop_last)
        all_steps = (training.epochs or sys.maxsize) * self.loader.steps_per_epoch
        self.total_steps = min(all_steps, training.max_steps or all_steps)
        if training.max_steps and all_steps < training.max_steps:
            logger.info(
                "training.epochs=%d ends at step %d, before training.max_steps",
                training.epochs,
                all_steps,
            )
        self.checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint)
        self.losses: list[tuple[Tensor, int, int]] = []  # those that check_finite() has not seen
        self.strategy = create_strategy(config, rank)
        model = build_model(task, config, self.strategy, load_weights)
        # from the process's start to the end of its first step
        self.startup_seconds: float | None = None
        self.num_saves = 0  # by this process
        # epochs for which this process called on_epoch_begin() of model.py
        self.num_epochs_begun = 1
        check_before_step(task, self.strategy)
        self.strategy.prepare(model, partial(choose_optimizer, task, config=config.optimizer))
        ema, total_steps = training.ema_decay, self.total_steps
        self.average = WeightAverage(self.strategy, ema, total_steps) if ema else None
        check_factor(task.learning_rate, config.optimizer.learning_rate, total_steps)
        tell_of_names(self.strategy.module, train_data, validation_data)
        for line in settings_without_effect(config, task):
            logger.info(line)

    @property
    def is_complete(self) -> bool:
        """Return True if all steps are done or early stopping has ended the run, and no evaluation is pending."""
        patience = self.config.training.early_stopping_epochs
        is_stale = patience is not None and self.progress.epochs_without_improvement >= patience
        return (
            self.progress.step >= self.total_steps or is_stale
        ) and not self.progress.is_evaluation_pending

    def fit(self, stop: StopRequest, started_at: float) -> int:
        """Start or continue the run. Return 0 at its end, or 130 or 143 if a signal stopped it."""
        self.resume()
        # False if a kill came first
        if self.is_complete and from_main((self.directory / "summary.json").exists):
            ended_by = (
                "max_steps" if self.total_steps == self.config.training.max_steps else "epochs"
            )
            ended_by = (
                "early_stopping_epochs" if self.progress.step < self.total_steps else ended_by
            )
            message = "run %s is complete: %s. To train on, raise training.%s; for a new run, choose another name=…"
            self.strategy.close()
            logger.info(message, self.config.name, self.progress.describe(), ended_by)
            return 0
        stop.beat()
        memory = self.begin()
        stop.listen()
        try:
            code = self.train(stop, memory, started_at)
        except StopRun as over:  # out of memory
            # Asked to stop before, a single rank does not start again. Of several, start_ranks() decides.
            raise StopRun((self.rank.world_size == 1 and stop.received) or over.code) from over
        self.finish(code, stop)
        return code

    def train(self, stop: StopRequest, memory: MemoryLimit, started_at: float) -> int:
        """Run training steps until the run ends or is asked to stop. Log, evaluate and save as configured."""
        # Interrupted: in an evaluation, which stays pending
        with suppress(Interrupted), self.checkpoints.completed(stop.beat):
            if self.progress.is_evaluation_pending:
                self.evaluate(stop)
            while not self.is_complete:
                if code := stop.code():
                    return code
                with memory.watched():
                    # other parameters train now: check a step again
                    if self.begin_epochs(self.progress.epoch):
                        rehearse(
                            self.strategy, self.loader.read_first(self.progress.epoch, 0), self.task
                        )
                        self.loader.start(self.progress.epoch, 0)
                    self.progress.count_step()
                    sums, gradient_norm = self.train_step(
                        self.progress.is_logged(self.config.logging.every_steps)
                    )
                is_first = self.startup_seconds is None  # in this process
                self.startup_seconds = self.startup_seconds or time.time() - started_at
                self.complete_step(sums, gradient_norm, stop, is_first=is_first)
                if self.progress.is_evaluation_pending:
                    self.evaluate(stop)
                self.tracking.advance(self.progress.step)
            return 0
        return stop.code()

    def begin(self) -> MemoryLimit:
        """Find a micro-batch size that fits in memory, try out training and evaluation, and open the output files."""
        progress, directory = self.progress, self.directory
        memory = MemoryLimit(directory, self.rank, self.loader)
        with memory.watched():
            if (
                self.task.compares_samples
                and self.strategy.has_gradients
                and self.rank.world_size > 1
            ):
                check_global_batch(self.strategy, self.loader, self.task)
            check_samples(self.loader, self.rank)
        memory.fit(self.strategy, self.task, self.config.training.micro_batch_size, progress.epoch)
        with memory.watched():
            rehearse(
                self.strategy, self.loader.read_first(progress.epoch, progress.position), self.task
            )
            self.evaluator.check_means(self.strategy, self.loader)
            rehearse_last(self.strategy, self.loader, self.task, progress.epoch)
        if self.config.evaluation.micro_batch_size == "auto":
            self.evaluator.micro_batch_size = self.loader.micro_batch_size  # which is known to fit
        if self.config.evaluation.every_epochs or self.config.evaluation.every_steps:
            self.evaluator.rehearse(self.strategy)
        self.checkpoints.begin(self.strategy)
        # Only now: a start that is refused leaves the run's files as they are.
        self.tracking = Tracking(
            directory, self.config, self.rank, step=progress.step, total_steps=self.total_steps,
            is_evaluation_pending=progress.is_evaluation_pending,
        )  # fmt: skip
        write_start(directory, self.config, self.rank)
        self.profiler = start_profiler(
            directory, self.rank.rank, self.config.logging.profile_steps, progress.step
        )
        self.loader.start(progress.epoch, progress.position)
        self.clock = StepClock(progress.num_samples_seen)
        return memory

    def train_step(self, is_logged: bool) -> tuple[dict[str, Tensor], Tensor | None]:
        """Run one optimizer step without waiting for the device. Return metrics and the gradient norm before clipping.
        Unless `is_logged` is true, the only metric is the loss. The caller must average metrics over all ranks.
        """
        task, strategy, config, progress = self.task, self.strategy, self.config, self.progress
        peak = config.optimizer.learning_rate
        rate = learning_rate(
            config.schedule,
            peak,
            progress.step,
            self.total_steps,
            progress.num_drops,
            task.learning_rate,
        )
        set_learning_rate(strategy.optimizer, rate, peak)
        set_mode(strategy.optimizer, "train")
        sums: dict[str, Tensor] = {}
        for (batch, request), weight in self.loader.next_step(strategy.module):
            with strategy.accumulate(is_last_micro_batch=request.is_last):
                with strategy.autocast():
                    loss, outputs = task.compute_loss(strategy.model, batch)
                if not (is_logged and task.training_metrics):
                    # a language model's logits are large, and backward needs the memory
                    outputs = None
                total = total_of(loss)
                strategy.backward(total, weight)
            figures = (
                figures_of(task, loss, outputs, batch, weight)
                if is_logged
                else {"loss": total.detach()}
            )
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + value * weight
        strategy.unscale()
        call_before_step(task, strategy, config.seed, progress.step, self.tracking)
        norm = strategy.optimizer_step(config.training.max_gradient_norm)
        set_mode(strategy.optimizer, "eval")
        return sums, norm

    def complete_step(
        self,
        sums: dict[str, Tensor],
        gradient_norm: Tensor | None,
        stop: StopRequest,
        *,
        is_first: bool,
    ) -> None:
        """Do whatever is due: log, save a checkpoint, compare replicas. Also record whether an evaluation is due."""
        config, progress = self.config, self.progress
        call_after_step(self.task, self.strategy, config.seed, progress.step, self.tracking)
        if self.average is not None:
            self.average.update(progress.step)
        self.losses.append((sums["loss"], progress.step, progress.batch_size))
        self.checkpoints.check()
        if self.profiler is not None:
            self.profiler.step()
        if is_first:
            self.strategy.check_optimizer()
        every = config.training.check_replicas_every_steps
        if is_first or (every and progress.step % every == 0):
            check_replicas(self.strategy, progress.step, self.rank)
        if progress.is_logged(config.logging.every_steps):
            self.log(sums, gradient_norm)
        is_last = progress.step == self.total_steps
        progress.is_evaluation_pending = progress.is_due(config.evaluation, at_end=is_last)
        if progress.is_due(config.checkpoint) or is_last:
            self.save(stop)  # before the evaluation, which the next start repeats if it fails

    def log(self, sums: dict[str, Tensor], gradient_norm: Tensor | None) -> None:
        """Log the step's figures, averaged over ranks. Not every step is logged, since logging waits for the device."""
        progress = self.progress
        check_finite(self.losses, progress, self.rank)
        values = (
            all_reduce(torch.stack([*sums.values()]).to(self.rank.sum_dtype)) / self.rank.world_size
        )
        record = {"split": "train", "step": progress.step, "epoch": progress.current_epoch}
        record |= dict(zip(sums, values.tolist(), strict=True))
        if progress.is_epoch_end:
            mean, progress.loss_sum = progress.loss_sum / progress.epoch_size, 0.0
            if not math.isnan(mean):
                record["epoch_loss"] = mean
        record["learning_rate"] = self.strategy.optimizer.param_groups[0]["lr"]
        record["samples_per_second"] = self.clock.samples_per_second(progress.num_samples_seen)
        if gradient_norm is not None:
            record["gradient_norm"] = gradient_norm.item()
        self.tracking.record(record)

    def evaluate(self, stop: StopRequest) -> None:
        """Evaluate the model on the validation split, and save best.pt if the result is the best so far."""
        with self.clock.paused():
            config, progress = self.config.evaluation, self.progress
            check_finite(self.losses, progress, self.rank)
            with self.average.swapped_in() if self.average is not None else nullcontext():
                log = Log(self.tracking, progress.step)
                values = self.evaluator.run(self.strategy, stop.code, log)
            if self.task.on_evaluation_end is not None:
                self.checkpoints.current.clear()  # it may have changed the model
            if progress.best is None:
                self.evaluator.check_means(self.strategy)
            progress.is_evaluation_pending = False
            record = {
                "split": "validation",
                "step": progress.step,
                "epoch": progress.current_epoch,
                **values,
            }
            self.tracking.record({**record, "num_samples": self.evaluator.num_samples})
            if progress.judge(values[config.metric], config, self.config.schedule.patience):
                self.evaluator.write_report(self.directory, "best", progress.step)
                self.save(stop, is_best=True)

    def save(self, stop: StopRequest, *, is_best: bool = False) -> None:
        """Write a checkpoint of the last finished step. If is_best, write it as best.pt."""
        with self.clock.paused():
            check_replicas(self.strategy, self.progress.step, self.rank)
            # A finite loss may have had a gradient that is not, so look at the weights too.
            norm = get_total_norm([weight.float() for weight in self.strategy.local_weights()])
            self.losses.append((norm.to(self.rank.device), self.progress.step, 0))
            check_finite(self.losses, self.progress, self.rank)
            state = collect_state(
                self.strategy, self.progress, self.config, self.average, self.loader.cursor
            )
            if self.rank.is_main or self.checkpoints.is_sharded:
                self.checkpoints.save(state, is_best=is_best, beat=stop.beat)
            self.num_saves += 1
            self.rank.wait_for_main(f"save {self.num_saves}", stop.beat)

    def resume(self) -> None:
        """Continue from a checkpoint, if there is one."""
        wanted = self.config.checkpoint.resume
        num_devices = self.rank.world_size * len(self.rank.devices)
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        options: Any = {"is_restart": is_restart, "num_devices": num_devices}
        options["remedy"] = (
            f"Put them back; or take the weights alone: checkpoint.initial_weights={wanted}"
        )
        state = read_once(partial(find_run, self.config, self.checkpoints, **options))
        if state.get("is_of_other_run"):
            state = recount(state, self.loader.num_samples, self.loader.global_batch_size)
            state["random_states"] = [{}]
        if state:  # the epoch of the last step, counted from 0
            self.begin_epochs(state["epoch"] if state["position"] else state["epoch"] - 1)
            cursors = [of_rank.get("cursor") for of_rank in state["random_states"]]
            # a stream refuses other numbers of ranks
            self.loader.cursor = cursors[self.rank.rank % len(cursors)]
        load_run(state, self.strategy, self.progress, self.config, self.average)
        if state.get("is_of_other_run") and self.is_complete:
            key, step = f"checkpoint.resume={self.config.checkpoint.resume}", self.progress.step
            problem = f"it has done step {step}, and this run ends at {self.total_steps}"
            raise ConfigError(f"{key}: {problem}. Raise training.epochs or training.max_steps.")
        if state and not self.is_complete:
            tell_changes(state, self.config, self.total_steps)

    def begin_epochs(self, epoch: int) -> bool:
        """Call on_epoch_begin() for epochs new to this process. Return True if a parameter was frozen or unfrozen."""
        epochs = range(self.num_epochs_begun, epoch + 1)
        if not epochs:
            return False
        self.num_epochs_begun = epoch + 1
        parameters = [*self.strategy.module.parameters()]
        former = [parameter.requires_grad for parameter in parameters]
        call_on_epoch_begin(self.task, self.strategy, self.config.seed, epochs)
        is_changed = former != [parameter.requires_grad for parameter in parameters]
        if is_changed:
            self.strategy.rebuild()
        return is_changed

    def finish(self, code: int, stop: StopRequest) -> None:
        """Save a final checkpoint, write summary.json and the best weights, and close the loader and the trackers."""
        progress, seconds = self.progress, self.clock.seconds
        if progress.step:
            self.save(stop)
            self.checkpoints.wait(stop.beat)
        self.loader.close()
        if self.profiler is not None:
            self.profiler.stop()
        status = "stopped" if code else "complete"
        speed = (progress.num_samples_seen - self.clock.first_sample) / max(seconds, 1e-9)
        summary = {
            "status": status,
            "steps": progress.step,
            "epochs": progress.epoch,
            "best": progress.best,
            "micro_batch_size": self.loader.micro_batch_size,
            "startup_seconds": self.startup_seconds,
            "train_seconds": seconds,
            "seconds_waiting_for_data": self.loader.seconds_waited,
            "samples_per_second": speed,
            **summary_of(self.config, self.rank),
        }
        if self.rank.is_main:
            checkpoints, folder = self.checkpoints, self.directory
            if paths := sorted(
                checkpoints.newest_first(), key=lambda path: path != checkpoints.best
            ):
                state = read_whole(checkpoints.load_first(paths) | {"optimizer": {}})
                # best.pt may come from steps that a crash lost and that were repeated
                summary["best"] = progress.best = state["best"]
                weights = checkpoints.weights_of(state, self.strategy.module)
                export_weights(weights, self.strategy.module, folder / "model.safetensors")
            write_json(folder / "summary.json", summary)
        self.tracking.close()
        self.strategy.close()
        remedy = ": the same command continues" if code else ""
        logger.info("%s: %s (%s)%s", status, progress.describe(), self.directory, remedy)

"""The training loop: fit, train_step, evaluate, save, resume.

Which samples a rank sees is loader.py's, what differs between strategies is strategies/'s, and each promise that takes
intricate code (stopping together, equal replicas, memory, exact resume) has a file of its own that this one calls.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from .. import dataset as user_data
from .. import model as user_model
from ..config import Config, to_dict
from ..launching.distributed import RankContext
from ..strategies import create_strategy
from ..strategies.base import weighted
from ..strategies.numerics import settle_precision
from .checkpoint import FORMAT_VERSION, CheckpointFolder
from .evaluation import Evaluator
from .figures import StepFigures
from .finite import FiniteCheck
from .loader import TrainLoader
from .memory import MemoryLimit
from .optimization import choose_optimizer, learning_rate, set_learning_rate
from .profiling import StepProfiler
from .progress import Progress, StepClock
from .random_state import gather_random_states, restore_random_states, seed_generators
from .rehearsal import rehearse
from .replicas import check_replicas
from .resuming import announce, announce_end, find_state, take_up
from .run_files import announce_start, claimed, describe_end, describe_start, is_described
from .stopping import Interrupted, StopRequest
from .tracking import Tracking
from .watchdog import beat, hang_watched
from .weighing import weigh
from .weights import build_model
from .workers import samples_named


class Trainer:
    """Trains the user's model on the user's data, as one of `context.world_size` ranks that make the same calls."""

    def __init__(self, config: Config, context: RankContext, directory: Path) -> None:
        config = settle_precision(config, context)  # a run continues in what it began with
        self.config, self.context, self.directory = config, context, directory
        seed_generators(config.seed)  # alike on every rank: equal initial weights
        with context.local_rank_first():  # one download a node
            train_data, validation_data, *_ = user_data.build_datasets(config.data)
        self.loader = TrainLoader(
            train_data, config.loader, context, seed=config.seed, collate=getattr(user_data, "collate", None),
            global_batch_size=config.training.global_batch_size, micro_batch_size=config.training.micro_batch_size,
        )  # fmt: skip
        self.evaluator = Evaluator(validation_data, "validation", config, context)
        self.evaluator.check_metric(config.evaluation.metric, config.evaluation.mode)
        self.progress = Progress(self.loader.num_samples, config.training.global_batch_size)
        all_steps = config.training.epochs * self.loader.steps_per_epoch
        self.total_steps = min(all_steps, config.training.max_steps or all_steps)
        self.checkpoints = CheckpointFolder(directory / "checkpoints", config.checkpoint.keep_last)
        self.clock = StepClock(context.started_at)
        self.profiler = StepProfiler(config.logging.profile_steps, directory, context)
        self.figures = StepFigures(context, self.loader)
        self.strategy = create_strategy(config, context)
        model = self.strategy.build(partial(build_model, config.model, config.checkpoint.initial_weights))
        self.strategy.prepare(model, partial(choose_optimizer, config=config.optimizer))

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done, or early stopping ended the run before."""
        is_stale = self.progress.is_stale(self.config.training.early_stopping_epochs)
        return (self.progress.step >= self.total_steps or is_stale) and not self.progress.is_evaluation_pending

    def fit(self) -> None:
        """Train from where the run stands to its end; RunEnds(128 + signal number) after a request to stop."""
        with claimed(self.directory):
            self.resume()
            if self.is_complete and is_described(self.directory):  # otherwise it was killed just before its end
                return announce_end(self.config, self.progress)
            with hang_watched(self.context, self.config.launch, self.directory):
                self.train()
        self.stop.exit_unless(self.is_complete)

    def train(self) -> None:
        """Step by step to the end, or to a request to stop; evaluate and save where they are due."""
        memory = self.begin()
        with StopRequest(self.context) as self.stop:
            with suppress(Interrupted):  # in an evaluation, which is then pending
                if self.progress.is_evaluation_pending:
                    self.evaluate()
                    self.save()
                while not self.is_complete and self.stop.allows():
                    with memory.watched():
                        figures = self.train_step()
                    self.after_step(*figures)
            self.finish()

    def begin(self) -> MemoryLimit:
        """Find the micro-batch that fits, rehearse a step, open what a run writes to, and start the loader."""
        progress, directory = self.progress, self.directory
        devices = announce_start(directory, self.context)
        memory = MemoryLimit(directory, self.context, self.loader)
        memory.fit(self.strategy, self.config.training.micro_batch_size, progress.epoch)
        with memory.watched():
            rehearse(self.strategy, self.loader.read_first(progress.epoch, progress.position), self.context)
        # Only now: a start that is refused leaves the run's files as they are.
        self.tracking = Tracking(directory, self.config, self.context, progress=progress, total_steps=self.total_steps)
        describe_start(directory, self.config, self.context, devices)
        self.loader.start(progress.epoch, progress.position, progress.step)
        self.finite = FiniteCheck(self.context, self.loader, directory, self.config.training.max_gradient_norm)
        self.clock.start(progress.num_samples_seen)
        self.profiler.toggle(progress.step)
        return memory

    def train_step(self) -> tuple[Tensor, Tensor | None]:
        """One optimizer step. Returns this rank's part of the loss (the parts' mean over ranks is the global batch's
        mean loss) and, if gradients are clipped, their norm. Both stay on the device: nothing here waits for it.
        """
        strategy, config, step = self.strategy, self.config, self.progress.step + 1
        rate = learning_rate(config.schedule, config.optimizer.learning_rate, step, self.total_steps)
        set_learning_rate(strategy.optimizer, rate, config.optimizer.learning_rate)
        step_loss: Tensor | None = None
        for (batch, request), weight in weigh(self.loader.next_step(), self.context):
            with strategy.accumulate(is_last_micro_batch=request.is_last):
                with strategy.autocast(), samples_named(request.indices):
                    loss, _ = user_model.compute_loss(strategy.model, batch)
                self.finite.look(loss, step)
                beat()  # before backward, where ranks wait for each other: the one that hangs has not come so far
                strategy.backward(loss, weight)
            part = weighted(loss.detach(), weight)
            step_loss = part if step_loss is None else step_loss + part
        assert step_loss is not None, "the loader hands out at least one micro-batch a step"
        return step_loss, strategy.optimizer_step(config.training.max_gradient_norm)

    def after_step(self, step_loss: Tensor, gradient_norm: Tensor | None) -> None:
        """Count the step, then log, evaluate and save where they are due."""
        config, progress = self.config, self.progress
        progress.count_step()
        self.figures.add(step_loss)
        self.profiler.toggle(progress.step)
        every = config.training.check_replicas_every_steps
        if self.clock.end_first_step() or (every and progress.step % every == 0):
            check_replicas(self.strategy.replicas(with_buffers=every is not None), progress.step, self.context.device)
        if progress.is_epoch_end or progress.step % config.logging.every_steps == 0:
            self.log(step_loss, gradient_norm)
        if progress.is_due(config.evaluation, at_end=progress.step == self.total_steps):
            self.evaluate()
        if progress.is_due(config.checkpoint) or self.is_complete:
            self.save()
        self.tracking.advance(progress.step)

    def log(self, step_loss: Tensor, gradient_norm: Tensor | None) -> None:
        """Write the step's figures: of all steps, only these wait for the device."""
        self.finite.raise_if_found()
        progress = self.progress
        global_loss, epoch_loss = self.figures.read(step_loss)
        record = {
            **progress.place("train"),
            "loss": global_loss,
            "learning_rate": self.strategy.optimizer.param_groups[0]["lr"],
            "samples_per_second": self.clock.samples_per_second(progress.num_samples_seen),
        }
        if gradient_norm is not None:
            record["gradient_norm"] = gradient_norm.item()
        self.tracking.record(record)
        if progress.is_epoch_end:
            self.tracking.end_epoch(progress.epoch, epoch_loss)
            self.figures.begin_epoch()

    def evaluate(self) -> None:
        """Evaluate on the validation split, and keep the checkpoint if it is the best so far."""
        with self.clock.paused():
            config, progress = self.config.evaluation, self.progress
            self.finite.raise_if_found()
            progress.is_evaluation_pending = True
            values = self.evaluator.run(self.strategy, self.stop.allows)
            self.evaluator.check_finite(values, config.metric, progress.step, save=self.save)
            progress.is_evaluation_pending = False
            self.tracking.record({**progress.place("validation"), **values, "num_samples": self.evaluator.num_samples})
            if progress.judge(values[config.metric], config):
                self.evaluator.write_report(self.directory, "best", progress.step)
                self.save(is_best=True)

    def save(self, *, is_best: bool = False) -> None:
        """Write a checkpoint of the last finished step."""
        with self.clock.paused():
            self.finite.raise_if_found()
            self.finite.check_weights(self.strategy.local_weights(), self.progress.step)
            state = {"format_version": FORMAT_VERSION, "config": to_dict(self.config), **self.progress.state_dict()}
            state |= self.strategy.state_dict()
            random_states = gather_random_states(self.context)
            beat()  # the disk has the whole of launch.timeout_minutes
            self.tracking.sync()  # no checkpoint is newer than the figures
            if random_states is not None:  # rank 0
                self.checkpoints.save(state | {"random_states": random_states}, is_best=is_best)
            self.progress.saved_step = self.progress.saved_step if is_best else self.progress.step
            beat()

    def resume(self) -> None:
        """Take up the state that the config asks for: the run's last checkpoint, a file's, or none."""
        if (state := find_state(self.config, self.checkpoints)) is not None:
            take_up(state, self.strategy, self.progress, self.config)
            if not self.is_complete:
                announce(state, self.config, self.progress.step, self.total_steps)
        restore_random_states(state, self.config.seed, self.progress.step, self.context)

    def finish(self) -> None:
        """Save the last step if that is due; end the loader's workers and the tracker; write summary and weights."""
        times = self.clock.summary(self.progress.num_samples_seen)
        if self.progress.saved_step != self.progress.step:
            self.save()
        self.loader.close()
        self.profiler.finish()
        status = "complete" if self.is_complete else "stopped"
        summary = {"status": status, "micro_batch_size": self.loader.micro_batch_size, **self.progress.summary()}
        self.progress.best = describe_end(self.directory, summary | times, self.config, self.strategy)
        self.tracking.close()
        self.tracking.message(f"{status}: {self.progress.describe()} ({self.directory})")

"""transformers' Trainer without extras: constant learning rate, no clipping, no checkpoints, no progress bar."""
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call, unused-ignore"

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from workload.model import compute_loss

from loops.common import Recorder, leave, make_loader, make_model, make_optimizer
from loops.settings import LEARNING_RATE, Settings


class OwnTrainer(Trainer):
    """A Trainer with the data and the loss that all loops share."""

    settings: Settings
    last_loss: Tensor

    def get_train_dataloader(self) -> DataLoader[Any]:
        return make_loader(self.settings, self.args.process_index, self.settings.num_ranks)

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        loss, _outputs = compute_loss(model, inputs)
        self.last_loss = loss.detach()
        return loss


class MarkLogs(TrainerCallback):
    """Notes the times of the Trainer's own log lines, whose losses are means over the steps since the last line."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.recorder: Recorder

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self.recorder = Recorder(self.settings, args.process_index)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:  # not the summary at the end
            self.recorder.mark()


def main() -> None:
    settings = Settings.from_environment()
    arguments = TrainingArguments(
        output_dir=str(settings.output / "trainer"),
        use_cpu=settings.device == "cpu",
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        max_steps=settings.num_steps,
        per_device_train_batch_size=settings.global_batch_size // settings.num_ranks,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = make_model(settings)
    marks = MarkLogs(settings)
    trainer = OwnTrainer(
        model=model,
        args=arguments,
        optimizers=(make_optimizer(model, settings), None),
        callbacks=[marks],
    )
    trainer.settings = settings
    trainer.train()
    marks.recorder.finish(trainer.last_loss)
    leave()


if __name__ == "__main__":
    main()

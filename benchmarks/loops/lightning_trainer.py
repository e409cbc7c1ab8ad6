"""Lightning's Trainer without extras: no progress bar, checkpoints or summary, only the log of common.Recorder."""
# mypy: disable-error-code="import-not-found, import-untyped, misc, unused-ignore"

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from workload.model import compute_loss

from loops.common import Recorder, leave, make_loader, make_model, make_optimizer
from loops.settings import PRECISIONS, Settings


class Module(LightningModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.step = settings, 0
        self.model = make_model(settings)
        self.recorder: Recorder

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.model, self.settings)

    def on_train_start(self) -> None:
        self.recorder = Recorder(self.settings, self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = compute_loss(self.model, batch)[0]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.step += 1
        if self.step % self.settings.log_every == 0:
            self.recorder.log(self.step, outputs["loss"])

    def on_train_end(self) -> None:
        self.recorder.finish()


def main() -> None:
    settings = Settings.from_environment()
    trainer = Trainer(
        accelerator=settings.device,
        precision=PRECISIONS[settings.precision],
        devices=settings.num_ranks,
        strategy="ddp" if settings.num_ranks > 1 else "auto",
        max_steps=settings.num_steps,
        max_epochs=-1,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    rank, num_ranks = trainer.global_rank, trainer.world_size
    trainer.fit(Module(settings), make_loader(settings, rank, num_ranks))
    leave()


if __name__ == "__main__":
    main()

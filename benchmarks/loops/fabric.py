"""The bare loop with Lightning Fabric: setup() and fabric.backward(). Fabric starts the second rank itself."""
# mypy: disable-error-code="import-not-found, import-untyped, unused-ignore"

from __future__ import annotations

from lightning.fabric import Fabric
from workload.model import compute_loss

from loops.common import Recorder, leave, make_loader, make_model, make_optimizer
from loops.settings import PRECISIONS, Settings


def main() -> None:
    settings = Settings.from_environment()
    strategy = "ddp" if settings.num_ranks > 1 else "auto"
    fabric = Fabric(
        accelerator=settings.device,
        devices=settings.num_ranks,
        strategy=strategy,
        precision=PRECISIONS[settings.precision],
    )
    fabric.launch()
    model = make_model(settings)
    model, optimizer = fabric.setup(model, make_optimizer(model, settings))
    own_loader = make_loader(settings, fabric.global_rank, settings.num_ranks)
    loader = fabric.setup_dataloaders(own_loader, use_distributed_sampler=False)
    recorder = Recorder(settings, fabric.global_rank)
    step = 0
    while step < settings.num_steps:
        for batch in loader:
            loss = compute_loss(model, batch)[0]
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % settings.log_every == 0:
                recorder.log(step, loss)
            if step == settings.num_steps:
                break
    recorder.finish()
    leave()


if __name__ == "__main__":
    main()

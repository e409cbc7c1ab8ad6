"""The bare loop with Hugging Face Accelerate: prepare() and accelerator.backward()."""
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, unused-ignore"

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from workload.model import compute_loss

from loops.common import Recorder, leave, make_loader, make_model, make_optimizer
from loops.settings import Settings


def main() -> None:
    settings = Settings.from_environment()
    # split_batches: each rank takes its contiguous part of the global batches that the loader gives.
    data = DataLoaderConfiguration(
        split_batches=True, non_blocking=settings.is_tuned and settings.device != "cpu"
    )
    precision = settings.precision.replace("fp32", "no")
    accelerator = Accelerator(
        cpu=settings.device == "cpu", mixed_precision=precision, dataloader_config=data
    )
    model = make_model(settings)
    optimizer = make_optimizer(model, settings)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, make_loader(settings, rank=0, num_ranks=1)
    )
    recorder = Recorder(settings, accelerator.process_index)
    step = 0
    while step < settings.num_steps:
        for batch in loader:
            loss = compute_loss(model, batch)[0]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % settings.log_every == 0:
                recorder.log(step, loss)
            if step == settings.num_steps:
                break
    recorder.finish()
    leave()  # not end_training(): with the model still there, it hangs now and then


if __name__ == "__main__":
    main()

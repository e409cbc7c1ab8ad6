"""Compares the `contrastive` example on 1, 2 and 4 ranks with a plain script. Writes docs/contrastive-example.md.

python benchmarks/contrastive_curve.py    # from the repository's root folder; three minutes on two cores

The script needs matplotlib and all that `make` installs.
"""

from __future__ import annotations

import itertools
import json
import platform
import resource
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import baking  # noqa: E402

PAGE, PICTURE = ROOT / "docs" / "contrastive-example.md", "contrastive-example.png"
EPOCHS, BATCH, RATE, SEED = 40, 128, 3e-3, 42
RANKS = (1, 2, 4)
SHARES, CHUNK = (1024, 4096, 8192), 64


def plain_script() -> list[float]:
    """Train as a script for one device does, and return the loss of each step."""
    import torch
    import torch.nn.functional as F
    from ddp_experiment.core.data import Plan, Request, epoch_order
    from ddp_experiment.core.task import find_task
    from ddp_experiment.dataset import DataConfig, build_datasets
    from ddp_experiment.model import ModelConfig, build_model

    torch.manual_seed(SEED)
    model: Any = build_model(ModelConfig())
    train, _ = build_datasets(DataConfig())
    plan = Plan(train, find_task(), "training", SEED)  # it shifts each image as the trainer does
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    losses = []
    for epoch in range(EPOCHS):
        for rows in epoch_order(len(train), SEED, epoch).split(BATCH):
            indices = rows.tolist()
            batch, _ = plan[Request(epoch, indices, indices, len(indices))]
            upper, lower, scale = model(batch)
            logits, labels = scale * upper @ lower.T, torch.arange(len(rows))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def peak_memory(share: int, chunk: int) -> float:
    """Return by how many MiB a forward and backward pass over a share raises this process's peak memory."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    channels = (1, 32, 64, 64)
    layers = [
        part
        for inputs, outputs in itertools.pairwise(channels)
        for part in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.GELU())
    ]
    tower = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def embed(images: torch.Tensor) -> torch.Tensor:
        return F.normalize(tower(images), dim=1)

    images = torch.rand(share, 1, 16, 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces = images.split(chunk) if chunk else [images]
    parts = [checkpoint(embed, p, use_reentrant=False) if chunk else embed(p) for p in pieces]
    rows = torch.cat(parts)
    F.cross_entropy(rows @ rows.T / 0.1, torch.arange(share)).backward()
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def in_project(project: Path, *words: str) -> Any:
    """Call this file in a process of its own, and return what it prints."""
    command = [sys.executable, __file__, *words]
    environment = baking.plain_environment({"PYTHONPATH": str(project)})
    text = subprocess.check_output(command, cwd=project, env=environment, text=True)
    return json.loads(text.splitlines()[-1])


def train(project: Path, num_ranks: int) -> tuple[list[float], float, float]:
    """Return the loss of each step, and recall@1 and the loss on the validation set at the end."""
    devices = ",".join(["cpu"] * num_ranks)
    settings = f"name=r{num_ranks} device_ids={devices} training.epochs={EPOCHS} optimizer.learning_rate={RATE}"
    settings += f" seed={SEED} training.global_batch_size={BATCH} schedule.name=constant logging.every_steps=1"
    settings += " optimizer.weight_decay=0 logging.tracker=none checkpoint.every_epochs=null evaluation.every_epochs=10"
    command = [sys.executable, "run.py", *settings.split()]
    subprocess.run(
        command,
        check=True,
        cwd=project,
        env=baking.plain_environment(),
        stdout=subprocess.DEVNULL,
    )
    text = (project / "runs" / f"r{num_ranks}" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    last = [line for line in lines if line["split"] == "validation"][-1]
    return (
        [line["loss"] for line in lines if line["split"] == "train"],
        last["recall"],
        last["loss"],
    )


def write_page(
    plain: list[float], runs: dict[int, tuple[list[float], float, float]], memory: list[list[float]]
) -> None:
    import torch

    steps_per_epoch = len(plain) // EPOCHS
    rows = []
    for number, (losses, recall, loss) in runs.items():
        first, whole = (
            max(abs(a - b) for a, b in zip(losses[:end], plain[:end], strict=True))
            for end in (2 * steps_per_epoch, len(plain))
        )
        rows.append(f"| {number} | {first:.1e} | {whole:.1e} | {recall:.4f} | {loss:.4f} |")
    sizes = [
        f"| {share:,} | {whole:,.0f} | {cut:,.0f} |"
        for share, (whole, cut) in zip(SHARES, memory, strict=True)
    ]
    text = f"""# The contrastive example on 1, 2 and 4 ranks

`benchmarks/contrastive_curve.py` wrote this page. It trains `example=contrastive`: two towers learn which lower half of a handwritten digit belongs to an upper
half ({EPOCHS} epochs of 1,438 images, global batches of {BATCH}, of which an epoch's last has 30; AdamW without decay, rate {RATE}). Each half is compared with all others of its global
batch, on whatever rank they are. A plain script for one device, with the same batches, is beside it.

| ranks | largest difference of a loss from the script's, 2 epochs | {EPOCHS} epochs | recall@1 of 359 halves | validation loss |
|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

![training loss of the script and of 1, 2 and 4 ranks](contrastive-example.png)

By chance, one half in 359 finds its other half (0.0028).

## Memory
Peak memory that one forward and backward pass adds, for a share of so many samples (three convolutions on 16x16 images, in MiB), as it is and with the share
cut into parts of {CHUNK} inside of forward ([how](how-to/contrastive.md#less-memory)):

| share | as it is | cut |
|---:|---:|---:|
{chr(10).join(sizes)}

Measured on {date.today()}, Python {platform.python_version()}, torch {torch.__version__}, two cores.
"""  # noqa: E501
    PAGE.write_text(text, encoding="utf-8")
    draw(plain, {number: losses for number, (losses, *_) in runs.items()})
    print(text)


def draw(plain: list[float], curves: dict[int, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=100)
    axes.plot(plain, color="black", linewidth=5, alpha=0.25, label="plain script")
    styles = (("tab:blue", "-"), ("tab:orange", "--"), ("tab:green", ":"))
    for (number, losses), (color, style) in zip(curves.items(), styles, strict=True):
        name = f"{number} rank{'s' * (number > 1)}"
        axes.plot(losses, style, color=color, linewidth=1.2, label=name)
    axes.set(xlabel="step", ylabel="training loss", title="one curve, on any number of ranks")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PAGE.parent / PICTURE)


def main() -> None:
    if sys.argv[1:2] == ["plain"]:
        print(json.dumps(plain_script()))
        return
    if sys.argv[1:2] == ["memory"]:
        print(json.dumps(peak_memory(*map(int, sys.argv[2:]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        template = baking.export_template(Path(folder) / "template")
        project = baking.bake(template, Path(folder), example="contrastive", size="small")
        plain = in_project(project, "plain")
        runs = {number: train(project, number) for number in RANKS}
        memory = [
            [in_project(project, "memory", str(share), str(chunk)) for chunk in (0, CHUNK)]
            for share in SHARES
        ]
    write_page(plain, runs, memory)


if __name__ == "__main__":
    main()

"""Compares the `gpt` example with a plain script of the same model and text. Writes docs/gpt-example.md.

python benchmarks/gpt_curve.py    # from the repository's root folder; about 20 minutes on two cores

Each call makes only the runs that are missing from benchmarks/gpt_curve.json. Once that file holds all runs, the call
writes the page and its picture. Delete the file to measure again. The script needs matplotlib and all that `make`
installs.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import baking  # noqa: E402

RESULTS, PAGE, PICTURE = (
    ROOT / "benchmarks" / "gpt_curve.json",
    ROOT / "docs" / "gpt-example.md",
    "gpt-example.png",
)
STEPS, BATCH, BLOCK, EVERY, EVALUATE_EVERY = 300, 32, 64, 10, 50
PEAK, FLOOR, WARMUP, DECAY, BETAS, MAX_NORM = 2e-3, 2e-4, 50, 0.1, (0.9, 0.99), 1.0
SEEDS = (1, 2, 3)
# for the speed, in short runs one after the other: a machine's speed drifts
ROUNDS, ROUND_STEPS = (
    12,
    100,
)
WAYS = {
    "plain script, one process": None,
    "trainer, one rank": "device_ids=cpu",
    "trainer, two ranks, ddp": "device_ids=cpu,cpu strategy=ddp",
    "trainer, two ranks, fsdp": "device_ids=cpu,cpu strategy=fsdp",
}
SETTINGS = f"""
    data.block_size={BLOCK} model.dropout=0 optimizer.learning_rate={PEAK} optimizer.weight_decay={DECAY}
    optimizer.betas=[{BETAS[0]},{BETAS[1]}] schedule.warmup_steps={WARMUP} schedule.min_learning_rate={FLOOR}
    training.global_batch_size={BATCH} training.max_gradient_norm={MAX_NORM}
    evaluation.every_steps={EVALUATE_EVERY} evaluation.max_batches=null checkpoint.every_steps=null
    logging.every_steps={EVERY} logging.tracker=none logging.report=false
"""
Run = dict[str, Any]
"""{"train": {step: loss}, "validation": {step: loss}, "tokens_per_second": median over the log lines}."""


def plain_script(seed: int, num_steps: int) -> Run:
    """Train as nanoGPT's train.py does, in short: random crops, AdamW with two groups, warm-up, cosine, clipping."""
    import torch
    from ddp_experiment.dataset import DataConfig, build_datasets
    from ddp_experiment.model import ModelConfig, build_model, complete_config, compute_loss

    torch.manual_seed(seed)
    data_config, model_config = DataConfig(block_size=BLOCK), ModelConfig(dropout=0.0)
    complete_config(model_config, data_config)
    train, validation = build_datasets(data_config)
    model = build_model(model_config)
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim >= 2) == wanted] for wanted in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, fused=True)

    losses, validation_losses, rates, began_at = {}, {}, [], time.perf_counter()
    for step in range(1, num_steps + 1):
        progress = min(1.0, (step - 1 - WARMUP) / (STEPS - WARMUP))
        cosine = FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = PEAK * step / WARMUP if step <= WARMUP else cosine
        batch = train.__getitems__(torch.randint(len(train), (BATCH,)).tolist())
        loss = compute_loss(model, batch)[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % EVERY == 0:
            losses[step] = loss.item()
            rates.append(EVERY * BATCH * BLOCK / (time.perf_counter() - began_at))
            began_at = time.perf_counter()
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                blocks = torch.arange(len(validation)).split(BATCH)
                parts = [
                    compute_loss(model, validation.__getitems__(p.tolist()))[0].item() * len(p)
                    for p in blocks
                ]
            validation_losses[step] = sum(parts) / len(validation)
            began_at = time.perf_counter()
    return {
        "train": losses,
        "validation": validation_losses,
        "tokens_per_second": statistics.median(rates),
    }


def trainer(words: str, seed: int, num_steps: int) -> Run:
    """Train the same model with the project's `python run.py` and the arguments `words`."""
    name = f"{len(list(Path().glob('runs/*')))}"
    settings = [
        f"name={name}",
        f"seed={seed}",
        f"training.max_steps={num_steps}",
        *words.split(),
        *SETTINGS.split(),
    ]
    command = [sys.executable, "run.py", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [
        json.loads(line)
        for line in Path("runs", name, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    split = {
        name: {line["step"]: line["loss"] for line in lines if line["split"] == name}
        for name in ("train", "validation")
    }
    rates = [line["samples_per_second"] * BLOCK for line in lines if line["split"] == "train"]
    return {**split, "tokens_per_second": statistics.median(rates)}


def measure(project: Path, way: str, seed: int, num_steps: int = STEPS) -> Run:
    """Make one run in a process of its own, in the project's folder, and return its results."""
    command = [
        sys.executable,
        __file__,
        "--way",
        way,
        "--seed",
        str(seed),
        "--steps",
        str(num_steps),
    ]
    environment = baking.plain_environment({"PYTHONPATH": str(project)})
    run: Run = json.loads(
        subprocess.check_output(command, cwd=project, env=environment, text=True).splitlines()[-1]
    )
    return run


def mean_and_range(values: list[float], digits: int = 3) -> str:
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def write_page(results: dict[str, dict[str, Run]], speeds: dict[str, list[float]]) -> None:
    """Write docs/gpt-example.md and its picture."""
    import torch

    steps = [str(step) for step in range(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY)]
    validation = {
        way: {step: [run["validation"][step] for run in runs.values()] for step in steps}
        for way, runs in results.items()
    }
    plain, *others = WAYS
    rows = []
    for way in WAYS:
        rates = speeds[way]
        ratio = [rate / other for rate, other in zip(rates, speeds[plain], strict=True)]
        losses = " | ".join(mean_and_range(validation[way][step]) for step in ("100", "200", "300"))
        ratios = f"{statistics.median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})"
        rows.append(f"| {way} | {losses} | {statistics.median(rates):,.0f} | {ratios} |")
    distances = {
        (way, step): abs(
            statistics.mean(validation[way][step]) - statistics.mean(validation[plain][step])
        )
        for way in others
        for step in steps
    }
    (way, step), largest = max(distances.items(), key=lambda item: item[1])
    spread = max(max(validation[plain][step]) - min(validation[plain][step]) for step in steps)
    at_the_end = max(distances[way, steps[-1]] for way in others)
    spread_at_the_end = max(validation[plain][steps[-1]]) - min(validation[plain][steps[-1]])
    two = (results[name] for name in list(WAYS)[2:])
    strategies = max(
        abs(one["train"][step] - other["train"][step])
        for one, other in zip(*(runs.values() for runs in two), strict=True)
        for step in one["train"]
    )
    text = f"""# The gpt example beside a plain script

`benchmarks/gpt_curve.py` wrote this page: it trains the model of `example=gpt` ({STEPS} steps of {BATCH} blocks of {BLOCK} characters, 4 layers, 128 wide, no
dropout) with a plain loop as nanoGPT has it (crops at random, AdamW with decay on matrices alone, warm-up, cosine, clipping) and with the
trainer, which takes each crop once an epoch. The text is *Hamlet*, 177,976 characters, of which the last tenth is used for validation. Seeds {", ".join(map(str, SEEDS))}
draw other weights and other batches; from one seed the script draws other batches than the trainer, whose rows see the same ones.

| | validation loss after 100 steps | 200 steps | {STEPS} steps | tokens/s | beside the script |
|---|---|---|---|---:|---:|
{chr(10).join(rows)}

Losses: mean over the seeds, and their range, in nats a character. Tokens/s: in {ROUNDS} rounds all ways run {ROUND_STEPS} steps each, one after the other;
median over the log lines of a run, then over the rounds. The last column has the median and the range of the ratios round by round: the machine's own
speed drifts by as much. Two ranks share the two cores on which the one process computes with two threads.

![training loss by step, mean and range over seeds](gpt-example.png)

- The means of a way and of the script differ most in `{way}` after {step} steps: by {largest:.3f}, where the script's own seeds are up to {spread:.3f} apart.
  After {STEPS} steps they differ by {at_the_end:.3f} at most; the script's seeds by {spread_at_the_end:.3f}.
- ddp and fsdp, seed by seed, differ in no logged training loss by more than {strategies:.1g}.

Measured on {date.today()}, Python {platform.python_version()}, torch {torch.__version__}, two cores.
"""  # noqa: E501
    PAGE.write_text(text, encoding="utf-8")
    draw(results)
    print(text)


def draw(results: dict[str, dict[str, Run]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=100)
    styles = (("black", "-"), ("tab:blue", "--"), ("tab:orange", "-."), ("tab:green", ":"))
    for (way, runs), (color, style) in zip(results.items(), styles, strict=True):
        curves = [[run["train"][step] for run in runs.values()] for step in runs["1"]["train"]]
        steps = [int(step) for step in runs["1"]["train"]]
        axes.fill_between(
            steps, [*map(min, curves)], [*map(max, curves)], color=color, alpha=0.12, linewidth=0
        )
        axes.plot(steps, [*map(statistics.mean, curves)], style, color=color, label=way)
    axes.set(
        xlabel="step",
        ylabel="training loss, nats a character",
        title="mean and range of three seeds",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PAGE.parent / PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    if options.way:  # in the project's folder, started by measure()
        words = WAYS[options.way]
        work = plain_script if words is None else partial(trainer, words)
        print(json.dumps(work(options.seed, options.steps)))
        return
    results: dict[str, dict[str, Run]] = {way: {} for way in WAYS}
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    if RESULTS.exists():
        stored = json.loads(RESULTS.read_text(encoding="utf-8"))
        results, speeds = stored["curves"], stored["tokens_per_second"]

    def store() -> None:
        text = json.dumps({"curves": results, "tokens_per_second": speeds})
        RESULTS.write_text(text + "\n", encoding="utf-8")

    # in turn, and each seed begins with another one, since the machine's speed drifts
    ways = [*WAYS]
    missing = [
        (way, seed)
        for seed in SEEDS
        for way in ways[seed:] + ways[:seed]
        if str(seed) not in results[way]
    ]
    with tempfile.TemporaryDirectory() as folder:
        template = baking.export_template(Path(folder) / "template")
        project = baking.bake(template, Path(folder), example="gpt")
        for way, seed in missing:
            run = results[way][str(seed)] = measure(project, way, seed)
            store()
            print(f"{way}, seed {seed}: {run['validation'][str(STEPS)]:.4f}")
        for number in range(ROUNDS):
            # In random order: a run that uses both cores fully slows the next one down.
            for way in random.Random(number).sample(ways, len(ways)):
                if len(speeds[way]) <= number:
                    speeds[way].append(
                        measure(project, way, number, ROUND_STEPS)["tokens_per_second"]
                    )
                    store()
                    print(f"{way}, round {number}: {speeds[way][number]:,.0f} tokens/s", flush=True)
    write_page(results, speeds)


if __name__ == "__main__":
    main()

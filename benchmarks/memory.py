"""Measures the memory of ranks under FSDP and while a checkpoint is loaded. Writes benchmarks/RESULTS-MEMORY.md.

python benchmarks/memory.py    # from the repository's root folder; takes 1 minute and needs all that `make` installs
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import baking  # noqa: E402

RESULTS = ROOT / "benchmarks" / "RESULTS-MEMORY.md"
COMMON = """
    device_ids=cpu,cpu model.dropout=0 data.block_size=24 training.global_batch_size=16 schedule.warmup_steps=0 evaluation.every_steps=null
    evaluation.every_epochs=null logging.tracker=none logging.report=false evaluation.max_batches=2
""".split()  # noqa: E501
WAYS = {
    "ddp, fp32": "strategy=ddp training.precision=fp32",
    "ddp, bf16": "strategy=ddp training.precision=bf16",
    "fsdp, fp32": "strategy=fsdp training.precision=fp32",
    "fsdp, bf16": "strategy=fsdp training.precision=bf16",
    "fsdp, bf16, reshard_after_forward=false": "strategy=fsdp training.precision=bf16 fsdp.reshard_after_forward=false",
}
OF_STEPS = '''

def _count(model, forward):
    """Print the bytes of whole weights that outlive forward, and of whole gradients that a micro-batch left behind."""
    import gc

    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim > 1}
    shapes |= {shape[::-1] for shape in shapes}
    saved = {}

    def is_whole(tensor):  # a weight that FSDP has dropped has a storage of no bytes; a part of one is a DTensor
        return tuple(tensor.shape) in shapes and tensor.is_floating_point() and type(tensor).__name__ != "DTensor"

    def pack(tensor):
        if is_whole(tensor):
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    objects = gc.get_objects()
    optimizers = [o for o in objects if issubclass(type(o), torch.optim.Optimizer)]
    others = [*model.parameters(), *(t for o in optimizers for state in o.state.values() for t in state.values())]
    others = {t.untyped_storage()._cdata for t in others if type(t).__name__ != "DTensor"}
    tensors = [t for t in objects if type(t) is Tensor] + [p.grad for p in model.parameters() if p.grad is not None]
    whole = [t.untyped_storage() for t in tensors if is_whole(t)]
    gradients = {storage._cdata: storage.nbytes() for storage in whole if storage._cdata not in others}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward()
    size = sum(p.numel() * 4 for p in model.parameters())
    if model.training:
        weights = sum(storage.nbytes() for storage in saved.values())
        print(f"whole weights {weights / size:.3f}, whole gradients {sum(gradients.values()) / size:.3f}")
    return outputs
'''
OF_LOADING = '''

def _measured(function):
    """Print the bytes that the call held at its peak, above what it keeps."""
    import os, resource

    def call(*arguments):
        result = function(*arguments)
        kept = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        print(f"held for a moment: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - kept}", flush=True)
        return result

    return call


'''


def run(project: Path, *words: str) -> list[str]:
    """Run a command of the project on two ranks, and return each rank's log."""
    command = [sys.executable, "run.py", *words]
    # With a fixed threshold glibc gives freed tensors back at once: resident memory is then what is held.
    environment = baking.plain_environment({"MALLOC_MMAP_THRESHOLD_": "65536"})
    done = subprocess.run(
        command, check=False, cwd=project, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    name = next(word for word in words if word.startswith("name="))[5:]
    return [
        (project / f"runs/{name}/logs/rank_{rank}.log").read_text(encoding="utf-8")
        for rank in (0, 1)
    ]


def measure_steps(project: Path) -> list[str]:
    """Return a row for each of WAYS: whole weights and gradients that outlive a pass, on the rank that has the most."""
    model = project / "ddp_experiment" / "model.py"
    former = model.read_text(encoding="utf-8")
    call = "logits = model(batch.inputs)"
    changed = former.replace(call, "logits = _count(model, lambda: model(batch.inputs))")
    assert changed != former
    model.write_text(changed + OF_STEPS, encoding="utf-8")
    rows = []
    for number, (way, words) in enumerate(WAYS.items()):
        options = [
            "model.hidden_size=100",
            "training.micro_batch_size=2",
            "training.max_steps=4",
            f"name=steps-{number}",
        ]
        text = "".join(run(project, *words.split(), *options, *COMMON))
        found = re.findall(r"whole weights (\S+), whole gradients (\S+)", text)
        weights, gradients = (max(map(float, column)) for column in zip(*found, strict=True))
        rows.append(f"| {way} | {weights:.1%} | {gradients:.1%} |")
        print(rows[-1], flush=True)
    model.write_text(former, encoding="utf-8")
    return rows


def measure_loading(project: Path) -> tuple[float, list[str]]:
    """Return a checkpoint's size in MB, and table rows of the extra memory of each rank while a command loads it."""
    package, size = (
        project / "ddp_experiment",
        ["model.hidden_size=512", "model.num_layers=6", "name=loading"],
    )
    run(project, *size, "training.max_steps=1", *COMMON)
    checkpoint = project / "runs/loading/checkpoints/step_00000001.pt"
    num_bytes = checkpoint.stat().st_size
    for path, name in (("trainer.py", "Trainer.resume"), ("commands/evaluate.py", "restore")):
        text = (package / path).read_text(encoding="utf-8")
        (package / path).write_text(
            f"{text}{OF_LOADING}{name} = _measured({name})\n", encoding="utf-8"
        )
    rows = []
    commands = {
        "a run is continued": [*size, "training.max_steps=2", *COMMON],
        "`run.py evaluate`": [
            "evaluate",
            "name=loading",
            "evaluation.checkpoint=last",
            "evaluation.max_batches=2",
        ],
    }
    for label, words in commands.items():
        for strategy in ("ddp", "fsdp"):
            logs = run(project, *words, f"strategy={strategy}", *(COMMON[:1]))
            held = [
                max(0, int(log.rpartition("held for a moment: ")[2].split()[0])) / num_bytes
                for log in logs
            ]
            rows.append(f"| {label}, {strategy} | {held[0]:.2f} | {held[1]:.2f} |")
            print(rows[-1], flush=True)
    return num_bytes / 1e6, rows


def main() -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        template = baking.export_template(Path(folder) / "template")
        project = baking.bake(template, Path(folder), example="gpt")
        steps = measure_steps(project)
        size, loading = measure_loading(project)
    text = f"""# What ranks hold in memory

`make memory` wrote this page. It trains the model of `example=gpt` on two gloo ranks.

## Between the passes of a step

Four layers, 100 wide; two micro-batches of 2 blocks a rank and step. Counted: tensors of the shape of a whole weight matrix that live on between forward
and backward, and gradients of that shape that live on from one micro-batch to the next (the optimizer's state not counted); on the rank that holds the most, in percent of the
model's fp32 weights. DDP keeps whole weights by its nature (in bf16 its forward pass keeps 16-bit copies), and two sets of
gradients: its buckets, and those of the first micro-batch, which are not reduced yet.

| | whole weights between forward and backward | whole gradients between micro-batches |
|---|---:|---:|
{chr(10).join(steps)}

## When a checkpoint is loaded

Six layers, 512 wide, a checkpoint of {size:.0f} MB. Counted: the peak of the process's resident memory while it loads, above what it keeps afterwards, in
multiples of the checkpoint. The other ranks get one tensor at a time from rank 0. `evaluate` needs no optimizer state.

| | rank 0 | rank 1 |
|---|---:|---:|
{chr(10).join(loading)}

Measured on {date.today()}, Python {platform.python_version()}, torch {torch.__version__}, two cores.
"""  # noqa: E501
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

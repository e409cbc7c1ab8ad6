"""Measures the memory of ranks under FSDP and in each phase of a run, and how long saves block it. Writes a page.

python benchmarks/memory.py    # from the repository's root folder; takes 4 minutes and needs all that `make` installs
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

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

    # the table of 24 positions has the shape of a block's activations
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim > 1 and p.shape[0] > 24}
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
OF_PHASES = """

def _resident():
    # without the pages of mapped files: the system takes those back when it needs room
    lines = open("/proc/self/status").read().split("RssAnon:")
    return int(lines[1].split()[0]) * 1024


class _Peak:
    def __enter__(self):
        import threading

        self.peak, self._is_over = _resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()


_counts = {}


def _measured(function, phase):
    def call(*arguments, **options):
        if phase == "building":
            global _at_start
            _at_start = _resident()
        began_at = time.monotonic()
        with _Peak() as measured:
            result = function(*arguments, **options)
        seconds = time.monotonic() - began_at
        _counts[phase] = _counts.get(phase, 0) + 1
        shown = phase if phase != "save" else "first save" if _counts[phase] == 1 else "later save"
        print(f"phase {shown}: {measured.peak - _at_start} bytes {seconds:.3f} s", flush=True)
        return result

    return call


Trainer.__init__ = _measured(Trainer.__init__, "building")
Trainer.resume = _measured(Trainer.resume, "resume")
Trainer.train_step = _measured(Trainer.train_step, "step")
Trainer.save = _measured(Trainer.save, "save")
Trainer.evaluate = _measured(Trainer.evaluate, "evaluation")
Trainer.finish = _measured(Trainer.finish, "end of the run")
Checkpoints._complete = _measured(Checkpoints._complete, "whole after")
"""


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


PHASES = ("building", "step", "first save", "later save", "evaluation", "end of the run", "resume")
SAVING = {
    "ddp": "strategy=ddp",
    "fsdp": "strategy=fsdp",
    "fsdp, sharded": "strategy=fsdp checkpoint.sharded=true",
}


def measure_phases(project: Path) -> tuple[float, list[str], list[str]]:
    """Return the weights' size in MB, a row for each phase, and a row for each of SAVING.

    A phase's row has the peak of each rank, in multiples of the weights' size; a row of SAVING has seconds.
    """
    trainer = project / "ddp_experiment" / "trainer.py"
    trainer.write_text(trainer.read_text(encoding="utf-8") + OF_PHASES, encoding="utf-8")
    size = ["model.hidden_size=512", "model.num_layers=9", "training.precision=fp32"]
    others = [*COMMON, "checkpoint.every_steps=4", "evaluation.every_steps=8"]
    peaks: dict[tuple[str, str, int], float] = {}
    times: dict[tuple[str, str], list[float]] = {}
    num_bytes = 0
    for way, options in SAVING.items():
        name = way.replace(", ", "-")
        words = [*size, *others, *options.split(), f"name={name}"]
        for number_of_steps in (11, 12):  # the second run goes on
            logs = run(project, *words, f"training.max_steps={number_of_steps}")
        num_bytes = (project / f"runs/{name}/model.safetensors").stat().st_size
        for rank, log in enumerate(logs):
            for phase, value, seconds in re.findall(r"phase (.+): (-?\d+) bytes (\S+) s", log):
                key = phase, way, rank
                peaks[key] = max(peaks.get(key, 0.0), int(value) / num_bytes)
                if rank == 0:
                    times.setdefault((phase, way), []).append(float(seconds))
    places = [(way, rank) for way in SAVING for rank in (0, 1)]
    rows = []
    for phase in PHASES:
        values = " | ".join(f"{peaks[phase, *place]:.2f}" for place in places)
        rows.append(f"| {phase} | {values} |")
        print(rows[-1], flush=True)
    of_saving = []
    for way in SAVING:
        columns = [median(times[phase, way]) for phase in ("step", "first save", "later save")]
        whole = median(times["whole after", way]) if ("whole after", way) in times else columns[2]
        values = " | ".join(f"{seconds:.2f}" for seconds in [*columns, whole])
        of_saving.append(f"| {way} | {values} |")
        print(of_saving[-1], flush=True)
    return num_bytes / 1e6, rows, of_saving


def main() -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        template = baking.export_template(Path(folder) / "template")
        project = baking.bake(template, Path(folder), example="gpt")
        steps = measure_steps(project)
        size, phases, saving = measure_phases(project)
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

## In each phase of a run

Nine layers, 512 wide, fp32, AdamW: weights of {size:.0f} MB. Counted: the peak of each rank's memory in that phase, above what it held before it built the model, in
multiples of the weights' size; without the pages of mapped files, which the system takes back when it needs room. On CPU ranks: with GPUs, what a rank
holds at rest and in a step is in the GPU's memory. A checkpoint holds 3 (weights and AdamW's two averages). `resume` is of a run that goes on.

| | ddp, rank 0 | ddp, rank 1 | fsdp, rank 0 | fsdp, rank 1 | sharded, rank 0 | sharded, rank 1 |
|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(phases)}

## How long a save blocks

The same model, a save after every fourth step; seconds, medians of rank 0. With `checkpoint.sharded` a save returns once each rank has copied its part;
a thread writes it, beside the next steps. The first save of a process reads the file back. `whole after` is the time until the checkpoint has its name.

| | a step | the first save blocks | a later one | whole after |
|---|---:|---:|---:|---:|
{chr(10).join(saving)}

Measured on {date.today()}, Python {platform.python_version()}, torch {torch.__version__}, two cores.
"""  # noqa: E501
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

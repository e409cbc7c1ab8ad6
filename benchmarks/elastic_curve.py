"""Trains a run that nodes join and leave, beside one that nobody disturbs. Draws docs/elastic.png.

python benchmarks/elastic_curve.py    # from the repository's root folder; four minutes on two cores

The nodes are copies of scripts/multi_node.sh on this machine, with one CPU rank each. The script needs matplotlib and
all that `make` installs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import baking  # noqa: E402

PICTURE = ROOT / "docs" / "elastic.png"
NUM_STEPS = 400
WORDS = f"""
    device_ids=cpu training.max_steps={NUM_STEPS} training.epochs=null training.global_batch_size=12
    checkpoint.every_steps=25 evaluation.every_steps=null logging.every_steps=5 model.dropout=0
    schedule.warmup_steps=0 logging.tracker=none
""".split()
# torchrun need not wait for a slow network here
QUICK = [
    "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
    "--monitor-interval=0.5",
]
EVENTS = ((60, "joins"), (130, "joins"), (200, "is killed"), (280, "joins"), (330, "is killed"))
"""From which step on a node joins, or the oldest of those that have joined is killed with SIGKILL."""


def start_node(project: Path) -> subprocess.Popen[bytes]:
    meeting = {"NNODES": "1:3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29671"}
    environment = baking.plain_environment({"PYTHON": sys.executable, **meeting})
    return subprocess.Popen(
        ["scripts/multi_node.sh", *QUICK, *WORDS, "name=elastic"],
        cwd=project,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_node(node: subprocess.Popen[bytes]) -> None:
    """End all processes of a node at once, as a power failure does."""
    found = [node.pid]
    for pid in found:  # it grows: torchrun's ranks lead sessions of their own
        children = subprocess.run(
            ["pgrep", "-P", str(pid)], capture_output=True, check=False, text=True
        )
        found += map(int, children.stdout.split())
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    node.wait()


def lines(project: Path, name: str) -> list[dict[str, Any]]:
    path = project / "runs" / name / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def train(project: Path) -> None:
    first, others = start_node(project), list[subprocess.Popen[bytes]]()
    for step, event in EVENTS:
        while not any(line["step"] >= step for line in lines(project, "elastic")):
            assert first.poll() is None
            time.sleep(0.2)
        print(f"step {step}: a node {event}", flush=True)
        if event == "joins":
            others.append(start_node(project))
        else:
            end_node(others.pop(0))
    assert first.wait() == 0
    for node in others:
        node.wait()


def ranks_by_step(project: Path) -> list[tuple[int, int]]:
    """Return (step after which the run was started, number of its ranks) for each start."""
    text = (project / "runs" / "elastic" / "logs" / "rank_0.log").read_text(encoding="utf-8")
    found, step = list[tuple[int, int]](), 0
    for line in text.splitlines():
        if match := re.search(r"resuming after step (\d+)", line):
            step = int(match[1])
        if match := re.search(r": world_size (\d+),", line):
            found.append((step, int(match[1])))
    return found


def draw(
    elastic: list[dict[str, Any]], alone: list[dict[str, Any]], starts: list[tuple[int, int]]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, sharex=True, figsize=(8, 5), dpi=100, height_ratios=(3, 1)
    )
    for run, name, style in (
        (alone, "undisturbed, one rank", {"color": "black", "linewidth": 5, "alpha": 0.25}),
        (elastic, "nodes join and leave", {"color": "tab:blue", "linewidth": 1.2}),
    ):
        upper.plot(
            [line["step"] for line in run], [line["loss"] for line in run], label=name, **style
        )
    upper.set(ylabel="training loss")
    upper.legend(frameon=False)
    steps = [step for step, _ in starts] + [NUM_STEPS]
    numbers = [number for _, number in starts]
    lower.step(steps, [*numbers, numbers[-1]], where="post", color="tab:orange")
    lower.set(xlabel="step", ylabel="ranks", yticks=(1, 2, 3), ylim=(0, 3.5))
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        template = baking.export_template(Path(folder) / "template")
        project = baking.bake(template, Path(folder), example="gpt", size="small")
        train(project)
        command = [sys.executable, "run.py", *WORDS, "name=alone"]
        subprocess.run(
            command,
            check=True,
            cwd=project,
            env=baking.plain_environment(),
            stdout=subprocess.DEVNULL,
        )
        elastic, alone = lines(project, "elastic"), lines(project, "alone")
        starts = ranks_by_step(project)
    assert [line["step"] for line in elastic] == [line["step"] for line in alone]
    largest = max(abs(a["loss"] - b["loss"]) for a, b in zip(elastic, alone, strict=True))
    early = max(
        abs(a["loss"] - b["loss"]) for a, b in zip(elastic, alone, strict=True) if a["step"] <= 200
    )
    print(f"starts after step, ranks: {starts}")
    print(f"largest difference of a loss: {early:.1e} in 200 steps, {largest:.1e} in {NUM_STEPS}")
    draw(elastic, alone, starts)


if __name__ == "__main__":
    main()

"""The smoke test passes on a project that works and fails on one that does not resume."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from template_package.commands.smoke import loose_parts

from conftest import Project, clean_environment


def test_what_pytorch_finds_is_no_loose_part() -> None:
    model: Any = nn.Sequential(nn.LSTM(2, 3, num_layers=2), nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2))
    model.known = [model[0], model[1].running_mean, {"weight": model[1].weight}, "text", 3]
    model.listed = nn.ModuleList([nn.Linear(1, 1)])
    model.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(1))})
    assert list(loose_parts(model)) == []


def test_tensors_and_modules_that_pytorch_does_not_find_are_named() -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1))
    model[0]._mask = torch.ones(1)
    model.tables = {"a": [{"b": (torch.ones(1),)}]}
    model.tables["itself"] = model.tables
    model.heads = [nn.Linear(1, 1), {"more": nn.Dropout()}, nn.Linear(1, 1)]
    model.both = {torch.ones(1), nn.ReLU()}
    tables, heads, *both, mask = loose_parts(model)
    assert tables.startswith("model.tables holds a tensor outside") and 'register_buffer("tables"' in tables
    assert heads.startswith("model.heads holds modules that the model does not know (Dropout, Linear)")
    assert "nn.ModuleList" in heads
    assert [words.partition(" outside")[0].partition(" that")[0] for words in both] == [
        "model.both holds a tensor", "model.both holds modules",
    ]  # fmt: skip
    assert mask.startswith("model.0._mask is a tensor outside parameters and buffers")


def test_smoke_passes_and_leaves_nothing(project: Project) -> None:
    # A tensor that model.to(device) would leave behind is named.
    project.edit("model.py", "    model.config, ", "    model.scale = torch.ones(2)\n    model.config, ")
    # Files are where `python run.py` finds them, and what a CPU cannot do is no fault of the project.
    start = "def build_datasets(config: DataConfig)"
    project.edit("dataset.py", start, 'print(open("folder/numbers.txt").read())\n\n\n' + start)
    (project.folder / "folder").mkdir()
    (project.folder / "folder" / "numbers.txt").write_text("1 2 3", encoding="utf-8")
    before = sorted(path.name for path in project.folder.iterdir())
    output = project.run(
        "smoke", "training.sync_batchnorm=true", "training.micro_batch_size=4", "ddp.gradient_compression=bf16"
    )
    assert output.splitlines()[-1].startswith("smoke test: PASSED (2 gloo ranks on CPU trained, saved step 2")
    assert "warning: model.scale is a tensor outside parameters and buffers" in output and "register_buffer" in output
    assert "evaluated 37 samples" in output
    assert sorted(path.name for path in project.folder.iterdir()) == before


def test_smoke_fails_when_resume_is_broken(project: Project) -> None:
    project.edit("training/trainer.py", "self.checkpoints)) is not None:", "self.checkpoints)) is False:")
    output = project.run("smoke", code=1)
    assert "smoke test: FAILED" in output and "trained steps that were done already" in output
    assert [path.name for path in (project.folder / ".smoke").iterdir()] == ["log.txt"]


def test_what_the_terminal_cannot_show_is_escaped_by_every_process(project: Project) -> None:
    project.edit("model.py", "    model: Any = nn", '    print("日本 …")\n    model: Any = nn')
    words = ("device_ids=cpu,cpu", "training.max_steps=1")
    with project.start(*words, PYTHONIOENCODING="ascii") as process:
        printed, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "\\u65e5\\u672c \\u2026\n" in printed
    assert "日本 …\n" in (project.directory("run") / "logs" / "rank_0.log").read_text(encoding="utf-8")


def test_a_run_whose_output_is_closed_trains(project: Project) -> None:
    words = ("run.py", "device_ids=cpu,cpu", "training.max_steps=1", "name=run")
    closed = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, *words]
    assert subprocess.run(closed, cwd=project.folder, env=clean_environment(), timeout=100, check=False).returncode == 0
    assert json.loads((project.directory("run") / "summary.json").read_text(encoding="utf-8"))["status"] == "complete"

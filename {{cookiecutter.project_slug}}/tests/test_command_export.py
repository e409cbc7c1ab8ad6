"""Tests the command `export` on a run of two CPU ranks. Delete this file with commands/export.py."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from conftest import Project


def test_export_holds_the_best_weights_in_16_bits(project: Project) -> None:
    project.run("device_ids=cpu,cpu", "training.max_steps=3")
    project.run("export", "bf16")
    whole = load_file(project.directory("run") / "model.safetensors")
    half = load_file(project.directory("run") / "export" / "bf16" / "model.safetensors")
    assert whole.keys() == half.keys()
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in whole)

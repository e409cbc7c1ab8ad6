"""The smoke test passes on a project that works and fails on one that does not resume."""

from __future__ import annotations

from conftest import Project


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
    project.edit("training/trainer.py", "if state is not None:", "if False:")
    output = project.run("smoke", code=1)
    assert "smoke test: FAILED" in output and "trained steps that were done already" in output
    assert [path.name for path in (project.folder / ".smoke").iterdir()] == ["log.txt"]

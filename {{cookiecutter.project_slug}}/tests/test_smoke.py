"""Tests that the smoke test passes in a working project, and fails in a project whose runs do not resume."""

from __future__ import annotations

from conftest import Project


def test_smoke_passes_and_leaves_nothing(project: Project) -> None:
    # Files are where `python run.py` finds them, and settings that a CPU does not have are no fault of the project.
    project.append("dataset.py", 'print(open("folder/numbers.txt").read())')
    (project.folder / "folder").mkdir()
    (project.folder / "folder" / "numbers.txt").write_text("1 2 3", encoding="utf-8")
    before = sorted(path.name for path in project.folder.iterdir())
    words = (
        "training.sync_batchnorm=true",
        "training.micro_batch_size=4",
        "ddp.gradient_compression=bf16",
    )
    output = project.run("smoke", *words)
    assert output.splitlines()[-1].startswith(
        "smoke test: PASSED (2 gloo ranks on CPU trained, saved step 2"
    )
    assert "evaluated 37 samples" in output
    assert sorted(path.name for path in project.folder.iterdir()) == before


def test_smoke_fails_when_resume_is_broken(project: Project) -> None:
    lost = "def load_state_dict(self, state):\n    Strategy.load_state_dict(self, state | {'optimizer': {}})\n\n\n"
    project.append("strategies/ddp.py", f"{lost}STRATEGY.load_state_dict = load_state_dict")
    output = project.run("smoke", code=1)
    assert "smoke test: FAILED" in output and "step 4: the resumed run's loss is" in output
    assert [path.name for path in (project.folder / ".smoke").iterdir()] == ["log.txt"]

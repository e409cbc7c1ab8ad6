"""Makes a small project that has the tests of the full one: the core is the same, and the trainer is another."""

from __future__ import annotations

import shutil
from pathlib import Path

from post_gen_project import take_small_files

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.project_slug}}"
ADDED_TO_CONFTEST = """

def run_in_small(self: Project, *words: str, **options: Any) -> str:
    own = (word for word in words if not word.startswith(ONLY_IN_FULL))
    return run_in_full(self, *own, **options)


ONLY_IN_FULL = ("training.ema_decay=", "training.check_replicas_every_steps=")
run_in_full, Project.run = Project.run, run_in_small
Project.run_many = lambda self, cases: [self.run(f"name={name}", *cases[name]) for name in cases]
"""


def make_small_project(folder: Path) -> Path:
    """Make the project in `folder`, which must not exist. It needs no cookiecutter. Return the folder.

    Tests that use a key or a file of size=full fail there.
    """
    no_caches = shutil.ignore_patterns("__pycache__", ".*_cache")
    shutil.copytree(PROJECT, folder, ignore=no_caches)
    take_small_files(folder)
    shutil.rmtree(folder / "tests")
    shutil.copytree(PROJECT / "tests", folder / "tests", ignore=no_caches)
    conftest = folder / "tests" / "conftest.py"
    text = conftest.read_text(encoding="utf-8")
    assert ", report: false}" in text  # a key of size=full
    conftest.write_text(text.replace(", report: false}", "}") + ADDED_TO_CONFTEST, encoding="utf-8")
    return folder

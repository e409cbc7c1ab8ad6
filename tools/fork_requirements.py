"""Prints what `make test-fork` installs: its tools, and what projects with the first answer to `tracker` need.

`cookiecutter.json` and both pyproject.toml files say which; constraints.txt pins the versions.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def requirements(root: Path) -> list[str]:
    """Return the tools of the group `fork`, and the project's dependencies and tools except those of other trackers."""
    tools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    questions = json.loads((root / "cookiecutter.json").read_text(encoding="utf-8"))
    path = root / "{{cookiecutter.project_slug}}" / "pyproject.toml"
    lines = path.read_text(encoding="utf-8").splitlines()
    others = tuple(f"# only with tracker={name}" for name in questions["tracker"][1:])
    project = tomllib.loads("\n".join(line for line in lines if not line.endswith(others)))[
        "project"
    ]
    listed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    # the lowest versions are those of the template's own tools
    return sorted(set(listed + tools["dependency-groups"]["fork"]))


if __name__ == "__main__":
    print("\n".join(requirements(ROOT)))

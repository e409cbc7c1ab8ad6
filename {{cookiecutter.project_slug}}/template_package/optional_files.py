"""Finds which files of a folder this project has: strategies, trackers, commands and extras may be deleted.

This file imports neither torch nor the user's files, because the process that starts the ranks imports neither.
"""

from pathlib import Path

SHARED_PARTS = {"base", "common", "library_environment", "zero"}  # of strategies/ and commands/


def available_files(folder: str) -> list[str]:
    """Return the names of the modules in a folder of this package, except for SHARED_PARTS."""
    paths = (Path(__file__).parent / folder).glob("[a-z]*")
    names = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(names - SHARED_PARTS)

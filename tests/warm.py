"""Runs commands of generated projects in processes that are forked from one that has already imported torch.

A start imports torch and torchmetrics for seconds in each rank. Tests whose subject is no start save them here.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from baking import PROJECT, ROOT

TESTS = ROOT / PROJECT / "tests"


@cache
def project_tests() -> ModuleType:
    """Return conftest.py of the generated project's tests as a module, for its helpers."""
    path = TESTS / "conftest.py"
    spec = importlib.util.spec_from_file_location("project_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    variables = dict(os.environ)
    spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(variables)  # it sets some for the project's own tests
    return module


@cache
def _session() -> Any:
    handle, path = tempfile.mkstemp()
    os.close(handle)
    session = project_tests().Session(TESTS / "workload", Path(path))
    atexit.register(os.unlink, path)
    atexit.register(session.close)
    return session


def run_warm(project: Path, *words: str, **variables: str) -> tuple[int | None, str]:
    """Do what `python run.py WORDS` would do in the project. Return the exit code and the output.

    The code is None if the command has not ended in two minutes. No policy is asked, unless `variables` say so.
    """
    own = {"DDP_POLICY": "off", "DDP_CONFIG": "", **variables}
    code, printed = _session().run(project, "run", list(words), **own)
    return code, printed

"""The house's rules: imports run one way, files and functions stay small, the trainer knows no strategy."""

from __future__ import annotations

import ast
from pathlib import Path

from conftest import PACKAGE, ROOT

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
LAYERS = [  # each may import what stands below it
    "commands",
    "benchmarking",
    "doctor",
    "launching.launcher",
    "training",
    "strategies",
    "launching.ranks",
    "launching.nodes",
    "launching.meeting",
    "launching.devices",
    "launching.gpu_locks",
    "launching.gpus",
    "launching.network",
    "launching.distributed",
    "launching.processes",
    "launching.starting",
    "launching.environment",
    "config",
    "config_rules",
    "config_loading",
    "config_values",
    "model",
    "dataset",
    "text_files",  # of the text example
    "validation",
]


def layer(module: str) -> int:
    return max((i for i, name in enumerate(LAYERS) if module == name or module.startswith(name + ".")), default=-1)


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, without the package's name."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {".".join((*base, name)) for name in names}
    return found


def test_imports_run_one_way() -> None:
    num_edges = 0
    for path in FILES:
        own = ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for imported in imports(path):
            same_folder = own.split(".")[0] == imported.split(".")[0] != "launching"
            assert same_folder or layer(own) < layer(imported), f"{own} imports {imported}"
            num_edges += 1
    assert num_edges > 60
    assert imports(ROOT / PACKAGE / "model.py") <= {"dataset", "validation"}
    assert imports(ROOT / PACKAGE / "dataset.py") <= {"text_files", "validation"}


def test_trainer_knows_no_strategy() -> None:
    names = {path.stem for path in (ROOT / PACKAGE / "strategies").glob("[a-z]*.py")} | {"fsdp", "deepspeed", "horovod"}
    for path in (ROOT / PACKAGE / "training").glob("*.py"):
        words = {
            node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)
        }
        constants = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not (words | constants) & (names - {"base"}) - {"accelerate", "deepspeed", "horovod"}, path.name
        assert "isinstance(self.strategy" not in path.read_text(encoding="utf-8")


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 220, f"{path.name} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                assert node.end_lineno - node.lineno < 45, f"{path.name}: {node.name}"
    assert len(FILES) > 20

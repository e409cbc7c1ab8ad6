"""Tests of the package's structure: imports run one way, and the trainer does not know which strategy it uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "template_package"
MAX_MODULES_OF_TRAINER = 24

MAY_IMPORT = {
    "run": "commands extras optional_files trainer launchers core config files errors",
    "commands": "trainer training core optional_files files errors",
    "trainer": "training strategies data core config files errors",
    "training": "strategies data core config files errors",
    "strategies": "core config options_deepspeed errors",
    "tracking": "files errors",
    "data": "core config optional_files errors",
    "launchers": "core.launch core.ranks core.settings errors",
    "horovodrun": "launchers core.settings",
    "files": "errors",
    "config": "core optional_files errors",
    "optional_files": "",
    "core": "model dataset files errors",
    "extras": "core config data errors",
    "model": "dataset lab core.global_batch errors",
    "dataset": "model lab errors",
    "lab": "errors",  # a fork's own module
    "options": "errors",  # options_<name>.py: sections of config.yaml, which config.py finds by their files
    "errors": "",
    "__init__": "",
}
"""For each part of the package, the other parts or modules that it may import."""
NOT_STRATEGIES = {"__init__", "base", "library_environment"}


def package_files() -> list[Path]:
    return [ROOT / "run.py", *sorted(PACKAGE.rglob("*.py"))]


def name_of(path: Path) -> str:
    """Return the name of a file's module without the package's name, such as `training.checkpoint` or `run`."""
    parts = (
        path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).with_suffix("").parts
    )
    return ".".join(parts).removesuffix(".__init__")


def imports_of(source: str, path: Path) -> set[str]:
    """Return the project modules that `source`, as the file `path`, imports. `?…` marks an unresolvable import."""
    folder = path.relative_to(PACKAGE).parent.parts if path.is_relative_to(PACKAGE) else ()
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = (*folder[: len(folder) - node.level + 1], *module)
            elif module[:1] == (PACKAGE.name,):
                base = module[1:]
            else:
                continue
            for alias in node.names:
                parts = (*base, alias.name)
                is_module = (PACKAGE.joinpath(*parts)).is_dir() or PACKAGE.joinpath(
                    *parts
                ).with_suffix(".py").exists()
                found.add(".".join(parts if is_module else base))
        elif isinstance(node, ast.Import):
            found |= {
                f"?{alias.name}" for alias in node.names if alias.name.split(".")[0] == PACKAGE.name
            }
        elif isinstance(node, ast.Call) and "import_module" in (
            ast.unparse(node.func),
            getattr(node.func, "attr", ""),
        ):
            text = ast.unparse(node)
            is_in_own_folder = (
                re.match(r"""[a-z.]*import_module\(f?["']\.[^.]""", text) and "__package__" in text
            )
            # import_module("torch"), with one argument, is not ours
            if not is_in_own_folder and len(node.args) > 1:
                found.add(f"?{text}")
    return found


def forbidden_imports(source: str, path: Path) -> list[str]:
    """Return the imports of `source` that MAY_IMPORT does not allow."""
    own = name_of(path)
    part = re.sub("^options_.*", "options", own.partition(".")[0])
    assert part in MAY_IMPORT, f"{own}: MAY_IMPORT does not say what it may import"
    allowed = {*MAY_IMPORT[part].split(), part}
    return [
        f"{own} imports {name}"
        for name in sorted(imports_of(source, path))
        if not any(name == other or name.startswith(f"{other}.") for other in allowed)
    ]


def strategy_names() -> set[str]:
    return {path.stem for path in (PACKAGE / "strategies").glob("*.py")} - NOT_STRATEGIES


def mentions_of_strategies(source: str) -> list[str]:
    """Return the names and strings in `source` that contain the name of a strategy."""
    words = []
    for node in ast.walk(ast.parse(source)):
        words += (
            [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        )
        # Name.id, Attribute.attr, arg.arg, keyword.arg, alias.name and .asname, FunctionDef.name, ImportFrom.module …
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            words += [word] if isinstance(word := getattr(node, field, None), str) else []
    pattern = "|".join(name.replace("_", "_?") for name in sorted(strategy_names()))
    return [word for word in words if re.search(pattern, word, re.IGNORECASE)]


def conditions_on_strategies(source: str) -> list[str]:
    """Return the conditions in `source` that test config.strategy or the type of the strategy object."""
    return [
        ast.unparse(condition)
        for condition in _conditions(ast.parse(source))
        if re.search(
            r"config\.strategy|(isinstance|issubclass|type|hasattr)\([\w.]*strategy\b",
            ast.unparse(condition),
        )
    ]


def _conditions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Compare | ast.BoolOp):
            yield node
        elif isinstance(node, ast.Subscript):  # {"ddp": …}[config.strategy] decides as an `if` does
            yield node.slice


def test_imports_run_one_way() -> None:
    num_edges = 0
    for path in package_files():
        source = path.read_text(encoding="utf-8")
        assert forbidden_imports(source, path) == []
        num_edges += len(imports_of(source, path))
    assert num_edges > 120
    # they take the place of model.py and dataset.py
    for path in sorted((ROOT / "examples").glob("*/*.py")):
        if path.name in ("model.py", "dataset.py"):
            helpers = {other.stem for other in path.parent.glob("*.py")}
            found = imports_of(path.read_text(encoding="utf-8"), PACKAGE / path.name)
            assert found <= {"model", "dataset", "errors", "core.global_batch", *helpers}, path


def test_only_one_file_imports_the_users_functions() -> None:
    """core/config.py imports the two config classes. model.py and dataset.py may import each other."""
    importers: dict[str, set[str]] = {}
    for path in package_files():
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            and imports_of(ast.unparse(node), path) & {"model", "dataset"}
            for alias in node.names
        }
        if names and name_of(path) not in ("model", "dataset"):
            importers[name_of(path)] = names
    assert importers == {
        "core.task": {"model", "dataset"},
        "core.config": {"ModelConfig", "DataConfig"},
    }


def test_trainer_imports_few_modules() -> None:
    modules = imports_of(
        (PACKAGE / "trainer.py").read_text(encoding="utf-8"), PACKAGE / "trainer.py"
    )
    assert 10 < len(modules) <= MAX_MODULES_OF_TRAINER, sorted(modules)


def test_trainer_knows_no_strategy() -> None:
    assert {
        "ddp",
        "data_parallel",
        "fsdp",
        "accelerate",
        "deepspeed",
        "horovod",
    } == strategy_names()
    trainer = (PACKAGE / "trainer.py").read_text(encoding="utf-8")
    assert mentions_of_strategies(trainer) == []
    paths = [PACKAGE / "trainer.py", *(PACKAGE / "training").glob("*.py")]
    assert [conditions_on_strategies(path.read_text(encoding="utf-8")) for path in paths] == [
        []
    ] * len(paths)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/data.py", "from ..training.checkpoint import write_whole"),
        ("core/data.py", "from .. import trainer"),
        ("tracking/__init__.py", "def f():\n    from ..strategies.base import Strategy"),
        ("strategies/ddp.py", "from .. import launchers"),
        ("training/checkpoint.py", "from ..commands import evaluate"),
        ("core/launch.py", "from ..trainer import Trainer"),
        ("core/launch.py", "import_module('..trainer', __package__)"),
        ("launchers.py", "from .trainer import Trainer"),
        ("config.py", "from template_package.training.progress import Progress"),
        ("model.py", "from .training import progress"),
        ("dataset.py", "import template_package.config"),
        ("errors.py", "from .config import Config"),
        ("core/data.py", "from ..extras import stream"),
        ("training/hooks.py", "from .. import model"),
        ("config.py", "from .extras.other_words import suggest"),
        ("trainer.py", "from .extras import other_words"),
        ("extras/other_words.py", "from ..commands import evaluate"),
        ("options_benchmark.py", "from .config import Config"),
    ],
)
def test_import_against_the_direction_is_found(file: str, source: str) -> None:
    assert len(forbidden_imports(source, PACKAGE / file)) == 1


@pytest.mark.parametrize(
    "name",
    ["fsdp", "fsdp_model", "'fsdp'", "'strategies/fsdp.py'", "x.is_fsdp", "DDP_SIZE", "f(ddp=1)"],
)
def test_name_of_a_strategy_is_found(name: str) -> None:
    assert len(mentions_of_strategies(f"y = {name}")) == 1
    assert mentions_of_strategies("import ddp") and mentions_of_strategies(
        "def horovod_step(): ..."
    )


@pytest.mark.parametrize(
    "source",
    [
        "if self.config.strategy == other: pass",
        "x = 1 if isinstance(self.strategy, base.Strategy) else 2",
        "match config.strategy:\n    case 1: pass",
        "x = [1 for _ in y if type(strategy) is Strategy]",
        "x = is_on and config.strategy in z",
        "x = {'a': 1}[config.strategy]",
    ],
)
def test_condition_on_a_strategy_is_found(source: str) -> None:
    assert conditions_on_strategies(source)

"""Tests of `make size`: what counts as a token, which names are private ones of libraries, what SIGTERM passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import size

from baking import ROOT


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("# a comment\n\n", []),
        ("x = 1  # a comment\n", [1, 1, 1]),
        ('"""A docstring\nof two lines."""\n', [1]),
        ("if x:\n    y = (\n        2\n    )\n", [1, 1, 1, 2, 2, 2, 3, 4]),
        ("f''\n", [1]),
        ("f'{a + 1:>{width}}' 'b' rf'{c!r}'\n", [1, 1, 1]),
        ("f\"{f'{a}' + b}\" + c\n", [1, 1, 1]),
        ('x = f"""{\na}\n"""\ny\n', [1, 1, 1, 4]),
    ],
)
def test_tokens_are_the_same_under_every_python(
    tmp_path: Path, source: str, lines: list[int]
) -> None:
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert size.token_lines(tmp_path / "a.py") == lines


def test_private_names_are_those_of_libraries(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch._dynamo\n"
        "from torch.utils._pytree import tree_map\n"
        "from torch.nn.modules.batchnorm import _NormBase\n"
        "from ._own import _helper\n"
        "def _function(_argument): ...\n"
        "class _Class:\n"
        "    _field: int = 0\n"
        "    def __init__(self, model):\n"
        "        self._model = model\n"
        "        self._model._reducer._rebuild(self._field, a._function, a._argument, a._Class)\n"
        "        model._changed = vars(model)['_model'], 'a _word', model.__dict__\n"
        "        os._exit(2) or item._replace(b=3) or getattr(model, '_hidden')\n"
        "for _, _loop in model: print(_loop)\n",
        encoding="utf-8",
    )
    (tmp_path / "b.py").write_text(
        "from .a import _Class\n_Class(0)._field\nx._reducer\n", encoding="utf-8"
    )
    assert size.private_names(tmp_path, ["a.py", "b.py"]) == {
        "_dynamo": ["a.py:1"],
        "_pytree": ["a.py:2"],
        "_NormBase": ["a.py:3"],
        "_rebuild": ["a.py:10"],
        "_reducer": ["a.py:10", "b.py:3"],
        "_changed": ["a.py:11"],
        "_model": ["a.py:11"],
        "_hidden": ["a.py:12"],
    }


def test_files_after_sigterm_are_those_of_command_and_ranks_outside_of_steps() -> None:
    log = """
        1 1 main before.py
        2 2 train_step trainer.py
        3 3 train_step trainer.py
        3 3 train_step trainer.py
        1 1 <SIGTERM> run.py
        2 2 next_step step.py
        2 4 watch thread.py
        3 3 save checkpoint.py
        4 4 read worker.py
        2 2 train_step trainer.py
        3 3 <lambda> lambda.py
        2 2 fit trainer.py
        1 1 launch launcher.py
    """
    calls = [size.Call(*line.split()) for line in log.split("\n") if line.strip()]
    assert size.files_after_sigterm(calls) == {
        "thread.py",
        "checkpoint.py",
        "trainer.py",
        "launcher.py",
    }


def test_a_number_over_budget_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("x = 1\n", encoding="utf-8")
    assert size.print_files("row", tmp_path, ["a.py"], 1, 3, aim_tokens=2)
    assert "OVER" not in capsys.readouterr().out
    assert not size.print_files("row", tmp_path, ["a.py"], 1, 2)
    assert "3 of 2 tokens" in (text := capsys.readouterr().out)
    assert "OVER BUDGET" in text
    assert "3 a.py" in text
    assert not size.print_density("row", tmp_path, ["a.py"], 2.9)


def test_a_fork_over_budget_is_warned(capsys: pytest.CaptureFixture[str]) -> None:
    assert size.exit_code([True, False], []) == 1
    assert size.exit_code([True, True], ["--warn"]) == 0
    assert capsys.readouterr().out == ""
    assert size.exit_code([True, False], ["--warn"]) == 0
    assert capsys.readouterr().out.startswith("warning: ")


@pytest.mark.parametrize("readme", ["README.md", "README.ja.md", "README.zh-CN.md"])
def test_readme_names_the_budget(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("|") and "`make size`" in line]
    assert all(f"{tokens:,}" in row for tokens in size.MAX_TOKENS.values())

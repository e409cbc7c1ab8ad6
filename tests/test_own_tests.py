"""Tests that a new project passes its own tests, ruff and mypy, and still does after its owner's first changes."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_bake import named

from baking import CHOICES, EXAMPLES, bake, plain_environment
from post_gen_project import set_value

OTHER_ANSWERS = [
    {"device_ids": "0,2"},
    {"device_ids": "cpu,cpu", "license": "none", "furniture": "none"},
    *({key: value} for key in ("extra_strategies", "tracker") for value in CHOICES[key][1:]),
]
NAMES = [
    {"example": example, "package_name": name} for name in ("ab", "z" * 40) for example in EXAMPLES
]
"""Each example with a short and with the longest package name, because renaming changes the length of lines."""
ANSWERS = [answers | names for answers, names in zip(itertools.cycle(OTHER_ANSWERS), NAMES)]
"""Each of NAMES, joined with one of OTHER_ANSWERS, which are fewer. Together they contain all of both."""
SMALL = [
    names | {"size": "small"}
    for names in NAMES[: len(EXAMPLES) : 2] + NAMES[len(EXAMPLES) + 1 :: 2]
]
"""Each example with one of the two names."""
QUICK = [f"tests/test_{name}.py" for name in ("config", "model", "dataset")]
CHECKS = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy", "."])


def run_module(project: Path, *words: str, **variables: str) -> str:
    """Run `python -m WORDS` in the project, assert that the command succeeds, and return its output."""
    result = subprocess.run(
        [sys.executable, "-m", *words],
        check=False,
        cwd=project,
        env=plain_environment({"PYTHONDONTWRITEBYTECODE": "1", **variables}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert result.returncode == 0, f"{words}:\n{result.stdout}"
    return result.stdout


def num_passed(project: Path, *words: str) -> int:
    """Run the project's own tests, assert that all of them pass, and return their number."""
    found = re.search(
        r"(\d+) passed", run_module(project, "pytest", "-p", "no:cacheprovider", *words)
    )
    return int(found[1]) if found else 0


def test_every_example_comes_with_both_names() -> None:
    parts = NAMES + OTHER_ANSWERS
    assert all(any(part.items() <= answers.items() for answers in ANSWERS) for part in parts)
    assert sorted(answers["example"] for answers in SMALL) == sorted(EXAMPLES)
    assert len({answers["package_name"] for answers in SMALL}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("answers", ANSWERS, ids=named)
def test_own_tests_of_config_model_and_data_pass_for_every_answer(
    template: Path, tmp_path: Path, answers: dict[str, str]
) -> None:
    assert num_passed(bake(template, tmp_path, **answers), *QUICK) > 10


@pytest.mark.timeout(600)
def test_small_project_passes_its_own_tests(template: Path, tmp_path: Path) -> None:
    assert num_passed(bake(template, tmp_path, size="small")) > 10


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES[1:])
def test_small_project_passes_the_own_tests_that_see_the_example(
    template: Path, tmp_path: Path, example: str
) -> None:
    """Its other tests have a model and data of their own, in each example the same."""
    project = bake(template, tmp_path, example=example, size="small")
    others = [f"--ignore=tests/test_{name}.py" for name in ("training", "data")]
    assert num_passed(project, *others) > 5


@pytest.mark.fork
@pytest.mark.parametrize("size", CHOICES["size"])
@pytest.mark.parametrize("package_name", ["ab", "z" * 40])
def test_ruff_accepts_a_short_and_a_long_package_name(
    template: Path, tmp_path: Path, package_name: str, size: str
) -> None:
    project = bake(template, tmp_path, package_name=package_name, size=size)
    for words in CHECKS[:2]:
        run_module(project, *words)


@pytest.mark.slow
@pytest.mark.parametrize("answers", ANSWERS + SMALL, ids=named)
def test_ruff_and_mypy_accept_a_new_project(
    template: Path, tmp_path: Path, answers: dict[str, str], mypy_cache: str
) -> None:
    project = bake(template, tmp_path, **answers)
    for words in CHECKS:
        run_module(project, *words, MYPY_CACHE_DIR=mypy_cache)


# Written as many published models are: no annotations, unused imports, a lambda with a name, long lines, `l` as a name.
OWNERS_MODEL = """
import math, os
import inspect
import torch
import torch.nn as nn
from torch.nn import functional as F
import tiktoken_that_is_not_installed
new_gelu = lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))  # a long line

class BlockNUMBER(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(dict(c_fc = nn.Linear(config.n_embd, 4 * config.n_embd), c_proj = nn.Linear(4 * config.n_embd, config.n_embd)))

    def forward(self, x, l=None):
        if l == None: l = self.ln_1(x)
        return x + self.mlp.c_proj(new_gelu(self.mlp.c_fc(l)))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_own_tests_pass_after_an_owner_brings_a_model_edits_the_trainer_and_changes_the_config(
    template: Path, tmp_path: Path, mypy_cache: str
) -> None:
    """Of the project's own tests, run those that see what the owner has changed. `make test` runs the others."""
    project = bake(template, tmp_path)
    package, config = project / "ddp_experiment", project / "config.yaml"
    blocks = [OWNERS_MODEL.replace("NUMBER", str(number)) for number in range(20)]
    (package / "gpt.py").write_text("".join(blocks), encoding="utf-8")
    assert len("".join(blocks).splitlines()) > 350
    with (package / "model.py").open("a", encoding="utf-8") as model:
        model.write(
            "\n\ndef another_model(config):\n    from .gpt import Block7\n    return Block7(config)\n"
        )
    with (package / "trainer.py").open("a", encoding="utf-8") as trainer:
        trainer.write("\nimport time\n\nSTARTED_AT = time.time()\n")
    text = config.read_text(encoding="utf-8")
    changes = {
        "schedule.warmup_steps": "10",
        "training.epochs": "3",
        "optimizer.learning_rate": "1e-4",
    }
    for key, value in changes.items():
        text = set_value(text, key, value)
    config.write_text(text, encoding="utf-8")
    run_module(project, "ruff", "check", ".")
    run_module(project, "mypy", ".", MYPY_CACHE_DIR=mypy_cache)
    others = ("tests/test_training.py", "tests/test_smoke.py")
    assert num_passed(project, *QUICK, *others) > 20

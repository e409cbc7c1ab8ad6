"""Tests of what a lab adds to its projects: a policy, a config for all, and knowing which version runs where."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_update import ANSWERS, commit, edit, update

from baking import PROJECT, ROOT, bake, plain_environment
from warm import run_warm

BOTH = ("small", pytest.param("full", marks=pytest.mark.slow))
POLICY = '''"""The lab's rules for new runs."""

import os
from typing import Any


def refuse(config: Any, num_devices: int) -> str | None:
    if config.checkpoint.keep_last is None or config.checkpoint.keep_last > 3:
        return "the lab keeps 3 checkpoints. Set checkpoint.keep_last=3, or ask Änne"
    if num_devices > 1 and os.environ["USER"] != "anne":
        return f"{num_devices} devices are for Änne"
    return None
'''
SHORT = ("training.max_steps=2", "logging.tracker=none", "training.global_batch_size=256")
DIFFERENCES = """
import sys
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path

import torch  # once, for all of them

for line in sys.stdin.read().splitlines():
    sys.path[0], module, path = line.split("\\t")
    for name in [name for name in sys.modules if name.startswith("template_package")]:
        del sys.modules[name]
    core, settings = (import_module(f"template_package.core.{name}") for name in ("config", "settings"))
    import_module("template_package.model").complete_config = None
    kind = import_module(f"template_package.{module}").Config
    config = core.build_config(settings.CommandLine(Path(path)), kind)
    written, defaults = core.values_of(core.to_dict(config), kind), core.values_of({}, kind)
    is_example = "/examples/" in path
    keys = [key for key in defaults if key.startswith(("data.", "model.")) or not is_example]
    print(len(keys), "keys")
    for key in keys:
        if written[key] != defaults[key] is not MISSING:
            print(f"{path}: {key} is {written[key]!r}, and {defaults[key]!r} in its dataclass")
"""


def run(project: Path, *words: str, code: int = 0, **variables: str) -> str:
    """Run run.py, which asks a policy unless `variables` says otherwise. Return its output."""
    ended, printed = run_warm(project, *words, **{"DDP_POLICY": "", "USER": "bob", **variables})
    assert ended == code, printed
    return printed


def run_by_torchrun(project: Path, *words: str, **variables: str) -> None:
    """Train on two ranks."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    subprocess.run(
        [*torchrun, "run.py", *words], cwd=project, check=True, env=plain_environment(variables)
    )


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def fork(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lab's fork: the template with a policy.py, as a repository."""
    fork = Path(shutil.copytree(template, tmp_path_factory.mktemp("fork") / "template"))
    (fork / PROJECT / "template_package" / "policy.py").write_text(POLICY, encoding="utf-8")
    commit(fork)
    return fork


def make(fork: Path, folder: Path, size: str) -> Path:
    return bake(fork, folder, example="stub", size=size, package_name="net", furniture="none")


@pytest.mark.parametrize("size", BOTH)
def test_policy_refuses_new_runs_in_its_own_words(fork: Path, tmp_path: Path, size: str) -> None:
    project = make(fork, tmp_path, size)
    assert (project / "net" / "policy.py").read_text(encoding="utf-8") == POLICY
    words = (*SHORT, "device_ids=cpu,cpu")
    line = "error: the lab keeps 3 checkpoints. Set checkpoint.keep_last=3, or ask Änne\n"
    assert run(project, *words, "checkpoint.keep_last=4", code=2) == line
    assert run(project, *words, code=2) == "error: 2 devices are for Änne\n"
    assert not [*project.glob("runs/*/checkpoints")], "nothing is trained"


@pytest.mark.slow
def test_policy_is_asked_of_new_runs_alone(fork: Path, tmp_path: Path) -> None:
    project, words = make(fork, tmp_path, "small"), (*SHORT, "device_ids=cpu,cpu")
    run(project, *words, USER="anne")
    assert read_json(project / "runs" / "baseline" / "summary.json")["num_devices"] == 2
    # the run goes on, although a new one of these values would be refused
    output = run(project, *words, "training.max_steps=3", "checkpoint.keep_last=9")
    assert "resuming after step 2 of 3" in output
    saved = "checkpoint.resume=runs/baseline/checkpoints/best.pt"
    more = ("name=other", "training.max_steps=9", "checkpoint.keep_last=9", saved)
    output = run(project, *words, *more, code=2)
    assert output.startswith("error: the lab keeps 3"), "a new run from another one's file"
    run(project, *words, "name=off", "checkpoint.keep_last=9", DDP_POLICY="off")
    run(project, "evaluate", "name=off", "device_ids=cpu,cpu")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def refuze(config, num_devices): ...", "has no attribute 'refuse'"),
        pytest.param("def refuse(config): ...", "takes 1 positional", marks=pytest.mark.slow),
        pytest.param(
            "def refuse(config, num_devices):\n    return config.keep_last > 3",
            "AttributeError",
            marks=pytest.mark.slow,
        ),
        ("def refuse(config num_devices): ...", "SyntaxError"),
        pytest.param("import labutils", "No module named 'labutils'", marks=pytest.mark.slow),
    ],
)
def test_policy_that_cannot_be_asked_is_one_line(
    fork: Path, tmp_path: Path, text: str, problem: str
) -> None:
    project = make(fork, tmp_path, "small")
    (project / "net" / "policy.py").write_text(text, encoding="utf-8")
    output = run(project, *SHORT, "device_ids=cpu", code=2)
    assert output.startswith("error: policy.py: refuse(config, num_devices) fails (")
    assert problem in output and output.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "full"])
def test_smoke_and_the_projects_own_tests_ask_no_policy(
    fork: Path, tmp_path: Path, size: str
) -> None:
    project = make(fork, tmp_path, size)
    text = "def refuse(config, num_devices):\n    return 'nothing may run'\n"
    (project / "net" / "policy.py").write_text(text, encoding="utf-8")
    assert run(project, *SHORT, "device_ids=cpu", code=2) == "error: nothing may run\n"
    if size == "small":  # the command is the same file in both
        assert "smoke test: PASSED" in run(project, "smoke")
    own = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/test_training.py",
            "-k",
            "failure_of_one_rank or summary",
        ],
        cwd=project,
        check=False,
        capture_output=True,
        text=True,
        env=plain_environment({"DDP_POLICY": "", "DDP_CONFIG": "/nowhere/lab.yaml"}),
    )
    assert own.returncode == 0 and " passed" in own.stdout, own.stdout


@pytest.mark.parametrize("size", BOTH)
def test_config_of_the_lab_holds_where_no_other_file_sets_the_key(
    template: Path, tmp_path: Path, size: str
) -> None:
    project, lab, mine = make(template, tmp_path, size), tmp_path / "lab.yaml", tmp_path / "a.yaml"
    text = "device_ids: [cpu, cpu]\noptimizer: {learning_rate: 0.5, weight_decay: 0.25}\n"
    lab.write_text(f"{text}logging: {{tracker: none}}\n", encoding="utf-8")
    mine.write_text(
        "training: {max_steps: 2}\noptimizer: {weight_decay: 0.125}\n"
        "evaluation: {metric: loss, mode: min}\n",
        encoding="utf-8",
    )

    def stored(name: str) -> Any:
        text = (project / "runs" / name / "config.yaml").read_text(encoding="utf-8")
        return yaml.safe_load(text)

    run(project, f"--config={mine}", "name=mine", DDP_CONFIG=str(lab))
    values = stored("mine")
    assert values["optimizer"]["learning_rate"] == 0.5, "the lab's, over the dataclass"
    assert values["optimizer"]["weight_decay"] == 0.125, "the other file's, over the lab's"
    assert values["device_ids"] == ["cpu", "cpu"] and values["logging"]["tracker"] == ["none"]
    logs = [*(project / "runs" / "mine" / "logs").glob("rank_*.log")]
    assert len(logs) == 2 and "resuming" not in logs[0].read_text(encoding="utf-8")
    if size == "small":
        return  # the rest is in core, too, and takes a while
    # config.yaml names each key, so the lab's file says nothing there …
    run(project, *SHORT, "device_ids=cpu", "name=all", DDP_CONFIG=str(lab))
    assert stored("all")["optimizer"]["learning_rate"] == 3e-3
    # … but for a line that is deleted
    config = project / "config.yaml"
    kept = [
        line
        for line in config.read_text("utf-8").splitlines(True)
        if "learning_rate: 3" not in line
    ]
    config.write_text("".join(kept), encoding="utf-8")
    words = (*SHORT, "device_ids=cpu,cpu", "name=less")
    run_by_torchrun(project, *words, DDP_CONFIG=str(lab))
    assert stored("less")["optimizer"]["learning_rate"] == 0.5
    # a stored run is evaluated with its own values
    lab.write_text("model: {hidden_size: 7}\nloader: {num_workers: 1}\n", encoding="utf-8")
    edit(config, "  hidden_size: 64", "  # hidden_size: 64")
    run(project, "evaluate", "name=less", "device_ids=cpu", DDP_CONFIG=str(lab))


@pytest.mark.parametrize("size", ["small", "full"])
def test_mistake_in_the_labs_config_is_one_line_with_file_and_variable(
    template: Path, tmp_path: Path, size: str
) -> None:
    project, lab = make(template, tmp_path, size), tmp_path / "lab.yaml"
    named = f"DDP_CONFIG={lab}"
    output = run(project, code=2, DDP_CONFIG=str(lab))
    assert output.startswith(f"error: {named}: cannot be read (") and output.count("\n") == 1
    for text, start, end in (
        ("- a", f"{named}: holds no settings", "`key: value`."),
        ("seed: 1\nseed: 2", f"{named}: cannot be read (one of seed is set twice", "Correct it."),
        ("training: {epoch: 3}", "training.epoch=3: there is no such key.", f"{named} sets it."),
    ):
        lab.write_text(text, encoding="utf-8")
        output = run(project, code=2, DDP_CONFIG=str(lab))
        assert output.startswith(f"error: {start}") and output.endswith(f"{end}\n")
        assert output.count("\n") == 1
    # a mistake of somebody else's is not put down to the lab
    lab.write_text("training: {epochs: 3}", encoding="utf-8")
    assert "DDP_CONFIG" not in run(project, "training.epochs=x", code=2, DDP_CONFIG=str(lab))
    assert "DDP_CONFIG" not in run(project, "seed=x", code=2, DDP_CONFIG="")


@pytest.mark.fork
def test_config_yaml_and_the_dataclasses_agree_in_both_sizes_and_in_each_example(
    tmp_path: Path,
) -> None:
    """An example may set values of other sections than its own, data and model."""
    source = ROOT / PROJECT
    cases = [(source, "core.config", source / "small" / "config.yaml")]
    cases += [(source, "config", source / "config.yaml")]
    for config in (source / "examples").glob("*/config.yaml"):
        example = config.parent
        folder = tmp_path / example.name
        shutil.copytree(source / "template_package", folder / "template_package")
        for path in example.glob("*.py"):
            shutil.copy(path, folder / "template_package")
        cases.append((folder, "core.config", config))
    result = subprocess.run(
        [sys.executable, "-c", DIFFERENCES],
        input="\n".join("\t".join(map(str, case)) for case in cases),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=plain_environment(),
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    sizes = [line for line in lines if line.endswith(" keys")]
    assert len(sizes) == len(cases) and all(int(line.split()[0]) > 2 for line in sizes)
    differences = "\n".join(line for line in lines if line not in sizes)
    assert not differences, (
        f"{differences}\nWrite the same value into both: a line that is deleted, docs/reference/keys.md and the report "
        "go by the dataclass (core/config.py; config.py for size=full; model.py and dataset.py of an example)."
    )


@pytest.mark.parametrize("size", BOTH)
def test_run_and_doctor_tell_the_version_of_the_template(
    fork: Path, tmp_path: Path, size: str
) -> None:
    project = make(fork, tmp_path, size)
    origin = read_json(project / ".template.json")
    assert len(origin["commit"]) == 40
    wanted = {"url": None, "version": origin["version"], "commit": origin["commit"]}
    words = (*SHORT, "device_ids=cpu")

    def told() -> Any:
        name = f"run{len([*project.glob('runs/*')])}"
        run(project, *words, f"name={name}")
        return read_json(project / "runs" / name / "environment.json")["template"]

    assert told() == wanted
    if size == "full":
        report = (project / "runs" / "run0" / "report.html").read_text(encoding="utf-8")
        assert "template.commit" in report and origin["commit"] in report
        doctor = json.loads(
            run(project, "doctor", "--json", "device_ids=cpu").partition("\n}")[0] + "}"
        )
        assert doctor["template"] == wanted and doctor["host"] == platform.node()
        assert doctor["project"] == str(project)
    else:
        return  # what follows is in files.py, too
    cruft = {"template": "https://example.org/lab.git", "commit": "0" * 40, "checkout": None}
    (project / ".cruft.json").write_text(json.dumps(cruft), encoding="utf-8")
    (project / ".template.json").write_text("<<<<<<< ours\n", encoding="utf-8")
    assert told() == {"url": cruft["template"], "version": None, "commit": cruft["commit"]}
    for name in (".cruft.json", ".template.json"):
        (project / name).unlink()
    assert told() is None


def make_run(folder: Path, status: str | None, *, is_begun: bool = True) -> None:
    """Write what a run leaves that has this status, or that was killed (None)."""
    (folder / "checkpoints").mkdir(parents=True)
    if is_begun:
        (folder / "checkpoints" / "step_00000002.pt").touch()
    if status:
        (folder / "summary.json").write_text(json.dumps({"status": status}), encoding="utf-8")


@pytest.mark.parametrize("is_elsewhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_update_tells_unfinished_runs_before_it_changes_anything(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    repository = Path(shutil.copytree(template, tmp_path / "template"))
    commit(repository)
    project = bake(repository, tmp_path / "work", **ANSWERS)
    runs = project / "runs"
    if is_elsewhere:
        runs = tmp_path / "scratch"
        monkeypatch.setenv("DDP_RUNS_FOLDER", str(runs))
    edit(project / "config.yaml", "weight_decay: 0.01", "weight_decay: 0.02")  # the owner's
    commit(project)
    config = repository / PROJECT / "config.yaml"

    edit(config, "every_steps: 50 ", "every_steps: 20 ")
    commit(repository)
    make_run(runs / "done", "complete")
    make_run(runs / "refused at once", None, is_begun=False)
    code, output = update(project, str(repository))
    assert code == 0 and "unfinished" not in output, output
    commit(project)

    edit(config, "every_steps: 20 ", "every_steps: 25 ")  # decides nothing
    code_of_the_engine = repository / PROJECT / "template_package" / "trainer.py"
    edit(code_of_the_engine, "import math\n", "import math  # of the second version\n")
    commit(repository)
    for name, status in (("stopped", "stopped"), ("killed", None), ("sweep/trial_3", None)):
        make_run(runs / name, status)
    code, output = update(project, str(repository))
    begin = "unfinished runs (3): killed, stopped, sweep/trial_3\n"
    assert code == 0 and output.startswith(f"{begin}  The update changes no default"), output
    commit(project)

    # what no config holds, and a run that goes on would learn from
    edit(
        repository / PROJECT / "examples" / "stub" / "dataset.py",
        "import torch\n",
        "import torch  # new\n",
    )
    commit(repository)
    code, output = update(project, str(repository))
    assert code == 0, output
    assert output.startswith(f"{begin}  The update changes dataset.py. A run that goes on"), output
    commit(project)

    edit(config, "learning_rate: 3e-3 ", "learning_rate: 1e-3 ")
    edit(config, "name: cosine  ", "name: linear # new ")
    edit(config, "drop_last: false", "drop_last: true ")
    edit(config, "weight_decay: 0.01", "weight_decay: 0.05")
    commit(repository)
    code, output = update(project, str(repository))
    changes = "optimizer.learning_rate: 3e-3 -> 1e-3; schedule.name: cosine -> linear; "
    changes += "training.drop_last: false -> true."
    assert code == 1 and output.startswith(f"{begin}  The update changes {changes}"), output
    assert "weight_decay" not in output.partition("config.yaml")[0], "the owner's own value stays"


@pytest.mark.slow
def test_update_tells_what_the_trainer_will_refuse(template: Path, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(template, tmp_path / "template"))
    commit(repository)
    project = bake(repository, tmp_path / "work", **ANSWERS | {"tracker": "none"})
    commit(project)
    words = (*SHORT, "device_ids=cpu", "training.max_steps=4", "checkpoint.every_steps=2")
    run(project, *words)
    (project / "runs" / "baseline" / "summary.json").unlink()
    for path in (project / "runs" / "baseline" / "checkpoints").glob("*.pt"):
        if path.name != "step_00000002.pt":
            path.unlink()
    for old, new, code in (("patience: 3", "patience: 5", 0), ("seed: 42", "seed: 43", 2)):
        edit(repository / PROJECT / "config.yaml", old, new)
        path = repository / PROJECT / "template_package" / "config.py"
        if code == 0:
            edit(path, "default=3, metadata", "default=5, metadata")
        commit(repository)
        assert "unfinished runs (1): baseline\n" in update(project, str(repository))[1]
        commit(project)
        kept = shutil.copytree(project / "runs", tmp_path / f"runs{code}")
        output = run(project, *words, code=code, DDP_RUNS_FOLDER=str(kept))
        assert "resuming after step 2" in output if code == 0 else "seed: 42 -> 43" in output

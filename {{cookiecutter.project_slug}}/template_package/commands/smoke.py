"""`python run.py smoke`: tests that your model trains, saves, resumes and evaluates on two CPU ranks."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ..files import RUNS_FOLDER
from . import CommandLine

FOLDER = Path(".smoke")
SAVED_STEP, LAST_STEP = 2, 4
SMALL = f"""
    name=first device_ids=cpu,cpu strategy=ddp launch.nodes=1 launch.node_rank=0 launch.backend=gloo
    ddp.gradient_compression=none training.sync_batchnorm=false loader.num_workers=0
    training.epochs={LAST_STEP} training.max_steps={LAST_STEP} training.early_stopping_epochs=null
    evaluation.every_steps={SAVED_STEP} evaluation.every_epochs=null evaluation.split=validation
    evaluation.checkpoint=last checkpoint.every_steps={SAVED_STEP} checkpoint.every_epochs=null
    checkpoint.keep_last=null checkpoint.resume=auto logging.every_steps=1 logging.tracker=none
    logging.report=false logging.progress_bar=false logging.profile_steps=null
"""
# the resumed steps repeat the first run's; some CPU kernels do not add in a fixed order
RELATIVE_TOLERANCE = 1e-4


def main(line: CommandLine) -> int:
    line.load_config()  # a mistake in it is one line
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    try:
        configs = [f"--config={path}" for path in line.config_paths]
        num_samples = _train_resume_evaluate([*configs, *line.words, *SMALL.split()])
    except (AssertionError, subprocess.TimeoutExpired) as error:
        shutil.rmtree(FOLDER / "runs", ignore_errors=True)
        print(f"{error}\nsmoke test: FAILED ({FOLDER / 'log.txt'} has the whole output)")
        return 1
    shutil.rmtree(FOLDER)
    what = f"2 gloo ranks on CPU trained, saved step {SAVED_STEP}, went on from there, evaluated {num_samples} samples"
    print(f"smoke test: PASSED ({what})")
    return 0


def _train_resume_evaluate(settings: list[str]) -> int:
    """Run the smoke test and return the number of samples evaluated. Raise AssertionError if a run or a check fails."""
    first, second = FOLDER / "runs" / "first", FOLDER / "runs" / "second"
    _run("training on two ranks", settings)
    print(
        *re.findall("warning: .*\n", (first / "logs" / "rank_0.log").read_text(encoding="utf-8")),
        sep="",
        end="",
    )

    # The second run finds the checkpoint of a run that was killed after the saved step, and writes its own steps.
    shutil.copytree(
        first,
        second,
        ignore=shutil.ignore_patterns(f"step_*{LAST_STEP}.pt", "best.pt", "metrics.jsonl"),
    )
    _run("resuming from the checkpoint", [*settings, "name=second"])
    before, after = _losses(first), _losses(second)
    has_resumed = [*after] == [*range(SAVED_STEP + 1, LAST_STEP + 1)]
    _check(
        has_resumed,
        f"the second run did not resume after step {SAVED_STEP}: its losses are {after}",
    )
    for step, loss in after.items():
        is_equal = math.isclose(loss, before[step], rel_tol=RELATIVE_TOLERANCE)
        _check(
            is_equal,
            f"step {step}: the resumed run's loss is {loss}, the uninterrupted one's {before[step]}",
        )

    _run("evaluating", [*settings, "name=second"], command="evaluate")
    evaluation = json.loads((second / "evaluation.json").read_text(encoding="utf-8"))
    step = evaluation["step"]
    _check(step == LAST_STEP, f"the last checkpoint holds step {step}")
    return int(evaluation["num_samples"])


def _run(task: str, arguments: list[str], command: str = "train") -> None:
    """Run run.py with its output in .smoke/. If it fails, raise AssertionError with the last 20 lines of log.txt."""
    print(f"smoke test: {task} …", flush=True)
    script, hidden = Path(__file__).parents[2] / "run.py", ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        RUNS_FOLDER: str(FOLDER / "runs"),
    }
    log = FOLDER / "log.txt"
    with log.open("ab") as file:
        command_line = [sys.executable, str(script), command, *arguments]
        code = subprocess.call(command_line, env=environment, stdout=file, stderr=file, timeout=300)
    last_lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    _check(code == 0, "\n".join([f"{task}: exit code {code}", *last_lines]))


def _check(condition: bool, problem: str) -> None:
    # no `assert`, which PYTHONOPTIMIZE=1 would switch off
    if not condition:
        raise AssertionError(problem)


def _losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}

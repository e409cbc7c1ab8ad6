"""`python run.py smoke`: tests that your model trains, saves, resumes and evaluates on two CPU ranks.

Its second run begins after a step of the first, and must repeat it.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ..core.config import all_keys
from ..core.settings import SETTINGS, CommandLine
from ..files import RUNS_FOLDER

FOLDER = Path(".smoke")
LOG = FOLDER / "log.txt"
SHORT = """
    name=first device_ids=cpu,cpu strategy=ddp launch.backend=gloo loader.num_workers=0
    training.epochs=4 training.max_steps=4 evaluation.every_steps=2 evaluation.every_epochs=null
    evaluation.split=validation evaluation.checkpoint=last checkpoint.every_steps=2
    checkpoint.every_epochs=null checkpoint.keep_last=null checkpoint.resume=auto
    logging.every_steps=1 logging.tracker=none logging.progress_bar=false
    launch.nodes=1 launch.node_rank=0 ddp.gradient_compression=none training.sync_batchnorm=false
    training.early_stopping_epochs=null logging.report=false logging.profile_steps=null
    checkpoint.sharded=false
"""


def main(line: CommandLine) -> int:
    """Run the test with the settings of the line. Print PASSED, or FAILED and why. Return 0 or 1."""
    keys = all_keys(type(line.load_config()))  # a mistake is one line
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    files = [f"--config={path}" for path in line.config_paths]
    short = [word for word in SHORT.split() if word.partition("=")[0] in keys]
    runs, words = FOLDER / "runs", [*files, *line.words, *short]
    problem = _run("training on two ranks", words)
    if not problem:
        log = LOG.read_text(encoding="utf-8", errors="replace")
        print(*re.findall("warning: .*\n", log), sep="", end="")
        # The second run finds the checkpoint of a run that was killed after step 2.
        later = shutil.ignore_patterns("step_*4.pt", "best.pt", "*.jsonl", "*.safetensors")
        shutil.copytree(runs / "first", runs / "second", ignore=later)
        problem = _run("resuming from the checkpoint", [*words, "name=second"])
    if not problem:
        before, after = _losses(runs / "first"), _losses(runs / "second")
        if [*after] != [3, 4]:
            problem = f"the second run did not resume after step 2: its losses are {after}"
        for step, loss in after.items():
            # Some CPU kernels do not add in a fixed order.
            if not problem and not math.isclose(loss, before[step], rel_tol=1e-4):
                problem = (
                    f"step {step}: the resumed run's loss is {loss}, without a stop {before[step]}"
                )
    problem = problem or _run("evaluating", ["evaluate", *words, "name=second"])
    if problem:
        shutil.rmtree(runs, ignore_errors=True)
        print(f"{problem}\nsmoke test: FAILED ({LOG} has the whole output)")
        return 1
    evaluation = json.loads((runs / "second" / "evaluation.json").read_text(encoding="utf-8"))
    shutil.rmtree(FOLDER)
    what = "2 gloo ranks on CPU trained, saved step 2, went on from there, evaluated"
    print(f"smoke test: PASSED ({what} {evaluation['num_samples']} samples)")
    return 0


def _run(task: str, arguments: list[str]) -> str:
    """Run run.py with its output in LOG. Return "", or its last lines if it failed."""
    print(f"smoke test: {task} …", flush=True)
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", SETTINGS}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "DDP_POLICY": "off"}
    environment[RUNS_FOLDER] = str(FOLDER / "runs")
    script = Path(__file__).parents[2] / "run.py"
    with LOG.open("ab") as file:
        command = [sys.executable, str(script), *arguments]
        code = subprocess.call(command, env=environment, stdout=file, stderr=file)
    lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"{task}: exit code {code}", *lines[-20:]]) if code else ""


def _losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}

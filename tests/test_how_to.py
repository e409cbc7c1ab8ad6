"""Tests of the files in docs/how-to/: the notebook runs on the CPU, the commands for Kubernetes and SkyPilot train."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from baking import PROJECT, ROOT, bake, plain_environment

HOW_TO = ROOT / "docs" / "how-to"
JUPYTER = ROOT / ".cache" / "docs" / "bin" / "jupyter-execute"


def read_yaml(name: str) -> list[Any]:
    return list(yaml.safe_load_all((HOW_TO / name).read_text(encoding="utf-8")))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_notebook_trains_its_own_model_on_two_ranks_and_continues(
    template: Path, tmp_path: Path
) -> None:
    if not JUPYTER.exists():
        pytest.skip("nbclient is not installed: type `make docs`, or `make .cache/docs/.ready`")
    # What the cells install goes into an environment of the test, which sees the packages of this one.
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True
    )
    packages = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (packages / "base.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    shutil.copy(HOW_TO / "kaggle-colab.ipynb", tmp_path)
    variables = {
        "TEMPLATE": str(template),
        "PATH": f"{tmp_path}/env/bin:/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "",
    }
    variables |= {name: str(tmp_path / "jupyter") for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    command = [str(JUPYTER), "--output=done.ipynb", "kaggle-colab.ipynb"]
    subprocess.run(command, cwd=tmp_path, env=plain_environment(variables), check=True, timeout=200)

    cells = json.loads((tmp_path / "done.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "resuming after step 120 of 160" in printed
    run = tmp_path / "ddp-experiment" / "runs" / "first"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["world_size"], summary["epochs"]) == ("complete", 2, 8)
    assert json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["accuracy"] > 0.95
    written = next(
        "".join(cell["source"]) for cell in cells if "%%writefile" in "".join(cell["source"])
    )
    model = (tmp_path / "ddp-experiment" / "ddp_experiment" / "model.py").read_text(
        encoding="utf-8"
    )
    assert model.strip() == written.partition("\n")[2].strip()
    pages = [
        "".join(output["data"]["text/html"])
        for output in outputs
        if "text/html" in output.get("data", {})
    ]
    assert len(pages) == 1 and "&lt;svg" in pages[0]


def test_documented_command_writes_the_version_of_the_torch_that_is_there(tmp_path: Path) -> None:
    page = (HOW_TO / "own-torch.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^sed .*constraints\.txt$", page, re.MULTILINE)
    assert f"\n{command}\n" in (ROOT / PROJECT / "README.md").read_text(encoding="utf-8")
    pins = (ROOT / PROJECT / "constraints.txt").read_text(encoding="utf-8")
    changed = re.sub(r"(?m)^torch==.*", "torch==0.1", pins)
    (tmp_path / "constraints.txt").write_text(changed, encoding="utf-8")
    environment = plain_environment({"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"})
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True)
    own = version("torch").partition("+")[0]
    assert (tmp_path / "constraints.txt").read_text(encoding="utf-8") == changed.replace(
        "torch==0.1", f"torch=={own}"
    )


def test_pods_get_the_time_that_ranks_have_to_save_and_keep_the_runs() -> None:
    runtime, job = read_yaml("kubernetes.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    script = (ROOT / PROJECT / "scripts" / "torchrun.sh").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"--shutdown-timeout=(\d+)", script)
    assert pod["terminationGracePeriodSeconds"] > int(seconds)
    (folder,) = re.findall(
        r"^WORKDIR (.*)$", (ROOT / PROJECT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    (container,) = pod["containers"]
    assert f"{folder}/runs" in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.slow
def test_commands_for_kubernetes_and_skypilot_start_the_two_nodes_of_one_run(
    template: Path, tmp_path: Path
) -> None:
    """Start node 0 by SkyPilot's command and node 1 by Kubernetes's, each with the variables that its platform sets."""
    project = bake(template, tmp_path, tracker="none")
    config = (project / "config.yaml").read_text(encoding="utf-8")
    (project / "config.yaml").write_text(
        re.sub(r"(?m)^  epochs: .*", "  epochs: 1", config), encoding="utf-8"
    )
    (project / ".venv" / "bin").mkdir(parents=True)
    activate = f"export PATH={Path(sys.executable).parent}:$PATH"
    (project / ".venv" / "bin" / "activate").write_text(activate, encoding="utf-8")

    (task,), (_, job) = read_yaml("skypilot.yaml"), read_yaml("kubernetes.yaml")
    assert task["envs"]["DDP_RUNS_FOLDER"] in task["file_mounts"]
    address, port = "127.0.0.1", str(free_port())
    skypilot = {
        "NUM_NODES": str(task["num_nodes"]),
        "NODE_RANK": "0",
        "NODE_IPS": f"{address}\n{address}",
    }
    trainer = job["spec"]["trainer"]
    pet = {
        "NNODES": str(trainer["numNodes"]),
        "NODE_RANK": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    nodes = [
        (
            ["bash", "-c", task["run"]],
            {f"SKYPILOT_{name}": value for name, value in skypilot.items()},
        ),
        (
            [*trainer["command"], *trainer["args"]],
            {f"PET_{name}": value for name, value in pet.items()},
        ),
    ]
    nodes[0][1].update(task["envs"], DDP_RUNS_FOLDER=str(tmp_path / "bucket"), MASTER_PORT=port)
    nodes[1][1].update(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin", PET_NPROC_PER_NODE="4")
    processes = [
        subprocess.Popen(
            command, cwd=project, env=plain_environment({"CUDA_VISIBLE_DEVICES": "", **variables})
        )
        for command, variables in nodes
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    summary = json.loads(
        (tmp_path / "bucket" / "first" / "summary.json").read_text(encoding="utf-8")
    )
    assert (summary["status"], summary["world_size"]) == ("complete", 2)
    assert (project / "runs" / "first" / "logs" / "rank_1.log").exists()

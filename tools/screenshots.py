"""Writes docs/report.png, docs/sweep.png and docs/tensorboard.png with Chromium. `make recording` runs this file.

A new project trains on two CPU ranks and runs the sweep of docs/how-to/sweeps.md on the CPU.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]


def train(binaries: Path, folder: Path) -> Path:
    """Make a project, train it, run a sweep and write the sweep's report. Return the project's folder."""
    answers = [
        "--no-input",
        "--default-config",
        "-o",
        str(folder),
        "project_name=Digits",
        "size=full",
    ]
    answers.append("smoke_test=skip")
    subprocess.run([binaries / "cookiecutter", ROOT, *answers], check=True)
    project = folder / "digits"
    page = (ROOT / "docs/how-to/sweeps.md").read_text(encoding="utf-8")
    sweep = page.split("```yaml\n")[1].split("```")[0].replace("devices: auto:1", "devices: cpu")
    (project / "rates.yaml").write_text(sweep, encoding="utf-8")
    for words in (
        "device_ids=cpu,cpu",
        "sweep rates.yaml training.epochs=6",
        "report learning-rates",
    ):
        subprocess.run([binaries / "python", "run.py", *words.split()], cwd=project, check=True)
    return project


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(python_folder: Path, folder: Path) -> None:
    binaries, docs, port = python_folder.resolve() / "bin", ROOT / "docs", free_port()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        sys.exit(
            "Neither chromium nor google-chrome was found. Install one for the screenshots (Debian: chromium)."
        )
    project = train(binaries, folder)
    address = ["--host", "127.0.0.1", "--port", str(port)]
    board = subprocess.Popen(
        [
            binaries / "tensorboard",
            "--logdir",
            project / "runs/learning-rates",
            "--load_fast",
            "false",
            *address,
        ]
    )
    try:
        with sync_playwright() as playwright:
            page = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox"]
            ).new_page()
            page.set_viewport_size({"width": 1000, "height": 800})
            page.goto(f"file://{project}/runs/learning-rates/report.html")
            page.screenshot(path=docs / "sweep.png", full_page=True)
            page.goto(f"file://{project}/runs/baseline/report.html")
            # what follows tells of this machine
            end = page.locator("h2", has_text="Environment").bounding_box()["y"]
            page.screenshot(
                path=docs / "report.png",
                full_page=True,
                clip={"x": 0, "y": 0, "width": 1000, "height": end},
            )
            page.set_viewport_size({"width": 1500, "height": 860})
            page.wait_for_timeout(15_000)  # until TensorBoard answers
            page.goto(
                f"http://127.0.0.1:{port}/?darkMode=false&tagFilter=loss%7Caccuracy#timeseries"
            )
            page.wait_for_timeout(10_000)  # until it has drawn its curves
            page.screenshot(path=docs / "tensorboard.png")
    finally:
        board.terminate()
        board.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]), Path(folder))

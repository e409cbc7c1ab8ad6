"""Writes docs/recording.svg from a real session in two terminals. Type `make recording`.

The first terminal answers cookiecutter's questions and trains on two CPU ranks. The second kills a rank, and the first
resumes the run. All text is the programs' own, except for the host's name. Pauses are cut to LONGEST_PAUSE seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).resolve().parents[1]
HOME = Path("/tmp/demo")  # short, and it tells nothing of the machine
# characters; lines of the two terminals; pixels of a character
COLUMNS, ROWS, CELL = (
    88,
    (24, 4),
    (8.4, 18),
)
FRAME_SECONDS, LONGEST_PAUSE, LAST_PAUSE = 0.1, 1.0, 6.0
TITLE = (
    "A new project trains on two ranks; one is killed; the same command continues to the same bits"
)
PROMPT = r"\$ $"
COLORS = {"default": "#d7dae0", "red": "#ef7a85", "green": "#8fd07a", "brown": "#e5c07b", "blue": "#6fb3f5"} | {
    "magenta": "#cf8fe8", "cyan": "#63c7d3", "white": "#ffffff", "brightblack": "#8b929e"
}  # fmt: skip
Frame = tuple[str, ...]


class Terminal:
    """A shell in its own pseudo-terminal, with a screen that shows the shell's output."""

    def __init__(self, rows: int, on_change: Recording) -> None:
        self.screen = pyte.Screen(COLUMNS, rows)
        self._stream, self._recording = pyte.ByteStream(self.screen), on_change
        paths = {
            "PATH": f"{HOME}/venv/bin:/usr/bin:/bin",
            "VIRTUAL_ENV": f"{HOME}/venv",
            "HOME": str(HOME),
        }
        shell = {"PS1": "$ ", "TERM": "xterm-256color", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        command = ("/bin/bash", ["--norc", "--noprofile"])
        self._child = pexpect.spawn(
            *command, dimensions=(rows, COLUMNS), env=paths | shell, cwd=HOME, timeout=90
        )
        self._child.logfile_read, self._child.delaybeforesend = self, None
        self.wait_for(PROMPT)

    def write(self, data: bytes) -> None:
        self._stream.feed(data.replace(f"({socket.gethostname()},".encode(), b"(server,"))
        self._recording.add_frame()

    def flush(self) -> None: ...

    def wait_for(self, pattern: str) -> str:
        self._child.expect(pattern)
        return str(self._child.match.group().decode())

    def type(self, text: str, end: str = "\n") -> None:
        for character in text:
            self._child.send(character)
            self._child.expect_exact(character)
            time.sleep(0.03 if end else 0)
        self._child.send(end)

    def run(self, command: str) -> None:
        self.type(command)
        self.wait_for(PROMPT)


class Recording:
    """The frames of both terminals, each with the time at which it appeared."""

    def __init__(self) -> None:
        self.frames: list[tuple[float, Frame]] = []
        self.terminals: list[Terminal] = []

    def add_frame(self) -> None:
        if len(self.terminals) < len(ROWS):
            return
        frame = tuple(line for terminal in self.terminals for line in _svg_lines(terminal.screen))
        now = time.monotonic()
        if self.frames and now - self.frames[-1][0] < FRAME_SECONDS:
            now = self.frames.pop()[0]
        if not self.frames or frame != self.frames[-1][1]:
            self.frames.append((now, frame))

    def svg(self) -> str:
        """Return an SVG: a strip of all frames, one below the other, which moves up by one frame at a time."""
        times = [time for time, _ in self.frames]
        pauses = [min(after - before, LONGEST_PAUSE) for before, after in pairwise(times)]
        seconds, height = sum(pauses) + LAST_PAUSE, (sum(ROWS) + 2.5) * CELL[1] + 24
        width, gap = COLUMNS * CELL[0] + 24, ROWS[0] * CELL[1] + 30
        lines: dict[str, int] = {}
        steps, frames, passed = [], [], 0.0
        for number, ((_, frame), pause) in enumerate(
            zip(self.frames, [*pauses, LAST_PAUSE], strict=True)
        ):
            steps.append(
                f"{100 * passed / seconds:.3f}%{{transform:translateY({-number * height:g}px)}}"
            )
            passed += pause
            uses = [
                f'<use href="#l{lines.setdefault(line, len(lines))}" y="{_top(row) + number * height:g}"/>'
                for row, line in enumerate(frame)
                if line
            ]
            frames.append("".join(uses))
        texts = "".join(
            f'<text id="l{number}" xml:space="preserve">{line}</text>'
            for line, number in lines.items()
        )
        last = f"transform:translateY({-(len(frames) - 1) * height:g}px)"
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        family = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
        lower = f'y="{gap:g}" width="100%" height="{height - gap:g}"'
        return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{TITLE}</title>
<style>text{{font:14px {family};fill:{COLORS["default"]}}}
#strip{{animation:play {seconds:.2f}s step-end infinite}}@keyframes play{{{"".join(steps)}100%{{{last}}}}}
@media (prefers-reduced-motion:reduce){{#strip{{animation:none;{last}}}}}</style>
<rect width="100%" height="100%" rx="8" fill="#1d2026"/><rect {lower} rx="8" fill="#2a2e37"/>
<text x="12" y="{gap + 18:g}" style="fill:{COLORS["brightblack"]}">another terminal</text>
<defs>{texts}</defs><g id="strip">{"".join(frames)}</g></svg>
"""


def _top(row: int) -> float:
    return 24 + row * CELL[1] + (46 if row >= ROWS[0] else 0)


def _svg_lines(screen: pyte.Screen) -> list[str]:
    """Return each line of the screen as SVG, with a <tspan> for each run of characters in one style."""
    lines = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        line, column = "", 0
        for (color, is_bold), group in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
            text = "".join(cell.data for cell in group)
            style = (
                f' style="fill:{COLORS.get(color, COLORS["default"])}"'
                if color != "default"
                else ""
            )
            weight = ' font-weight="bold"' if is_bold else ""
            left = f' x="{12 + column * CELL[0]:g}"'
            line += (
                f"<tspan{left}{style}{weight}>{escape(text.rstrip())}</tspan>"
                if text.strip()
                else ""
            )
            column += len(text)
        lines.append(line)
    return lines


def play(first: Terminal, second: Terminal) -> None:
    first.type("cookiecutter ddp-template")
    questions = [
        key for key in json.loads((ROOT / "cookiecutter.json").read_text("utf-8")) if key[0] != "_"
    ]
    for question in range(1, len(questions) + 1):
        first.wait_for(rf"\[{question}/{len(questions)}\]")
        time.sleep(0.5)
        first.type("Digits" if question == 1 else "")
    first.wait_for("PASSED")
    first.wait_for(PROMPT)
    second.run("cd digits")
    first.run("cd digits")
    first.type("python run.py device_ids=cpu,cpu")
    second.type("grep -o 'pid=[0-9]*' runs/baseline/logs/rank_1.log", end="")
    first.wait_for("epoch 1")
    second.type("")
    pid = second.wait_for(r"(?<=pid=)[0-9]+(?=\r)")
    second.wait_for(PROMPT)
    second.type(f"kill -9 {pid}", end="")
    first.wait_for("epoch 4")
    second.type("")
    first.wait_for("rank 1")
    first.wait_for(PROMPT)
    time.sleep(1)
    first.run("python run.py device_ids=cpu,cpu")
    first.run("clear")
    first.type("python run.py device_ids=cpu,cpu name=undisturbed")
    first.wait_for("complete: .*\n")
    first.wait_for(PROMPT)
    first.run("md5sum runs/*/model.safetensors")


def main(python_folder: Path) -> None:
    if HOME.exists():
        sys.exit(f"{HOME} exists. Remove it: the recording uses this folder.")
    try:
        HOME.mkdir()
        (HOME / "venv").symlink_to(python_folder.resolve())
        subprocess.run(
            ["git", "clone", "--quiet", str(ROOT), str(HOME / "ddp-template")], check=True
        )
        recording = Recording()
        recording.terminals += [Terminal(rows, recording) for rows in ROWS]
        play(*recording.terminals)
    finally:
        shutil.rmtree(HOME)
    svg = recording.svg()
    leaks = [
        word
        for word in (str(ROOT), f"({socket.gethostname()}", f"{os.path.expanduser('~')}/")
        if word in svg
    ]
    assert not leaks, f"The recording shows {leaks}"
    (ROOT / "docs" / "recording.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Finds the folder of a run, and writes files so that the old file stays intact if the job is killed while writing."""

import errno
import io
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import FailureError

RUNS_FOLDER = "DDP_RUNS_FOLDER"  # an environment variable that names another folder than runs/


def run_directory(name: str) -> Path:
    """Return runs/<name>, or <name> in another folder if the environment variable DDP_RUNS_FOLDER names one."""
    return Path(os.environ.get(RUNS_FOLDER, "runs")) / name


def template_facts() -> dict[str, Any] | None:
    """Return the url, version and commit of this project's template, as far as its file says them."""
    for name in (".template.json", ".cruft.json"):
        with suppress(Exception):  # a damaged file must not end a run
            facts = json.loads((Path(__file__).parents[1] / name).read_bytes())
            return {
                "url": facts["template"],
                "version": facts.get("version"),  # cruft knows none
                "commit": facts["commit"],
            }
    return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON. If writing fails, the old file stays intact."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_predictions(directory: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Write a line per row to predictions.jsonl, and return the lines.

    Vectors of one length, of more than 32 numbers, go to predictions_<column>.npy instead, (N, …).
    """
    import numpy

    wide = [name for name, value in rows[0].items() if isinstance(value, list) and len(value) > 32]
    wide = [name for name in wide if len({len(row[name]) for row in rows}) == 1]
    for name in wide:
        content = io.BytesIO()
        numpy.save(content, [row.pop(name) for row in rows])
        write_whole(
            directory / f"predictions_{name}.npy",
            lambda beside, content=content: beside.write_bytes(content.getvalue()),  # type: ignore[misc]
        )
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = "".join(f"{line}\n" for line in lines)
    path = directory / "predictions.jsonl"
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    return lines


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, then rename that file to `path`. Raise FailureError if writing fails."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)  # rename is atomic: a killed job leaves the old file whole
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)  # a full disk would stay full
        raise disk_failure(path, error) from error


def disk_failure(path: Path, error: OSError) -> FailureError:
    remedy = (
        "The last checkpoint is whole: mend the disk or make room, and the same command continues."
    )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
        remedy = "Is it another user's, or a link to a disk that is away? "
        remedy += f"Set the variable {RUNS_FOLDER}=PATH to write elsewhere; to read its checkpoint there, add "
        remedy += "evaluation.checkpoint=PATH."
    return FailureError(f"cannot write {path}: {error.strerror or error}. {remedy}")

"""MLflow tracker. It writes to the database runs/mlflow.db, unless MLFLOW_TRACKING_URI names a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlflow

from ..files import write_whole


class Tracker:
    """Logs to one MLflow run, which is MLflow's active run on rank 0. A resumed run continues the same MLflow run."""

    def __init__(self, directory: Path, config: dict[str, Any], resumed_step: int) -> None:
        runs = directory.absolute().parent
        experiment = mlflow.environment_variables.MLFLOW_EXPERIMENT_NAME.get() or Path.cwd().name
        if not mlflow.is_tracking_uri_set():
            # MLflow 3 refuses folders of files
            mlflow.set_tracking_uri(f"sqlite:///{runs.as_posix()}/mlflow.db")
            with suppress(mlflow.MlflowException):  # the experiment exists already
                mlflow.create_experiment(
                    experiment, artifact_location=(runs / "mlartifacts").as_uri()
                )
        mlflow.set_experiment(experiment)
        id_file = directory / "mlflow_id.txt"
        if id_file.exists():
            mlflow.start_run(run_id=id_file.read_text(encoding="utf-8"))
            return
        run_id = mlflow.start_run(run_name=directory.name).info.run_id
        write_whole(id_file, lambda beside: beside.write_text(run_id, encoding="utf-8"))
        # once: MLflow refuses other values for the same run
        mlflow.log_params(dict(_flatten(config)))

    def record(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to the curve of each scalar."""
        mlflow.log_metrics(scalars, step=step)

    def show(self, step: int, name: str, path: Path) -> None:
        """Log the file at `path`. MLflow shows pictures with a slider over the steps, and lists texts as artifacts."""
        if path.suffix == ".txt":
            mlflow.log_artifact(str(path), "media")
        else:
            mlflow.log_image(mlflow.Image(str(path)), key=name, step=step)

    def close(self) -> None:
        """End the MLflow run."""
        mlflow.end_run()


def _flatten(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of the config with its dotted key, for example ("training.epochs", 3)."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value

"""MLflow, through its client, because "the active run" may belong to the user's own code.

MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where runs go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1.track.base import PROJECT, Start, Table

PACKAGE = "mlflow"
MAX_PARAM_CHARS = 500
MAX_METRICS = 1000  # per request


def check() -> None:
    """Nothing to check: only MLflow knows where runs go; without a server, to a local folder or database."""


class MLflow:
    def __init__(self, start: Start) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        if start.known is not None:
            self.id = start.known
            self._client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.id = self._client.create_run(place, run_name=start.name).info.run_id
        self._client.log_dict(self.id, dict(start.settings), "config.json")
        for key, value in _flat(start.settings, ""):
            self._client.log_param(self.id, key, str(value)[:MAX_PARAM_CHARS])

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [Metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        for first in range(0, len(numbers), MAX_METRICS):
            self._client.log_batch(self.id, metrics=numbers[first : first + MAX_METRICS])

    def table(self, step: int, table: Table) -> None:
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self.id, content, f"eval/table_{step:06d}.json")  # as mlflow.log_table writes tables

    def transcripts(self, step: int, texts: Sequence[str]) -> None:
        self._client.log_text(self.id, "\n\n".join(texts), f"eval/transcripts_{step:06d}.txt")

    def picture(self, step: int, path: Path) -> None:
        self._client.log_artifact(self.id, str(path))

    def finish(self) -> None:
        self._client.set_terminated(self.id)


def _allowed(name: str) -> str:
    """A metric's name in the characters that MLflow takes."""
    return "".join(char if char.isalnum() or char in "_-. /:" else "_" for char in name)


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        found += _flat(value, f"{prefix}{key}.") if is_section else [(_allowed(f"{prefix}{key}"), value)]
    return found


start = MLflow

"""SwanLab. Its own environment variables apply: SWANLAB_MODE=local or offline, SWANLAB_PROJECT, SWANLAB_API_KEY."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.errors import ConfigError
from agent_r1.track.base import PROJECT, Start, Table

PACKAGE = "swanlab"
FOLDER = "swanlog"


def check() -> None:
    """Without a key, SwanLab would ask for one in the middle of the run."""
    import swanlab

    settings = swanlab.Settings()
    if settings.mode == "online" and settings.api_key is None:
        raise ConfigError("track: swanlab has no API key: run `swanlab login`, or set SWANLAB_MODE=offline")


class SwanLab:
    def __init__(self, start: Start) -> None:
        import swanlab

        self._swanlab = swanlab
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=start.name,
            log_dir=str(start.folder / FOLDER),
            id=start.known,
            resume="allow",
            config=dict(start.settings),
        )
        self.id = str(self._run.id)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, table: Table) -> None:
        self._run.log({"eval/table": self._swanlab.Text(table.as_markdown())}, step=step)

    def transcripts(self, step: int, texts: Sequence[str]) -> None:
        self._run.log({"eval/transcripts": [self._swanlab.Text(text) for text in texts]}, step=step)

    def picture(self, step: int, path: Path) -> None:
        self._run.log({"curve": self._swanlab.Image(str(path))}, step=step)

    def finish(self) -> None:
        self._run.finish()


start = SwanLab

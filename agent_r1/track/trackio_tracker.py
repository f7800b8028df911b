"""Trackio: a local database, or a Space that TRACKIO_SPACE_ID names. TRACKIO_PROJECT names the project."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.track.base import PROJECT, Start, Table

PACKAGE = "trackio"


def check() -> None:
    """Nothing to check: the database is local."""


class Trackio:
    def __init__(self, start: Start) -> None:
        import trackio

        self._trackio = trackio
        self.id = start.known or f"{start.name}-{secrets.token_hex(2)}"  # Trackio finds runs by their names
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            config=dict(start.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, table: Table) -> None:
        self._run.log({"eval/table": self._trackio.Markdown(table.as_markdown())}, step=step)

    def transcripts(self, step: int, texts: Sequence[str]) -> None:
        shown = "\n\n".join(f"```text\n{text}\n```" for text in texts)
        self._run.log({"eval/transcripts": self._trackio.Markdown(shown)}, step=step)

    def picture(self, step: int, path: Path) -> None:
        self._run.log({"curve": self._trackio.Image(str(path))}, step=step)

    def finish(self) -> None:
        self._run.finish()


start = Trackio

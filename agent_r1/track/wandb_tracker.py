"""Weights & Biases. Its own environment variables apply: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline and others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agent_r1.errors import ConfigError
from agent_r1.track.base import PROJECT, Start, Table

PACKAGE = "wandb"
OFFLINE = ("offline", "dryrun", "disabled")


def check() -> None:
    """Without a key, wandb would ask for one in the middle of the run."""
    import wandb

    if os.environ.get("WANDB_MODE") not in OFFLINE and not wandb.api.api_key:
        raise ConfigError("track: wandb has no API key: run `wandb login`, or set WANDB_MODE=offline")


class Wandb:
    def __init__(self, start: Start) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=start.known,
            resume="allow",
            name=start.name,
            dir=str(start.folder),
            config=dict(start.settings),
            mode=cast(Any, os.environ.get("WANDB_MODE")),  # wandb itself reads it once per process
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id = str(self._run.id)
        # wandb's own step may only grow. Ours repeats after a kill, and an evaluation has the number of its training
        # step.
        for group in ("train/*", "eval/*"):
            self._run.define_metric(group, step_metric="step")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, table: Table) -> None:
        shown = self._wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({"step": step, "eval/table": shown})

    def transcripts(self, step: int, texts: Sequence[str]) -> None:
        shown = self._wandb.Table(columns=["transcript"], data=[[text] for text in texts])
        self._run.log({"step": step, "eval/transcripts": shown})

    def picture(self, step: int, path: Path) -> None:
        self._run.log({"step": step, "curve": self._wandb.Image(str(path))})

    def finish(self) -> None:
        self._run.finish()


start = Wandb

"""`Trainer` on verl: episodes are played by agent loops, updates made by verl's workers, checkpoints written by both.

A checkpoint is a Hugging Face directory with our `trainer_state.pt`, as in a local run. Weights and optimizer moments
in verl's own shards lie below `verl/`, and only a run on verl can continue from them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agent_r1.backends.verl.adapters import write_merged
from agent_r1.backends.verl.watch import Watch
from agent_r1.backends.verl.workers import VerlWorkers
from agent_r1.disk import remove_leftovers, write_atomically
from agent_r1.errors import ConfigError, DiskError
from agent_r1.runs.reader import list_checkpoints
from agent_r1.train.checkpoint import STATE_FILE
from agent_r1.train.trainer import Trainer

SHARDS = "verl"  # the folder of verl's part of a checkpoint


class VerlEngine:
    """The rollout servers: their weights come from the training workers."""

    startup_seconds = 0.0

    def __init__(self, workers: VerlWorkers) -> None:
        self._workers = workers

    async def generate(self, prompt: Any, sampling: Any, *, session: str) -> Any:
        raise NotImplementedError("agent loops ask the rollout servers, the driver does not")

    def release(self, session: str) -> None:
        """Agent loops hold the sessions."""

    async def load_weights(self, source: Iterable[Any], version: int) -> None:
        """Hand the workers' weights to the servers, which wake up."""
        self._workers.sync(version)

    async def sleep(self) -> None:
        """Leave the GPUs to the training workers until the next weights."""
        self._workers.sleep()

    def abort(self, session: str | None = None) -> None:
        """Nothing samples while weights change."""

    async def close(self) -> None:
        """Ray ends the servers."""


@dataclass(kw_only=True)
class VerlTrainer(Trainer):
    workers: VerlWorkers
    base: Path | None  # with adapters: the model that they are added to
    watch: Watch

    def save(self, step: int) -> None:
        self.workers.require_alive()  # a save would wait for a dead worker
        self.watch.saves = True
        try:
            self._save(step)
        finally:
            self.watch.saves = False

    def _save(self, step: int) -> None:
        folder = self.run.checkpoints
        final = folder / f"step_{step:06d}"
        if final.exists():  # the state is a function of run and step, so it would be the same
            return
        remove_leftovers(folder, older_than=0.0)  # the run is locked: no other process is writing here
        try:
            with write_atomically(final) as part:
                part.mkdir(parents=True)
                self.workers.save(part / SHARDS)
                saved = part / SHARDS / "actor" / "huggingface"
                if self.base is not None:
                    write_merged(self.base, part / SHARDS / "actor", part)
                else:
                    for file in saved.iterdir():
                        file.rename(part / file.name)
                shutil.rmtree(saved, ignore_errors=True)
                self.tokenizer.save_pretrained(str(part))
                torch.save(self._state(step), part / STATE_FILE)
        except OSError as error:
            raise DiskError(f"could not save checkpoint {final}: {error}. Earlier checkpoints are intact") from error
        for _, old in list_checkpoints(folder)[: -self.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)

    def _state(self, step: int) -> dict[str, Any]:
        return super()._state(step) | {"backend": "verl", "shares": self.workers.world_size}

    def load(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Have the workers read their part of a checkpoint; `restore` does the rest."""
        if state.get("backend") != "verl" or not (checkpoint / SHARDS).is_dir():
            raise ConfigError(
                f"{self.run} was trained with backend=local, whose optimizer state verl cannot read. Start a new run "
                f"from its weights with backend=verl model.path={self.run}"
            )
        if state["shares"] != self.workers.world_size:
            raise ConfigError(
                f"{checkpoint} was saved by {state['shares']} training workers, but there are "
                f"{self.workers.world_size} now: continue with as many, or start a new run with model.path={self.run}"
            )
        self.workers.load(checkpoint / SHARDS)

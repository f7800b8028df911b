"""Checkpoints: a Hugging Face directory plus trainer state, written completely or not at all.

A kill or a full disk at any moment leaves the earlier checkpoints untouched.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from agent_r1.disk import remove_leftovers, write_atomically
from agent_r1.errors import DataError, DiskError
from agent_r1.runs.reader import list_checkpoints

STATE_FILE = "trainer_state.pt"


class Saveable(Protocol):
    def save_pretrained(self, save_directory: str) -> Any: ...


def save_checkpoint(
    folder: Path, step: int, *, model: Saveable, tokenizer: Saveable, state: dict[str, Any], keep: int
) -> Path:
    """Write `folder/step_N` atomically, then drop all but the newest `keep` checkpoints."""
    final = folder / f"step_{step:06d}"
    if final.exists():  # the state is a function of run and step, so it would be the same
        return final
    remove_leftovers(folder, older_than=0.0)  # the run is locked: no other process is writing here
    try:
        with write_atomically(final) as part:
            part.mkdir()
            model.save_pretrained(str(part))
            tokenizer.save_pretrained(str(part))
            torch.save(state, part / STATE_FILE)
    except (OSError, RuntimeError, SafetensorError) as error:  # how Python, torch and safetensors report a full disk
        raise DiskError(
            f"could not save checkpoint {final}: {error}. {_free(folder)} Earlier checkpoints are intact"
        ) from error
    for _, old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE_FILE
    if not path.is_file():
        raise DataError(f"{checkpoint} has no {STATE_FILE}: it is a model, not a checkpoint of a training run")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        reason = str(error).partition(". ")[0]  # torch goes on to suggest unpickling the file without checks
        raise DataError(
            f"{path} is damaged: {reason}. Restore it, or remove {checkpoint} to continue from an earlier checkpoint"
        ) from error
    return state


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there."
    except OSError:
        return ""

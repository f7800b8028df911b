"""Checkpoints: a Hugging Face directory plus trainer state, complete or not there at all.

Everything is written into a hidden folder, flushed to disk and then renamed, so a kill or a full disk at any moment
leaves the earlier checkpoints untouched and never a half-written one that looks whole.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from agent_r1.build.model import Saveable
from agent_r1.errors import DataError, DiskError
from agent_r1.runs.run_dir import list_checkpoints

STATE_FILE = "trainer_state.pt"


def save_checkpoint(
    folder: Path, step: int, *, model: Saveable, tokenizer: Saveable, state: dict[str, Any], keep: int
) -> Path:
    """Write `folder/step_N` atomically, then drop all but the newest `keep` checkpoints."""
    final, part = folder / f"step_{step:06d}", folder / f".step_{step:06d}.part"
    if final.exists():  # a step's state is a function of the run, so what is there is what would be written
        return final
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        model.save_pretrained(str(part))
        tokenizer.save_pretrained(str(part))
        torch.save(state, part / STATE_FILE)
        _flush(part)
        os.replace(part, final)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, as Python, torch and safetensors say it
        shutil.rmtree(part, ignore_errors=True)
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
        said = str(error).partition(". ")[0]  # what torch says after that is advice, to run what the file holds
        raise DataError(
            f"{path} is damaged: {said}. Put it back; or remove {checkpoint} to go on from the checkpoint before it"
        ) from error
    return state


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there."
    except OSError:
        return ""

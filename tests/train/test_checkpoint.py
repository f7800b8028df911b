"""Checkpoints survive kills and full disks."""

from __future__ import annotations

import errno
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1.errors import DataError, DiskError
from agent_r1.runs.reader import latest_checkpoint, list_checkpoints
from agent_r1.train.checkpoint import TENSORS, load_state, save_checkpoint
from tests.chatml import tokenizer


class Savable:
    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error = name, error

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / self.name).write_text(self.name, encoding="utf-8")
        if self.error is not None:
            raise self.error


def save(folder: Path, step: int, *, keep: int = 2, error: Exception | None = None) -> Path:
    return save_checkpoint(
        folder, step, model=Savable("model", error), input_files=Savable("tok"), state={"step": step}, keep=keep
    )


def test_the_newest_checkpoints_are_kept_and_their_state_comes_back(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 3]
    step, path = latest_checkpoint(tmp_path)
    assert load_state(path)["step"] == step == 3
    assert (path / "model").read_text(encoding="utf-8") == "model"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write failed")])
def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path, error: Exception) -> None:
    save(tmp_path, 1)
    with pytest.raises(DiskError, match=r"could not save checkpoint .*step_000002.*Earlier checkpoints are intact"):
        save(tmp_path, 2, error=error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001"]  # nothing half-written is left


@pytest.mark.parametrize("limit", [100, 20_000])  # bytes per file: fails in the config, or in the weights
def test_a_write_that_the_system_refuses_in_the_middle_of_real_weights_loses_nothing(
    tmp_path: Path, limit: int
) -> None:
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    save_checkpoint(tmp_path, 1, model=model, input_files=tokenizer(), state={"step": 1}, keep=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(DiskError, match="Earlier checkpoints are intact"):
            save_checkpoint(tmp_path, 2, model=model, input_files=tokenizer(), state={"step": 2}, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001"]
    assert load_state(latest_checkpoint(tmp_path)[1]) == {"step": 1}


def test_a_half_written_checkpoint_of_a_killed_run_is_not_seen(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".step_000002.0123abcd.part").mkdir()
    assert latest_checkpoint(tmp_path)[0] == 1
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_missing_checkpoints_and_states_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stopped before its first save"):
        latest_checkpoint(tmp_path)
    with pytest.raises(DataError, match="it is a model, not a checkpoint"):
        load_state(tmp_path)


def test_a_state_with_tensors_loads_without_unpickling_code(tmp_path: Path) -> None:
    moments = {0: {"mean": torch.randn(3, 2), "step": torch.tensor(4.0)}, 1: {"mean": torch.randn(5)}}
    state: dict[str, Any] = {"step": 1, "rng": torch.get_rng_state(), "m": [1, (2, 3)], "moments": moments}
    path = save_checkpoint(tmp_path, 1, model=Savable("m"), input_files=Savable("t"), state=state, keep=1)
    torch.testing.assert_close(load_state(path), state, rtol=0, atol=0)
    with (path / TENSORS / ".metadata").open("wb") as file:
        pickle.dump(Path.cwd, file)  # could be any function
    with pytest.raises(DataError, match=r"trainer_state is damaged: it refers to .*cwd|it refers to builtins"):
        load_state(path)


def test_missing_and_damaged_tensors_are_one_line_errors(tmp_path: Path) -> None:
    state = {"moments": torch.randn(64, 64)}
    path = save_checkpoint(tmp_path, 1, model=Savable("m"), input_files=Savable("t"), state=state, keep=1)
    (data,) = (path / TENSORS).glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(DataError, match=r"trainer_state is damaged: [^\n]* remove .*step_000001"):
        load_state(path)
    shutil.rmtree(path / TENSORS)
    with pytest.raises(DataError, match=r"trainer_state is damaged: [^\n]*No such file[^\n]* remove .*step_000001"):
        load_state(path)

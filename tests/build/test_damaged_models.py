"""Damaged and incomplete model directories are refused with the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import load_model
from agent_r1.config import RunConfig, load_config
from agent_r1.errors import ConfigError
from tests.mini.task import make_model

MINI = str(Path(__file__).parents[1] / "mini")
NORM = "model.layers.0.input_layernorm.weight"


def mini() -> RunConfig:
    return load_config(MINI, ["sft.demos=null"])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_model(directory=tmp_path / "model", seed=0)
    return tmp_path / "model"


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def refused(directory: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(mini(), directory)


def test_missing_weights_are_an_error(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.pop(NORM))
    refused(directory, rf"incomplete: 1 weights are missing, first {NORM}")


def test_weights_of_the_wrong_shape_are_an_error(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.update({NORM: torch.ones(3)}))
    refused(directory, rf"wrong shape, first {NORM}")


def test_unused_weights_are_ignored(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.update({"vision.weight": torch.ones(3)}))
    assert load_model(mini(), directory).network.num_parameters() > 0


@pytest.mark.parametrize("kept", [0, 1000])
def test_truncated_weights_are_a_one_line_error(directory: Path, kept: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(directory, f"{directory}: SafetensorError")


def test_a_damaged_tokenizer_is_a_one_line_error(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    refused(directory, f"{directory}: KeyError")


def test_other_failures_are_not_called_damage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> None:
        def from_pretrained(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("agent_r1.build.models.load.AutoTokenizer.from_pretrained", from_pretrained)

    fails(ImportError("it needs the sentencepiece library"))
    refused(directory, "it needs the sentencepiece library$")
    fails(MemoryError())
    with pytest.raises(MemoryError):
        load_model(mini(), directory)


def test_weights_with_nan_are_blamed_on_the_model(directory: Path) -> None:
    change_weights(directory, lambda weights: weights[NORM].fill_(float("nan")))
    model = load_model(mini(), directory)
    with pytest.raises(ConfigError, match="not finite: its weights"):
        build_engine(mini(), model)

"""Model directories that are not whole: none is taken for a model, and each says what is wrong with it."""

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


def test_weights_that_are_missing_are_not_made_up(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.pop(NORM))
    refused(directory, rf"incomplete: 1 weights are missing, first {NORM}")


def test_weights_of_another_shape_are_not_made_up(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.update({NORM: torch.ones(3)}))
    refused(directory, rf"wrong shape, first {NORM}")


def test_weights_that_a_model_does_not_use_do_no_harm(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.update({"vision.weight": torch.ones(3)}))
    assert load_model(mini(), directory).network.num_parameters() > 0


@pytest.mark.parametrize("kept", [0, 1000])
def test_weights_that_are_cut_short_are_told_in_a_line(directory: Path, kept: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(directory, f"{directory}: SafetensorError")


def test_a_damaged_tokenizer_is_told_in_a_line(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    refused(directory, f"{directory}: KeyError")


def test_what_is_no_damage_is_not_called_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> None:
        def from_pretrained(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("agent_r1.build.models.load.AutoTokenizer.from_pretrained", from_pretrained)

    fails(ImportError("it needs the sentencepiece library"))
    refused(directory, "it needs the sentencepiece library$")
    fails(MemoryError())
    with pytest.raises(MemoryError):
        load_model(mini(), directory)


def test_weights_that_are_no_numbers_are_not_blamed_on_the_engine(directory: Path) -> None:
    change_weights(directory, lambda weights: weights[NORM].fill_(float("nan")))
    model = load_model(mini(), directory)
    with pytest.raises(ConfigError, match="not finite: its weights"):
        build_engine(mini(), model)

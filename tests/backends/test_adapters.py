from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_r1.backends.verl.adapters import adapter_changes, write_merged
from agent_r1.errors import DataError

LAYER = "base_model.model.model.layers.0.q_proj"


def write_shards(folder: Path, **tensors: torch.Tensor) -> None:
    folder.mkdir()
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 8}))
    named = {f"{LAYER}.lora_{name}.default.weight": tensor for name, tensor in tensors.items()}
    torch.save(named | {"base_model.model.other.weight": torch.ones(1)}, folder / "model_world_size_1_rank_0.pt")


def test_adapters_are_added_to_their_weight_alone(tmp_path: Path) -> None:
    # W + (alpha / rank) B A, with alpha 8 and rank 2: [[1]] + 4 * [[1, 2]] [[3], [5]] = [[1 + 4 * 13]]
    write_shards(tmp_path / "shards", A=torch.tensor([[3.0], [5.0]]), B=torch.tensor([[1.0, 2.0]]))
    base, target = tmp_path / "base", tmp_path / "target"
    base.mkdir()
    target.mkdir()
    kept = torch.tensor([[7.0]])
    save_file(
        {"model.layers.0.q_proj.weight": torch.tensor([[1.0]]), "model.norm.weight": kept},
        str(base / "model.safetensors"),
    )
    (base / "config.json").write_text("{}")
    write_merged(base, tmp_path / "shards", target)
    merged = load_file(str(target / "model.safetensors"))
    assert merged["model.layers.0.q_proj.weight"].tolist() == [[53.0]]
    assert torch.equal(merged["model.norm.weight"], kept)
    assert (target / "config.json").read_text() == "{}"


def test_a_base_without_the_weight_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", A=torch.ones(2, 1), B=torch.ones(1, 2))
    base = tmp_path / "base"
    base.mkdir()
    save_file({"other": torch.ones(1)}, str(base / "model.safetensors"))
    with pytest.raises(DataError, match=r"has no weight model\.layers\.0\.q_proj\.weight"):
        write_merged(base, tmp_path / "shards", tmp_path)


def test_missing_shards_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 8}))
    with pytest.raises(DataError, match="no shards of adapters"):
        adapter_changes(tmp_path)

"""Merge trained adapters into their base, tensor by tensor: verl writes its adapters in shards and merges nothing.

Reads verl's shards (`model_world_size_N_rank_R.pt`, state dicts of sharded tensors) and the safetensors of the base.
Never holds more than one file of the base in memory.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agent_r1.errors import DataError

PREFIX = "base_model.model."


def write_merged(base: Path, shards: Path, target: Path) -> None:
    """Write the base with the adapters of `shards` merged into it, as a Hugging Face directory."""
    changes = adapter_changes(shards)
    used = set[str]()
    for file in sorted(base.iterdir()):
        if file.suffix != ".safetensors":
            if file.is_file():
                shutil.copy2(file, target / file.name)
            continue
        with safe_open(str(file), framework="pt") as tensors:
            merged = {}
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                weight = tensors.get_tensor(name)
                if name in changes:
                    weight = (weight.float() + changes[name]).to(weight.dtype)
                    used.add(name)
                merged[name] = weight
            save_file(merged, str(target / file.name), metadata={"format": "pt"})
    if missing := changes.keys() - used:
        raise DataError(f"{base} has no weight {sorted(missing)[0]}, which the adapters in {shards} change")


def adapter_changes(shards: Path) -> dict[str, Tensor]:
    """The change of each weight by the adapters: scale * B A."""
    meta = json.loads((shards / "lora_train_meta.json").read_text(encoding="utf-8"))
    scale = meta["lora_alpha"] / meta["r"]
    tensors = _whole_adapters(shards)
    changes = {}
    for name, down in tensors.items():
        layer, found, _ = name.partition(".lora_A.")
        if found:
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            changes[f"{layer.removeprefix(PREFIX)}.weight"] = scale * (up @ down)
    return changes


def _whole_adapters(shards: Path) -> dict[str, Tensor]:
    files = sorted(shards.glob("model_world_size_*_rank_*.pt"), key=lambda file: int(file.stem.rpartition("_")[2]))
    if not files:
        raise DataError(f"{shards} has no shards of adapters")
    # Sharded tensors warn that their process group is elsewhere; only their numbers are read.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    parts: list[dict[str, Any]] = [
        {name: value for name, value in torch.load(file, weights_only=False).items() if ".lora_" in name}
        for file in files
    ]
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: list[Any]) -> Tensor:
    """One tensor out of its shards along the first dimension; a tensor that is not sharded is the same everywhere."""
    if not hasattr(parts[0], "placements"):
        shards = parts[:1]
    elif any(placement.is_replicate() for placement in parts[0].placements):
        shards = [parts[0].to_local()]
    else:
        shards = [part.to_local() for part in parts]
    return torch.cat(shards).float()

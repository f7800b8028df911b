"""Weights in a folder that vLLM servers read: a Hugging Face directory in shared memory, overwritten by every update.

Knows nothing about requests. Tied matrices are written once per name, because vLLM on a CPU keeps the old output head
when a tied one is replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from agent_r1.engines.vllm.vllm_server import Server
from agent_r1.errors import ConfigError, DiskError

PREFIX = f"agent-r1-{socket.gethostname()}-"  # then the process id
SHARD_BYTES = 2**30  # written at a time: bounds the copy on the host


@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """Adapters that are sent: W x becomes W x + alpha / rank * B A x in these layers."""

    rank: int
    alpha: float
    layers: Sequence[str]


class SharedWeights:
    """`folder` must be visible to all servers under the same path."""

    are_read_at_start = True  # by servers that are started with `path`

    def __init__(self, folder: str, *, model: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copies = tied_names(model)
        state: dict[str, Tensor] = model.state_dict()
        needed = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize
        if not Path(folder).is_dir():
            raise ConfigError(f"engine.weights_dir={folder!r} is not a folder on this machine")
        if (free := shutil.disk_usage(folder).free) < needed:
            raise ConfigError(
                f"engine.weights_dir={folder!r} has {free / 2**30:.1f} GiB free, but the weights take "
                f"{needed / 2**30:.1f}: name a folder with more room that the vLLM servers can read too"
            )
        remove_leftovers(Path(folder))
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=folder))
        self.path.chmod(0o755)  # servers may run as another user
        config = model.config.to_dict() | {"tie_word_embeddings": False}
        type(model.config).from_dict(config | {"dtype": dtype}).save_pretrained(str(self.path))
        SharedWeights.write(self, ((name, tensor) for name, tensor in state.items() if name not in self._copies))

    async def send(self, server: Server, client: httpx.AsyncClient) -> None:
        """Have a server read what was written last. It runs no request meanwhile."""
        await server.update(client, str(self.path))

    def write(self, source: Iterable[tuple[str, Tensor]]) -> None:
        for old in self.path.glob("*.safetensors"):
            old.unlink()
        shard: dict[str, Tensor] = {}
        count = size = 0
        try:
            for name, tensor in self._named(source):
                shard[name] = tensor
                size += tensor.nbytes
                if size >= SHARD_BYTES:
                    self._save(shard, count)
                    shard, count, size = {}, count + 1, 0
            self._save(shard, count)
        except (OSError, SafetensorError) as error:
            raise DiskError(f"could not write the weights for vLLM to {self.path}: {error}") from error

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _named(self, source: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source:
            tensor = tensor.detach().to(device="cpu", dtype=self._dtype).contiguous()
            yield name, tensor
            for copy, original in self._copies.items():
                if original == name:
                    yield copy, tensor.clone()  # safetensors refuses tensors that share memory

    def _save(self, shard: dict[str, Tensor], number: int) -> None:
        if shard:
            save_file(shard, self.path / f"model-{number:05d}.safetensors", metadata={"format": "pt"})


class SharedAdapters(SharedWeights):
    """The base is written once. Every update writes the adapters, in peft's format, into a folder of their own."""

    are_read_at_start = False

    def __init__(self, folder: str, *, model: Any, dtype: torch.dtype, shape: AdapterShape) -> None:
        super().__init__(folder, model=model, dtype=dtype)
        self._config = {"peft_type": "LORA", "r": shape.rank, "lora_alpha": shape.alpha, "bias": "none"}
        self._config["target_modules"] = sorted({name.rpartition(".")[2] for name in shape.layers})
        self._adapter, self._count = self.path, 0
        self.write(_zeros(model, shape))  # so that servers which take no adapters are found at the start

    async def send(self, server: Server, client: httpx.AsyncClient) -> None:
        await server.swap_adapter(client, str(self._adapter))

    def write(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Write adapters under the names `LAYER.lora_A` and `LAYER.lora_B`."""
        tensors = {
            f"base_model.model.{name}.weight": tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
            for name, tensor in source
        }
        old, self._adapter = self._adapter, self.path / f"adapter-{self._count}"
        self._count += 1
        try:
            self._adapter.mkdir()
            self._adapter.chmod(0o755)
            (self._adapter / "adapter_config.json").write_text(json.dumps(self._config), encoding="utf-8")
            save_file(tensors, self._adapter / "adapter_model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise DiskError(f"could not write the adapters for vLLM to {self._adapter}: {error}") from error
        if old != self.path:
            shutil.rmtree(old, ignore_errors=True)


def _zeros(model: nn.Module, shape: AdapterShape) -> Iterator[tuple[str, Tensor]]:
    for name in shape.layers:
        rows, columns = model.get_parameter(f"{name}.weight").shape
        yield f"{name}.lora_A", torch.zeros(shape.rank, columns)
        yield f"{name}.lora_B", torch.zeros(rows, shape.rank)


def tied_names(model: nn.Module) -> Mapping[str, str]:
    """Return the names under which a tied parameter appears again, with the name under which it is sent."""
    first: dict[int, str] = {}
    copies = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (original := first.setdefault(id(parameter), name)) != name:
            copies[name] = original
    return copies


def remove_leftovers(folder: Path) -> None:
    """Remove the weights of processes of this machine that were killed."""
    for path in folder.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)

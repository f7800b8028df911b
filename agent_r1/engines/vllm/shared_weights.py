"""Weights in a folder that vLLM servers read: a Hugging Face directory in shared memory, overwritten by each update.

`SentWeights` is what this has in common with `gpu_weights.py`: a folder that describes the model, and the names of
weights. Tied matrices are sent once per name, because vLLM on a CPU keeps the old output head when a tied one is
replaced. Knows nothing about requests.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
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

PREFIX = f"agent-r1-{socket.gethostname()}-"  # followed by the process id
SHARD_BYTES = 2**30  # bytes written at a time: bounds the copy on the host


class SentWeights(ABC):
    """`folder` must be visible to all servers under the same path."""

    are_read_at_start = False  # whether servers read them when they start with `path`
    are_kept = True  # whether a server that comes back can get them again
    are_all = True  # False: only adapters, so a sleeping server must keep its weights
    arguments: Sequence[str] = ()  # arguments of the servers that we start
    variables: Mapping[str, str] = {}  # environment variables of the servers that we start

    def __init__(self, folder: str, *, model: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copies = tied_names(model)
        if not Path(folder).is_dir():
            raise ConfigError(f"engine.weights_dir={folder!r} is not a folder on this machine")
        remove_leftovers(Path(folder))
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=folder))
        self.path.chmod(0o755)  # servers may run as another user
        config = model.config.to_dict() | {"tie_word_embeddings": False}
        type(model.config).from_dict(config | {"dtype": dtype}).save_pretrained(str(self.path))

    @abstractmethod
    def write(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Store new weights, given by name. Runs on a thread."""

    @abstractmethod
    async def send(self, server: Server, client: httpx.AsyncClient) -> None:
        """Have a server read what was written last. It runs no request meanwhile."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _own(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Return the weights that the model has now, as a source."""
        return ((name, tensor) for name, tensor in model.state_dict().items() if name not in self._copies)

    def _names(self, name: str) -> list[str]:
        """Return all names under which a tensor is sent."""
        return [name, *(copy for copy, original in self._copies.items() if original == name)]


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


@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """Adapters that are sent: W x becomes W x + alpha / rank * B A x in these layers."""

    rank: int
    alpha: float
    layers: Sequence[str]


class SharedWeights(SentWeights):
    are_read_at_start = True

    def __init__(self, folder: str, *, model: Any, dtype: torch.dtype) -> None:
        needed = sum(tensor.numel() for tensor in model.state_dict().values()) * dtype.itemsize
        if Path(folder).is_dir() and (free := shutil.disk_usage(folder).free) < needed:
            raise ConfigError(
                f"engine.weights_dir={folder!r} has {free / 2**30:.1f} GiB free, but the weights take "
                f"{needed / 2**30:.1f}: name a folder with more room that the vLLM servers can read too"
            )
        super().__init__(folder, model=model, dtype=dtype)
        SharedWeights.write(self, self._own(model))

    async def send(self, server: Server, client: httpx.AsyncClient) -> None:
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

    def _named(self, source: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source:
            tensor = tensor.detach().to(device="cpu", dtype=self._dtype).contiguous()
            for number, each in enumerate(self._names(name)):
                yield each, tensor.clone() if number else tensor  # safetensors refuses tensors that share memory

    def _save(self, shard: dict[str, Tensor], number: int) -> None:
        if shard:
            save_file(shard, self.path / f"model-{number:05d}.safetensors", metadata={"format": "pt"})


class SharedAdapters(SharedWeights):
    """The base is written once. Every update writes the adapters, in peft's format, into a folder of their own."""

    are_read_at_start = are_all = False

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

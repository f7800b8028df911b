"""What all ways of sending weights to vLLM servers share: a folder that describes the model, and the names of weights.

Knows nothing about requests. Tied matrices are sent once per name, because vLLM on a CPU keeps the old output head when
a tied one is replaced.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor, nn

from agent_r1.engines.vllm.vllm_server import Server
from agent_r1.errors import ConfigError

PREFIX = f"agent-r1-{socket.gethostname()}-"  # followed by the process id


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
        """Take new weights, by name. Runs on a thread."""

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

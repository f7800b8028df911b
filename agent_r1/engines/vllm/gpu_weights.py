"""Weights that go from the learner to a vLLM server on the same GPU, without a file: the server reads our memory (CUDA
IPC).

vLLM's own weight transfer does the reading. We fill a buffer with tensors in the engine's data type and tell the server
where it is; the server copies them before it answers, then the buffer is filled again. So neither side ever holds a
second copy of the model, but nothing is left either that a restarted server could read.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import httpx
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from agent_r1.engines.vllm.shared_weights import SentWeights
from agent_r1.engines.vllm.vllm_server import Server
from agent_r1.errors import RolloutError

BUCKET_BYTES = 2**28  # a tensor that is larger gets a buffer of its own size


class GpuWeights(SentWeights):
    """device: the learner's GPU, which must be the server's."""

    are_kept = False
    arguments = ("--load-format", "dummy", "--weight-transfer-config", '{"backend": "ipc"}')
    variables: Mapping[str, str] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # addresses are sent pickled

    def __init__(self, folder: str, *, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(folder, model=model, dtype=dtype)
        self._device = device
        self._source: Iterable[tuple[str, Tensor]] | None = self._own(model)

    def write(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing is copied before a server asks for it."""
        self._source = source

    async def send(self, server: Server, client: httpx.AsyncClient) -> None:
        source, self._source = self._source, None
        if source is None:
            raise RolloutError(f"{server} needs weights, but the last ones are gone: load them again")
        await server.receive(client, self._messages(source))
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # give back what the server has let go of

    async def _messages(self, source: Iterable[tuple[str, Tensor]]) -> AsyncIterator[dict[str, Any]]:
        """Fill each bucket on another thread, so that tools go on meanwhile."""
        buckets = self._buckets(source)

        def fill() -> dict[str, Any] | None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own, and sharded weights are gathered there
            with torch.no_grad():
                return next(buckets, None)

        while (message := await asyncio.to_thread(fill)) is not None:
            yield message

    def _buckets(self, source: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """Fill the buffer, and describe what is in it as vLLM expects."""
        buffer = self._empty(BUCKET_BYTES // self._dtype.itemsize)
        held: dict[str, torch.Size] = {}
        used = 0
        for given, tensor in source:
            for name in self._names(given):
                size = tensor.numel()
                if held and used + size > buffer.numel():
                    yield self._message(buffer, held)
                    held, used = {}, 0
                if size > buffer.numel():
                    buffer = self._empty(size)
                buffer[used : used + size].view(tensor.shape).copy_(tensor.detach())
                held[name] = tensor.shape
                used += size
        if held:
            yield self._message(buffer, held)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def _message(self, buffer: Tensor, held: Mapping[str, torch.Size]) -> dict[str, Any]:
        return {
            "names": list(held),
            "dtype_names": [str(self._dtype).removeprefix("torch.")] * len(held),
            "shapes": [list(shape) for shape in held.values()],
            "tensor_sizes": [shape.numel() * self._dtype.itemsize for shape in held.values()],  # in bytes
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(share(buffer))).decode(),
        }


def share(buffer: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return where another process finds the buffer, by GPU. Each result may be read once."""
    torch.cuda.synchronize(buffer.device)
    _, place = reduce_tensor(buffer.view(torch.uint8))
    return {str(torch.cuda.get_device_properties(buffer.device).uuid): place}

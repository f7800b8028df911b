"""Stands in for CUDA IPC where there is no GPU: the place of a buffer is a file in shared memory.

The tests call `share`. vLLM imports this file into its worker (`--worker-extension-cls cpu_ipc.Reader`, with this
folder on PYTHONPATH), where it replaces the three functions of torch that vLLM's weight transfer needs a GPU for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

GPU = "GPU-0"


class Buffers:
    """Overwrites one file, so that a reader who keeps a bucket too long sees the next one."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="agent-r1-test-")  # noqa: SIM115

    def share(self, buffer: Tensor) -> dict[str, tuple[Any, ...]]:
        content = buffer.view(torch.uint8)
        Path(self._file.name).write_bytes(content.numpy().tobytes())
        return {GPU: (self._file.name, content.numel(), None, None, None, None, "replaced by the reader's device")}


def rebuild(path: str, size: int, *_: Any) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class Reader:
    """What vLLM adds to its worker: nothing."""


if __name__ == "cpu_ipc":  # in vLLM's worker
    from torch.multiprocessing import reductions

    setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=GPU))  # noqa: B010 (for mypy)
    setattr(torch.accelerator, "synchronize", lambda *_: None)  # noqa: B010
    setattr(reductions, "rebuild_cuda_tensor", rebuild)  # noqa: B010

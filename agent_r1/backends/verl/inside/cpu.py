"""Lets verl run on a machine without GPUs: adds a platform, and names that torch accepts.

Used with verl.cpu=true only. Ray gets a number of GPUs to hand out, although there are none.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
import torch.distributed.fsdp
from torch.distributed.fsdp import OffloadPolicy
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

ANSWERS: dict[str, Any] = {  # functions of torch.cuda that verl calls and torch.cpu lacks
    **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), 0),
    "mem_get_info": (8 << 30, 16 << 30),
    "get_device_name": "cpu",
}


class CpuModule(types.ModuleType):
    """torch.cpu with the functions of torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        return lambda *args, **kwargs: ANSWERS.get(name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "generic"
    device_module = CpuModule("verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None: ...

    def synchronize(self, index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def prepare() -> None:
    """Let torch accept verl's calls on a machine without GPUs."""
    start = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return start("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)  # one device, named twice

    torch.distributed.init_process_group = init_process_group
    # verl moves a reference model to pinned host memory. Here it is in host memory anyway, and nothing can be pinned.
    unpinned: Any = lambda pin_memory=True: OffloadPolicy()  # noqa: E731
    setattr(torch.distributed.fsdp, "CPUOffloadPolicy", unpinned)  # noqa: B010 (mypy takes the name for a type)

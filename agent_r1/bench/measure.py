"""Clocks and yardsticks: timed calls, memory, and what this device copies and multiplies per second."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")
GIB = 2**30


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Spent:
    """What one call took."""

    seconds: float
    added_bytes: int  # the most it had allocated on the GPU beyond what was there before; 0 on a CPU


def spend(work: Callable[[], object], device: torch.device) -> Spent:
    synchronize(device)
    before = _reset_peak(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    seconds = time.perf_counter() - began
    added = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return Spent(seconds=seconds, added_bytes=added)


def alternate(sides: Mapping[str, Callable[[], Result]], repeats: int) -> list[dict[str, Result]]:
    """All sides in each repeat, each repeat beginning with the next one, so that another load hits all of them."""
    names = list(sides)
    results = []
    for repeat in range(repeats):
        first = repeat % len(names)
        done = {name: sides[name]() for name in names[first:] + names[:first]}
        results.append({name: done[name] for name in names})
    return results


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more, so that one benchmark does not crowd the next."""
    gc.unfreeze()  # what was set aside for a benchmark that is over is no longer needed either
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def resident_bytes() -> int:
    """Of this process, now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read plus bytes written by a copy within the device's memory, several times the size of its caches."""
    size, calls = (2 * GIB, 20) if device.type == "cuda" else (GIB // 8, 3)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _per_call(lambda: target.copy_(source), calls, device)
    return 2 * size / seconds


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large square product of random matrices: zeros would draw less power, and run faster."""
    side, calls = (8192, 20) if device.type == "cuda" else (512, 3)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _per_call(lambda: left @ right, calls, device)


def _per_call(work: Callable[[], object], calls: int, device: torch.device) -> float:
    for _ in range(3):
        work()

    def several() -> None:
        for _ in range(calls):
            work()

    return spend(several, device).seconds / calls


def _reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)

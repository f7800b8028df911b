"""Clocks and yardsticks: timed calls, memory, and the limits of the hardware."""

from __future__ import annotations

import gc
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
class Cost:
    """Time and memory of one call."""

    seconds: float
    added_bytes: int  # peak GPU memory above the level before the call; 0 on a CPU


def measure(work: Callable[[], object], device: torch.device) -> Cost:
    cuda = device.type == "cuda"
    synchronize(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    began = time.perf_counter()
    work()
    synchronize(device)
    seconds = time.perf_counter() - began
    return Cost(seconds, torch.cuda.max_memory_allocated(device) - before if cuda else 0)


def alternate(sides: Mapping[str, Callable[[], Result]], repeats: int) -> list[dict[str, Result]]:
    """Run all sides in each repeat, rotating which goes first, so that a background load affects all of them."""
    names = list(sides)
    results = []
    for repeat in range(repeats):
        first = repeat % len(names)
        done = {name: sides[name]() for name in names[first:] + names[:first]}
        results.append({name: done[name] for name in names})
    return results


def free_memory(device: torch.device) -> None:
    """Release unreferenced memory before the next benchmark."""
    gc.unfreeze()  # objects frozen for a benchmark that has ended
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read plus bytes written by a copy within the device's memory, much larger than its caches."""
    size, calls = (2 * GIB, 20) if device.type == "cuda" else (GIB // 8, 3)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds_per_call(lambda: target.copy_(source), calls, device)


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large square product of random matrices; zeros would draw less power and run faster."""
    side, calls = (8192, 20) if device.type == "cuda" else (512, 3)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _seconds_per_call(lambda: left @ right, calls, device)


def _seconds_per_call(work: Callable[[], object], calls: int, device: torch.device) -> float:
    for _ in range(3):
        work()

    def repeat() -> None:
        for _ in range(calls):
            work()

    return measure(repeat, device).seconds / calls


def floor_tokens_per_second(
    *, sequences: int, context: float, weight_bytes: int, kv_bytes_per_token: int, bytes_per_second: float
) -> float:
    """Decoding speed if a step only read the weights and every sequence's keys and values once."""
    step_bytes = weight_bytes + sequences * context * kv_bytes_per_token
    return sequences * bytes_per_second / step_bytes

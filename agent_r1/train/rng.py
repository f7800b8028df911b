"""Global random streams and deterministic kernels.

Rows, sampling noise and shuffles are functions of (seed, step) and do not use the global streams. User code may, so
they are seeded at the start and saved with checkpoints.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return plain lists and tensors, so that a checkpoint can be read without unpickling code."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": list(random.getstate()),
        "numpy": [kind, [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    devices = state.get("cuda", [])  # empty if the state was saved on a CPU
    if torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(devices)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If `wanted`, make torch use deterministic kernels inside the block, and fail where it has none."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read once, at the first matrix product: nothing to undo later
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

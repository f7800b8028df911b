"""What makes a run repeatable beside its own seeds: the global random streams, and the choice of kernels.

User code may draw from the streams; they are seeded at the start, saved and restored with checkpoints. Nothing of ours
depends on them: rows, sampling noise and shuffles are functions of (seed, step).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Plain lists and tensors, so that a checkpoint can be read without running code from it."""
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
    devices = state.get("cuda", [])  # states from before there were any, and those of a CPU, have none
    if torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(devices)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, torch uses kernels that give the same bits every time, and refuses work for which it has none."""
    if not wanted:
        yield
        return
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    workspace = os.environ.get(CUBLAS_WORKSPACE)
    # cuBLAS reads it once, with the first matrix product on a GPU; so enter before there is one.
    os.environ[CUBLAS_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        if workspace is None:
            del os.environ[CUBLAS_WORKSPACE]
        else:
            os.environ[CUBLAS_WORKSPACE] = workspace

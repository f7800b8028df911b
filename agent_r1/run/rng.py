"""The global random streams that user code may draw from: seeded at the start, saved and restored with checkpoints.

Nothing of ours depends on them: rows, sampling noise and shuffles are functions of (seed, step).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


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
    }


def restore_rng(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])

"""Credit assignment: rewards in, advantages out.

Pure functions of small tensors. Nothing here knows about tokens, models or trajectories, so every formula can be
checked by hand; `algorithms.py` reads the rewards off the trajectories and spreads the results over tokens.

Shape suffixes: G = trajectories in one group.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_centered(rewards_G: Tensor, *, divide_by_std: bool, eps: float = 1e-6) -> Tensor:
    """GRPO (arXiv:2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / (std(r) + eps).

    `divide_by_std=False` is Dr.GRPO (arXiv:2503.20783), which drops the division because it over-weights groups that
    are almost all right or almost all wrong. A group of one has nothing to compare with and gets advantage 0, not its
    raw reward.

    The standard deviation is the unbiased one (divide by G - 1), torch's default; the biased one would scale every
    advantage of a group of G by sqrt(G / (G - 1)) and change nothing else.
    """
    # Tested rather than computed: the mean of equal floats may differ from them by rounding, and dividing that residue
    # by a standard deviation of the same size would turn it into a training signal.
    if rewards_G.numel() == 0 or bool(rewards_G.min() == rewards_G.max()):
        return torch.zeros_like(rewards_G)
    centered_G = rewards_G - rewards_G.mean()
    return centered_G / (rewards_G.std() + eps) if divide_by_std else centered_G

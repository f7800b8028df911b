"""Advantage formulas: rewards in, advantages out.

Pure functions of small tensors. Nothing here knows about tokens, models or trajectories, so every formula can be
checked by hand; `estimators.py` reads rewards off trajectories and spreads the results over tokens.

Shape suffixes: G = trajectories in one group, K = decisions of one trajectory in order (its steps, or its tokens),
N = any set of numbers that is normalised together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from agent_r1.learn.rewards import differ_by_rounding

# Lower bound of every standard deviation used as a divisor, in units of the reward (verl's whitening and TRL's group
# scale use the same). Smaller differences stay small instead of being scaled up to 1.
MIN_STD = 1e-4


def standardize(values_N: Tensor, returns_N: Tensor | None = None) -> Tensor:
    """(x - mean) / max(std, MIN_STD); see `per_std`."""
    return per_std(values_N - values_N.mean(), values_N, returns_N)


def per_std(advantages_G: Tensor, values_N: Tensor, returns_N: Tensor | None = None) -> Tensor:
    """Divide advantages by max(std of the values, MIN_STD). The only place where credit is divided by a deviation.

    Without signal the result is exactly 0. `returns_N` are the returns before a critic's baseline and a KL penalty were
    subtracted (default: the values). If they are all equal, the values differ only by critic error or KL, and dividing
    that by its own standard deviation would turn it into a full-size update.
    """
    if all_equal(values_N) or (returns_N is not None and all_equal(returns_N)):
        return torch.zeros_like(advantages_G)
    return advantages_G / values_N.std().clamp(min=MIN_STD)


def group_centered(returns_G: Tensor, *, divide_by_std: bool, before_kl_G: Tensor | None = None) -> Tensor:
    """GRPO (arXiv:2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r), with the unbiased std (G - 1).

    `divide_by_std=False` is Dr.GRPO (arXiv:2503.20783), which drops the division because it over-weights groups that
    are almost all right or almost all wrong. A group of one has nothing to compare with and gets advantage 0, not its
    raw reward.
    """
    if divide_by_std:
        return standardize(returns_G, before_kl_G)
    return torch.zeros_like(returns_G) if all_equal(returns_G) else returns_G - returns_G.mean()


def leave_one_out(returns_G: Tensor) -> Tensor:
    """RLOO (arXiv:2402.14740): A_i = r_i - mean of the others. A group of one has no others and gets 0."""
    if all_equal(returns_G):
        return torch.zeros_like(returns_G)
    others_G = (returns_G.sum() - returns_G) / (returns_G.numel() - 1)
    return returns_G - others_G


def discounted_return(rewards_K: Tensor, *, gamma: float | Sequence[float]) -> Tensor:
    """G_k = r_k + gamma_k * G_{k+1}: the return from each decision on."""
    return gae(rewards_K, torch.zeros_like(rewards_K), bootstrap=0.0, gamma=gamma, lam=1.0)


def gae(rewards_K: Tensor, values_K: Tensor, *, bootstrap: float, gamma: float | Sequence[float], lam: float) -> Tensor:
    """Generalised advantage estimation (arXiv:1506.02438) over the decisions of one trajectory.

    `values_K[k]` is V of the state in which decision k was taken. `bootstrap` is V of the state after the last one: 0
    if the episode terminated, the critic's estimate if it was truncated. Decisions are the tokens of the policy (PPO)
    or its whole responses (StepPO, arXiv:2604.18401), never tool text. `gamma` may be a list: gamma[k] discounts what
    follows decision k.
    """
    rewards, values = rewards_K.tolist(), values_K.tolist()  # a Python loop over tensor elements is far slower
    gammas = [gamma] * len(rewards) if isinstance(gamma, float | int) else list(gamma)
    advantages = [0.0] * len(rewards)
    next_value, running = bootstrap, 0.0
    for k in reversed(range(len(rewards))):
        delta = rewards[k] + gammas[k] * next_value - values[k]
        running = delta + gammas[k] * lam * running
        advantages[k] = running
        next_value = values[k]
    return torch.tensor(advantages, dtype=rewards_K.dtype)


def match_states(states: Sequence[Hashable], *, similarity: float | None) -> list[int]:
    """GiGPO's anchor states (arXiv:2505.10978): equal states get the same number, counted from 0.

    With `similarity`, a state also joins the first earlier group whose first member is at least that similar
    (`difflib` ratio, 0 to 1).
    """
    numbers: list[int] = []
    known: dict[Hashable, int] = {}
    firsts: list[Hashable] = []
    for state in states:
        number = known.get(state)
        if number is None and similarity is not None:
            number = _first_alike(firsts, state, similarity)
        if number is None:
            number = len(firsts)
            firsts.append(state)
        known[state] = number
        numbers.append(number)
    return numbers


def all_equal(values_N: Tensor) -> bool:
    """Return True if no two numbers differ by more than rounding.

    The mean of equal floats may differ from them by rounding, and dividing that residue by a standard deviation of the
    same size would make it a signal.
    """
    return values_N.numel() == 0 or differ_by_rounding(float(values_N.min()), float(values_N.max()))


def _first_alike(firsts: Sequence[Any], state: Any, threshold: float) -> int | None:
    matcher = SequenceMatcher(None, autojunk=False)  # autojunk would silently ignore frequent elements
    matcher.set_seq2(state)  # indexed once; the others are compared with it
    for number, first in enumerate(firsts):
        matcher.set_seq1(first)
        # Cheap upper bounds first: the ratio itself takes time in proportion to the product of both lengths.
        if all(bound() >= threshold for bound in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
            return number
    return None

"""Drawing tokens: the distribution, the log-probs, and independence from the rest of the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.engines.base import Sampling
from agent_r1.engines.local.sampling import sample, uniform_stream

PLAIN = Sampling(max_tokens=1)
# log of 0.5, 0.3, 0.15, 0.05, in the order of ids 2, 0, 3, 1
LOGITS = torch.tensor([0.3, 0.05, 0.5, 0.15]).log()


def draw(uniform: float, sampling: Sampling, logits: torch.Tensor = LOGITS) -> tuple[int, float]:
    tokens, logprobs, _ = sample(logits[None], [sampling], [uniform])
    return tokens[0], round(math.exp(logprobs[0]), 6)


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        # cumulative in id order: 0.3, 0.35, 0.85, 1.0
        ({}, {0.29: (0, 0.3), 0.31: (1, 0.05), 0.84: (2, 0.5), 0.86: (3, 0.15)}),
        # the most likely one, with its probability in the plain softmax
        ({"temperature": 0.0, "top_k": 1, "top_p": 0.1}, {0.99: (2, 0.5)}),
        # temperature 0.5 squares the odds: 0.09, 0.0025, 0.25, 0.0225, sum 0.365
        ({"temperature": 0.5}, {0.0: (0, round(0.09 / 0.365, 6))}),
        # ids 0 and 2 stay: 0.3 / 0.8, 0.5 / 0.8
        ({"top_k": 2}, {0.37: (0, 0.375), 0.38: (2, 0.625)}),
        # 0.5 < 0.6, so id 0 is still needed; then 0.8 >= 0.6
        ({"top_p": 0.6}, {0.0: (0, 0.375)}),
        ({"top_p": 0.4}, {0.0: (2, 1.0)}),
        # after top_k=2 id 2 has 0.625 >= 0.6, alone; without it 0.5 would not have been enough
        ({"top_k": 2, "top_p": 0.6}, {0.0: (2, 1.0)}),
    ],
    ids=str,
)
def test_draws_by_hand(settings: dict[str, Any], draws: dict[float, tuple[int, float]]) -> None:
    assert {uniform: draw(uniform, Sampling(max_tokens=1, **settings)) for uniform in draws} == draws


def test_a_uniform_number_just_below_one_never_picks_a_filtered_token() -> None:
    largest = np.nextafter(1.0, 0.0)
    for seed in range(50):
        logits = torch.randn(101, generator=torch.Generator().manual_seed(seed)) * 5
        token, probability = draw(largest, Sampling(max_tokens=1, top_k=7), logits)
        assert probability > 0
        assert token in logits.topk(7).indices


def test_the_input_is_left_alone() -> None:
    logits = LOGITS.double()[None]
    before = logits.clone()
    sample(logits, [Sampling(max_tokens=1, top_k=1)], [0.5])
    assert torch.equal(logits, before)


samplings = st.builds(
    Sampling,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.3]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(samplings, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=6), st.integers(0, 99))
def test_a_row_draws_the_same_alone_and_in_any_batch(rows: list[tuple[Sampling, float]], seed: int) -> None:
    logits = torch.randn(len(rows), 23, generator=torch.Generator().manual_seed(seed))
    together = sample(logits, [s for s, _ in rows], [u for _, u in rows])
    for i, (sampling, uniform) in enumerate(rows):
        alone = sample(logits[i : i + 1], [sampling], [uniform])
        assert (together[0][i], together[1][i]) == (alone[0][0], alone[1][0])


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(max_tokens=1, temperature=1.4, top_k=6, top_p=0.9)])
def test_frequencies_follow_the_reported_probabilities(sampling: Sampling) -> None:
    count, logits = 20_000, torch.randn(12, generator=torch.Generator().manual_seed(0)).expand(20_000, 12)
    tokens, logprobs, _ = sample(logits, [sampling] * count, uniform_stream(3, count).tolist())
    seen = {token: (tokens.count(token), math.exp(logprobs[tokens.index(token)])) for token in set(tokens)}
    assert sum(p for _, p in seen.values()) == pytest.approx(1.0)
    chi_square = sum((n - count * p) ** 2 / (count * p) for n, p in seen.values())
    # With k - 1 degrees of freedom the statistic has mean k - 1 and variance 2 (k - 1): six deviations are never noise.
    freedom = len(seen) - 1
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom)


def test_noise_depends_on_the_seed_and_the_index_only() -> None:
    assert uniform_stream(5, 3).tolist() == uniform_stream(5, 9)[:3].tolist()
    assert uniform_stream(5, 3).tolist() != uniform_stream(6, 3).tolist()
    assert uniform_stream(-1, 1).shape == (1,)  # any integer is a seed
    assert uniform_stream(5, 3).tolist() == np.random.Generator(np.random.Philox(key=5)).random(3).tolist()

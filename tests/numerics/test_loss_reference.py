"""The losses of the table equal their slow references, whatever packs the tokens come in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.learn.algorithms import ALGORITHMS, get_algorithm
from agent_r1.learn.losses import Counts, LossInputs, LossOutput, supervised_loss, value_loss
from tests.numerics import loss_reference
from tests.numerics.loss_reference import REFERENCES, Slopes, Token

AGGREGATIONS = ["token", "step", "trajectory", "constant"]
Episodes = list[list[list[Token]]]
seeds = st.integers(0, 1_000_000)


def random_episodes(rng: random.Random) -> Episodes:
    """Ragged, with empty steps and trajectories; ratios from equal to far outside every clip range."""
    spread = rng.choice([0.0, 1e-4, 3e-4, 0.1, 0.3, 2.0])

    def token(advantage: float) -> Token:
        logprob = rng.uniform(-6, 0)
        return Token(
            logprob=logprob,
            old=logprob - rng.gauss(0, spread),
            advantage=advantage if rng.random() < 0.8 else rng.choice([0.0, rng.gauss(0, 2)]),
            importance=rng.choice([1.0, 1.0, 0.0, rng.uniform(0, 2)]),
        )

    def step() -> list[Token]:
        advantage = rng.gauss(0, 2)
        return [token(advantage) for _ in range(rng.randint(0, 5))]

    episodes = [[step() for _ in range(rng.randint(0, 4))] for _ in range(rng.randint(1, 4))]
    return [*episodes, [[token(1.0)]]]  # never nothing at all


def by_package(
    loss: Callable[[LossInputs], LossOutput], episodes: Episodes, rng: random.Random
) -> tuple[float, Slopes]:
    """The steps dealt to packs at random, each pack its own call; float64 throughout."""
    places = [(i, k) for i, steps in enumerate(episodes) for k, step in enumerate(steps) if step]
    rng.shuffle(places)
    cut = rng.randint(0, len(places))
    counts = Counts(
        tokens=sum(len(episodes[i][k]) for i, k in places),
        steps=len(places),
        trajectories=len({i for i, _ in places}),
    )
    total = 0.0
    slopes: Slopes = [[[] for _ in steps] for steps in episodes]
    for part in (places[:cut], places[cut:]):
        tokens = [token for i, k in part for token in episodes[i][k]]
        logprobs_T = doubles([token.logprob for token in tokens]).requires_grad_()
        output = loss(
            LossInputs(
                logprobs_T=logprobs_T,
                old_logprobs_T=doubles([token.old for token in tokens]),
                advantages_T=doubles([token.advantage for token in tokens]),
                importance_T=doubles([token.importance for token in tokens]),
                step_ids_T=torch.tensor([n for n, (i, k) in enumerate(part) for _ in episodes[i][k]], dtype=torch.long),
                step_sizes_T=doubles([len(episodes[i][k]) for i, k in part for _ in episodes[i][k]]),
                trajectory_sizes_T=doubles([sum(map(len, episodes[i])) for i, k in part for _ in episodes[i][k]]),
                counts=counts,
            )
        )
        output.loss.backward()
        assert logprobs_T.grad is not None
        total += output.loss.item()
        numbers = iter(logprobs_T.grad.tolist())
        for i, k in part:
            slopes[i][k] = [next(numbers) for _ in episodes[i][k]]
    return total, slopes


def doubles(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def assert_equal(got: tuple[float, Slopes], expected: tuple[float, Slopes]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-12)
    flat_got, flat_expected = ([x for steps in s for step in steps for x in step] for s in (got[1], expected[1]))
    assert flat_got == pytest.approx(flat_expected, rel=1e-12, abs=1e-12)


def test_every_row_of_the_table_has_a_reference() -> None:
    assert REFERENCES.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
@given(seed=seeds)
@settings(max_examples=25, deadline=None)
def test_a_name_alone_has_the_loss_and_gradient_of_its_reference(name: str, seed: int) -> None:
    rng = random.Random(seed)
    episodes = random_episodes(rng)
    assert_equal(by_package(get_algorithm(name).loss, episodes, rng), REFERENCES[name](episodes))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=seeds, name=st.sampled_from(sorted(ALGORITHMS)), horizon=st.integers(1, 50))
@settings(max_examples=25, deadline=None)
def test_every_aggregation_has_the_loss_and_gradient_of_its_reference(
    aggregation: str, seed: int, name: str, horizon: int
) -> None:
    rng = random.Random(seed)
    episodes = random_episodes(rng)
    # the horizon belongs to one aggregation alone, and is refused with the others
    row = get_algorithm(name, aggregation=aggregation, **({"horizon": horizon} if aggregation == "constant" else {}))
    expected = REFERENCES[name](episodes, aggregation=aggregation, horizon=horizon)
    assert_equal(by_package(row.loss, episodes, rng), expected)


@given(
    seed=seeds,
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 3.0),
    dual=st.one_of(st.none(), st.floats(1.5, 10.0)),
)
@settings(max_examples=50, deadline=None)
def test_any_clip_range_has_the_loss_and_gradient_of_its_reference(
    seed: int, low: float, high: float, dual: float | None
) -> None:
    rng = random.Random(seed)
    episodes = random_episodes(rng)
    row = get_algorithm("ppo", clip_low=low, clip_high=high, dual_clip=dual)
    assert_equal(by_package(row.loss, episodes, rng), REFERENCES["ppo"](episodes, low=low, high=high, dual=dual))
    row = get_algorithm("gspo", clip_low=low, clip_high=high)
    assert_equal(by_package(row.loss, episodes, rng), REFERENCES["gspo"](episodes, low=low, high=high))


@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_the_supervised_loss_is_the_likelihood(seed: int) -> None:
    rng = random.Random(seed)
    episodes = random_episodes(rng)
    assert_equal(by_package(supervised_loss, episodes, rng), loss_reference.likelihood(episodes))


@given(seed=seeds, clip=st.one_of(st.none(), st.floats(0.01, 2.0)))
@settings(max_examples=50, deadline=None)
def test_the_value_loss_equals_its_reference(seed: int, clip: float | None) -> None:
    rng = random.Random(seed)
    values = [rng.gauss(0, 1) for _ in range(rng.randint(1, 12))]
    old = [value + rng.gauss(0, rng.choice([0.1, 2.0])) for value in values]
    targets = [rng.choice([None, rng.gauss(0, 1)]) for _ in values]
    asked = sum(target is not None for target in targets)
    leaf = doubles(values).requires_grad_()
    column = doubles([float("nan") if target is None else target for target in targets])
    loss = value_loss(leaf, doubles(old), column, num_targets=asked, clip=clip)
    loss.backward()
    expected_loss, expected = loss_reference.value_loss(values, old, targets, clip=clip)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12, abs=1e-12)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)

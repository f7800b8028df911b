"""Every row of the table against plain loops, on ragged batches."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from agent_r1.learn.algorithms import ALGORITHMS, Algorithm, get_algorithm
from agent_r1.learn.rewards import ProcessScaling, RewardShaper
from agent_r1.types import CreditedTrajectory, Trajectory
from tests.learn.builders import steady_kl
from tests.learn.episodes import SOUND, Batch, batches, flat, settings
from tests.numerics.credit_reference import (
    REFERENCES,
    Episode,
    Shaping,
    counts,
    process_per_token,
    published_scale,
    read,
)


def expected(batch: Batch, algorithm: Algorithm, shaping: Shaping | None = None) -> list[Episode]:
    groups = read(batch.groups, shaping or Shaping(), with_greedy=algorithm.needs_greedy)
    stop = {one.trajectory_id: one.stop.value for group in batch.groups for one in group.trajectories}
    for episode in flat(groups):
        episode.values = flat(batch.values[episode.name].per_token)
        episode.bootstrap = batch.values[episode.name].bootstrap if stop[episode.name].startswith("max_") else 0.0
    REFERENCES[algorithm.name](groups, algorithm.settings)
    return flat(groups)


def agree(got: list[CreditedTrajectory], wanted: list[Episode]) -> None:
    assert [item.trajectory.trajectory_id for item in got] == [episode.name for episode in wanted]
    for item, episode in zip(got, wanted, strict=True):
        assert flat(item.advantages) == pytest.approx(episode.advantages, rel=1e-9, abs=1e-9)
        assert [len(row) for row in item.advantages] == [len(s.response_ids) for s in item.trajectory.steps]
        assert (item.value_targets is None) == (episode.targets == [])
        for target, other in zip(flat(item.value_targets or []), episode.targets, strict=True):
            assert (target is None) == (other is None)
            assert other is None or target == pytest.approx(other, rel=1e-9, abs=1e-9)


def test_every_row_of_the_table_has_a_reference() -> None:
    assert REFERENCES.keys() == ALGORITHMS.keys()


def with_summaries(batch: Batch, chance: random.Random) -> Batch:
    """The same episodes, of which some steps were asked for by a context policy."""

    def mark(one: Trajectory) -> Trajectory:
        return replace(one, steps=[replace(s, summary="whole") if chance.random() < 0.4 else s for s in one.steps])

    groups = [
        replace(group, trajectories=list(map(mark, group.trajectories)), greedy=group.greedy and mark(group.greedy))
        for group in batch.groups
    ]
    return replace(batch, groups=groups)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(data=st.data(), batch=batches(), seed=st.none() | st.integers(0, 2**32))
@budget(max_examples=100, deadline=None)
def test_credit_is_what_the_plain_loops_say(name: str, data: st.DataObject, batch: Batch, seed: int | None) -> None:
    algorithm = get_algorithm(name, **data.draw(settings(ALGORITHMS[name])))
    batch = batch if seed is None else with_summaries(batch, random.Random(seed))
    agree(batch.credit(algorithm), expected(batch, algorithm))


@pytest.mark.parametrize("name", ["grpo", "remax", "reinforce++", "steppo"])
@given(data=st.data(), batch=batches(), scaling=st.sampled_from(["raw", "ignored", "largest_return"]))
@budget(max_examples=60, deadline=None)
def test_shaped_credit_is_what_the_plain_loops_say(
    name: str, data: st.DataObject, batch: Batch, scaling: ProcessScaling
) -> None:
    algorithm = ALGORITHMS[name]
    batch = with_summaries(batch, random.Random(0)) if data.draw(st.booleans()) else batch
    weight, coef = data.draw(st.sampled_from([0.5, 1.0])), data.draw(st.sampled_from([0.125, 1.0]))
    limit, buffer, penalty = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0.0, 0.5, 1.0])), 0.75
    ratios = batch.kl if data.draw(st.booleans()) else None
    scales = {"raw": lambda rows: 1.0, "ignored": lambda rows: 0.0, "largest_return": published_scale}

    got = batch.credit(
        algorithm,
        shaper=RewardShaper(
            process=scaling,
            process_weight=weight,
            overlong_limit=limit,
            overlong_buffer=buffer,
            overlong_penalty=penalty,
            kl=None if ratios is None else steady_kl(coef),
        ),
        kl=ratios,
    )
    shaping = Shaping(
        process_scale=lambda rows: weight * scales[scaling](rows),
        overlong=(limit, buffer, penalty),
        kl={one: flat(rows) for one, rows in (ratios or {}).items()},
        kl_coef=coef,
    )
    agree(got, expected(batch, algorithm, shaping))


@given(first=batches(stops=SOUND), second=batches(stops=SOUND))
@budget(max_examples=60, deadline=None)
def test_the_running_scale_is_the_deviation_of_all_sums_so_far(first: Batch, second: Batch) -> None:
    shaper, seen = RewardShaper(process="running_std"), []
    for batch in (first, second):
        played = [one for group in batch.groups for one in group.trajectories if counts(one)]
        placed = [process_per_token(one) for one in played]
        seen += [sum(row[start:]) for row in placed for start in range(len(row))]
        spread = stdev(seen) if len(seen) > 1 else 0.0
        scale = 1 / spread if spread > 1e-6 else 1.0
        shaped = shaper(played)
        for one, row, got in zip(played, placed, shaped, strict=True):
            wanted = [scale * reward for reward in row]
            wanted[-1] += one.outcome_reward
            assert flat(got) == pytest.approx(wanted, rel=1e-9, abs=1e-9)

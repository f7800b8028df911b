"""Models that score: episodes reach them in batches, and failures stay with those at fault."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1 import guard
from agent_r1.errors import ConfigError
from agent_r1.rollout.rewards import attempts
from agent_r1.rollout.rewards.attempts import Attempts, ScoringError, TransientError
from agent_r1.rollout.rewards.reward_model import BatchedReward, BatchScorer, Item
from agent_r1.rollout.scoring import Scorer
from agent_r1.types import Group, Step, StopReason, Trajectory
from tests.chatml import row
from tests.replaced import replaced


def trajectory(text: str) -> Trajectory:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text=text)
    return Trajectory(row_id="r", trajectory_id=text, steps=[step], stop=StopReason.ANSWERED)


class Recorder:
    """A scorer that answers by rule and remembers its batches. The score of an episode is its text as a number."""

    def __init__(self, answer: Callable[[list[float], int], Any] = lambda values, attempt: values) -> None:
        self.batches: list[list[float]] = []
        self._answer = answer

    async def score(self, items: Sequence[Item]) -> Sequence[float]:
        values = [float(trajectory.final_text) for _, trajectory in items]
        self.batches.append(values)
        answer = self._answer(values, len(self.batches))
        return await answer if asyncio.iscoroutine(answer) else answer  # type: ignore[no-any-return]


def score(reward: Any, numbers: Sequence[float], timeout: float = 20.0) -> list[Trajectory]:
    group = Group(row=row(), trajectories=[trajectory(str(number)) for number in numbers])
    [scored] = asyncio.run(Scorer(reward=reward, timeout=timeout)([group]))
    return scored.trajectories


def batched(scorer: BatchScorer, **settings: Any) -> BatchedReward:
    return BatchedReward(scorer, **({"backoff_seconds": 0.001, "seconds_per_attempt": 20.0} | settings))


def test_concurrent_episodes_are_scored_in_full_batches_and_in_order() -> None:
    scorer = Recorder()
    scored = score(batched(scorer, max_batch=8), range(20))
    assert [t.outcome_reward for t in scored] == list(range(20))
    assert [len(batch) for batch in scorer.batches] == [8, 8, 4]


def test_only_so_many_batches_are_at_the_scorer_at_once() -> None:
    active, most = 0, 0

    class Counting(Recorder):
        async def score(self, items: Sequence[Item]) -> Sequence[float]:
            nonlocal active, most
            active += 1
            most = max(most, active)
            await asyncio.sleep(0.002)
            active -= 1
            return await super().score(items)

    scored = score(batched(Counting(), max_batch=1, max_concurrent=3), range(12))
    assert [t.outcome_reward for t in scored] == list(range(12))
    assert most == 3


def test_the_same_reward_serves_one_event_loop_after_the_other_and_keeps_none_alive() -> None:
    reward = batched(Recorder())
    loops = []

    async def once() -> float:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        return await reward(row(), trajectory("7"))

    assert [asyncio.run(once()) for _ in range(3)] == [7.0, 7.0, 7.0]
    gc.collect()
    assert [loop() for loop in loops] == [None, None, None]


@pytest.mark.parametrize(
    "error", [TransientError("busy"), ConnectionResetError("gone"), TimeoutError("slow")], ids=repr
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    def twice_bad(values: list[float], attempt: int) -> list[float]:
        if attempt < 3:
            raise error
        return values

    scorer = Recorder(twice_bad)
    assert [t.outcome_reward for t in score(batched(scorer, attempts=3), [1, 2])] == [1, 2]
    assert scorer.batches == [[1, 2]] * 3


def test_the_last_failure_is_told_to_the_episodes_of_its_batch_only() -> None:
    def bad_for_two(values: list[float], attempt: int) -> list[float]:
        if 2.0 in values:
            raise ConnectionError("no route to the model")
        return values

    scorer = Recorder(bad_for_two)
    scored = score(batched(scorer, max_batch=2, attempts=2), [0, 1, 2, 3, 4, 5])
    assert [t.stop.is_failure for t in scored] == [False, False, True, True, False, False]
    assert scored[3].error is not None
    assert "failed after 2 attempts; the last: ConnectionError: no route to the model" in scored[3].error
    assert scorer.batches.count([2, 3]) == 2  # and not by itself: what is down is down for every episode
    assert [3] not in scorer.batches


def test_the_log_has_one_short_traceback_per_episode_of_a_failed_batch(caplog: pytest.LogCaptureFixture) -> None:
    def gone(values: list[float], attempt: int) -> Any:
        raise ConnectionError("no route to the model")

    score(batched(Recorder(gone), max_batch=32, attempts=1), range(32))
    frames = {record.getMessage().count("File ") for record in caplog.records}
    assert len(caplog.records) == 32
    assert len(frames) == 1  # does not grow from one to the next


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_only_the_episodes_at_fault_fail_of_a_batch(drawn: tuple[int, set[int]]) -> None:
    count, bad = drawn

    def chokes(values: list[float], attempt: int) -> list[float]:
        if bad & set(map(int, values)):
            raise KeyError("cannot read it")
        return values

    scored = score(batched(Recorder(chokes), max_batch=count), range(count))
    assert {index for index, t in enumerate(scored) if t.stop.is_failure} == bad
    assert all(t.outcome_reward == index for index, t in enumerate(scored) if index not in bad)
    assert all("KeyError: 'cannot read it'" in (scored[index].error or "") for index in bad)


def test_one_bad_episode_is_found_by_halving() -> None:
    scorer = Recorder(lambda values, attempt: [1 / (value - 5) for value in values])  # not defined for 5
    score(batched(scorer, max_batch=8), range(8))
    assert scorer.batches == [[*range(8)], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [4], [5], [6, 7]]


def test_a_scorer_can_say_which_episode_failed() -> None:
    scorer = Recorder(lambda values, attempt: [values[0], ValueError("too long"), values[2]])
    scored = score(batched(scorer), [1, 2, 3])
    assert [t.stop.is_failure for t in scored] == [False, True, False]
    assert "Recorder could not score this episode: ValueError: too long" in (scored[1].error or "")
    assert len(scorer.batches) == 1


def test_the_next_attempt_begins_when_the_one_that_was_given_up_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CANCEL_SECONDS", 0.01)  # what takes longer to stop is left behind, and still computes
    events: list[str] = []

    async def slow_to_stop(values: list[float]) -> list[float]:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            events.append("ended")
        return values

    def answer(values: list[float], attempt: int) -> Any:
        events.append("began")
        return slow_to_stop(values) if attempt == 1 else values

    assert [t.outcome_reward for t in score(batched(Recorder(answer), seconds_per_attempt=0.05), [5])] == [5]
    assert events == ["began", "ended", "began"]


def test_a_wrong_number_of_scores_is_an_error_that_says_so() -> None:
    scored = score(batched(Recorder(lambda values, attempt: values[1:])), [1, 2, 3])
    assert all("0 scores came back for a batch of 1; return one per episode" in (t.error or "") for t in scored)


@pytest.mark.parametrize("scores", [{0: 0.5}, {0.5}, None, 1.0, iter([1.0])])
def test_what_is_no_list_of_scores_is_never_taken_for_one(scores: Any) -> None:
    [failed] = score(batched(Recorder(lambda values, attempt: scores)), [1])
    assert failed.stop is StopReason.ERROR
    assert f"score returned {type(scores).__name__} " in (failed.error or "")
    assert "; return a list of numbers" in (failed.error or "")


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "1"])
def test_a_score_that_is_no_finite_number_fails_its_own_episode(bad: Any) -> None:
    scored = score(batched(Recorder(lambda values, attempt: [values[0], bad, values[2]])), [1, 2, 3])
    assert [t.stop.is_failure for t in scored] == [False, True, False]
    assert f"returned {bad!r} for this episode; scores must be finite numbers" in (scored[1].error or "")


def test_an_episode_that_ran_out_of_time_does_not_hold_up_its_batch() -> None:
    async def run() -> float:
        scorer = Recorder()
        reward = batched(scorer, max_batch=2)
        calls = [asyncio.create_task(reward(row(), trajectory(text))) for text in ("1", "2")]
        while not scorer.batches:
            await asyncio.sleep(0)
        calls[0].cancel()
        return await calls[1]

    assert asyncio.run(run()) == 2.0


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_batch=0"):
        BatchedReward(Recorder(), max_batch=0)
    with pytest.raises(ConfigError, match="attempts=0"):
        BatchedReward(Recorder(), attempts=0)
    with pytest.raises(ConfigError, match="seconds_per_attempt=nan"):
        BatchedReward(Recorder(), seconds_per_attempt=math.nan)
    sync = SimpleNamespace(score=lambda items: [1.0] * len(items))
    for scorer in (object(), Recorder, sync):
        with pytest.raises(ConfigError, match="async def score"):
            BatchedReward(scorer)  # type: ignore[arg-type]


def test_waits_grow_and_do_not_touch_the_seeded_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def no_sleep(seconds: float) -> None:
        waits.append(seconds)

    async def busy() -> None:
        raise TransientError("busy", wait_seconds=100.0 if len(waits) == 2 else 0.0)

    before = random.getstate()
    monkeypatch.setattr(attempts, "asyncio", replaced(asyncio, sleep=no_sleep))
    with pytest.raises(ScoringError, match="it failed after 4 attempts; the last: TransientError: busy"):
        asyncio.run(Attempts(4, 1.0, 1.0).run(busy, name="it"))
    # 1, 2, 4 seconds, each times a half to one and a half; the third on top of what the server asked for
    assert 0.5 <= waits[0] <= 1.5
    assert 1 <= waits[1] <= 3
    assert 102 <= waits[2] <= 106
    assert random.getstate() == before

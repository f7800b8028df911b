"""Scoring: good rewards are kept with their parts, bad reward functions fail their own episode only."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent_r1.errors import ConfigError
from agent_r1.rollout.scoring import Scorer, check_reward_signature
from agent_r1.types import Group, Step, StopReason, TaskRow, Trajectory
from tests.chatml import row


def trajectory(name: str, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], reward=0.5, action_text=name)
    return Trajectory(row_id="r", trajectory_id=name, steps=[step], stop=stop)


def score(reward: Callable[..., Any], *trajectories: Trajectory, timeout: float = 10.0) -> list[Trajectory]:
    group = Group(row=row(reward_model={"ground_truth": "a"}), trajectories=list(trajectories))
    [scored] = asyncio.run(Scorer(reward=reward, timeout=timeout)([group]))
    return scored.trajectories


def exact(row: TaskRow, trajectory: Trajectory) -> float:
    return float(trajectory.final_text == row.ground_truth)


def test_a_float_reward_is_the_outcome_and_adds_to_the_process_rewards() -> None:
    right, wrong = score(exact, trajectory("a"), trajectory("b"))
    assert (right.outcome_reward, wrong.outcome_reward) == (1.0, 0.0)
    assert right.total_reward == 1.5  # 0.5 for the step, 1.0 for the outcome


def test_an_async_reward_with_named_parts_keeps_them() -> None:
    async def judged(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"reward": 0.75, "em": True, "format": 0.5}

    [scored] = score(judged, trajectory("a"))
    assert scored.outcome_reward == 0.75
    assert scored.reward_components == {"reward": 0.75, "em": 1.0, "format": 0.5}


def test_an_episode_that_failed_before_is_not_scored() -> None:
    [scored] = score(exact, trajectory("a", StopReason.ERROR))
    assert scored.outcome_reward == 0.0
    assert scored.stop is StopReason.ERROR


def raises(row: TaskRow, trajectory: Trajectory) -> float:
    raise KeyError("no such answer")


def panic() -> float:
    raise BaseException("panic")


def slow_server() -> float:
    raise TimeoutError("the judge's server was slow")


def sleeps(row: TaskRow, trajectory: Trajectory) -> float:
    time.sleep(5 if trajectory.final_text == "bad" else 0)
    return 1.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda row, t: math.nan, "component 'reward' is nan; rewards must be finite numbers"),
        (lambda row, t: math.inf, "is inf"),
        (lambda row, t: None, "is None"),
        (lambda row, t: "1", "is '1'"),
        (lambda row, t: {"score": 1.0}, r"needs the key 'reward'.* got \['score'\]"),
        (raises, "KeyError: 'no such answer'"),
        (lambda row, t: sys.exit(), "SystemExit"),
        (lambda row, t: panic(), "panic"),
        (lambda row, t: slow_server(), "TimeoutError: the judge's server was slow"),
    ],
)
def test_a_bad_reward_fails_its_own_episode_loudly(bad: Callable[..., Any], message: str) -> None:
    def reward(row: TaskRow, trajectory: Trajectory) -> Any:
        return bad(row, trajectory) if trajectory.final_text == "bad" else 1.0

    good, failed = score(reward, trajectory("good"), trajectory("bad"))
    assert good.outcome_reward == 1.0
    assert failed.stop is StopReason.ERROR
    assert re.search(message, failed.error or "")


def test_the_line_that_raised_is_told() -> None:
    [failed] = score(raises, trajectory("a"))
    line = raises.__code__.co_firstlineno + 1
    assert (failed.error or "").endswith(f" (test_reward.py:{line})")


def test_a_reward_that_hangs_is_left_behind() -> None:
    good, failed = score(sleeps, trajectory("good"), trajectory("bad"), timeout=0.2)
    assert good.outcome_reward == 1.0
    assert failed.error == "reward 'sleeps' did not return within 0.2 s"


def test_numbers_of_numpy_and_callable_objects_are_fine() -> None:
    class Judge:
        async def __call__(self, row: TaskRow, trajectory: Trajectory) -> Any:
            return np.float32(0.5)

    [scored] = score(Judge(), trajectory("a"))
    assert scored.outcome_reward == 0.5
    assert type(scored.outcome_reward) is float


def test_a_trajectory_waits_for_its_turn_without_losing_time() -> None:
    """Twenty rewards of 50 ms, a few at a time: each is well inside its own 0.6 s, together they are not."""

    def slow(row: TaskRow, trajectory: Trajectory) -> float:
        time.sleep(0.05)
        return 1.0

    scored = score(slow, *(trajectory(str(i)) for i in range(60)), timeout=0.6)
    assert all(t.outcome_reward == 1.0 for t in scored)


def test_a_reward_with_the_wrong_signature_is_refused_before_the_run() -> None:
    check_reward_signature(exact, "task.reward")
    with pytest.raises(ConfigError, match="must accept \\(row, trajectory\\)"):
        check_reward_signature(lambda row: 0.0, "task.reward")
    with pytest.raises(ConfigError, match="not a function"):
        check_reward_signature(3, "task.reward")

"""Rewards of named parts: totals by hand, parts reported as returned, and errors that name the part."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.errors import ConfigError
from agent_r1.guard import is_async
from agent_r1.rollout.rewards.shaping import clean_calls, gated, matches, weighted
from agent_r1.rollout.scoring import SYNC_THREADS, Scorer
from agent_r1.types import Group, Step, StopReason, TaskRow, ToolCallRecord, Trajectory
from tests.chatml import row


def call(error: str | None = None) -> ToolCallRecord:
    return ToolCallRecord(name="add", arguments={}, result="3", error=error, text_span=(0, 1))


def trajectory(*texts: str, calls: Sequence[tuple[ToolCallRecord, ...]] = ()) -> Trajectory:
    made = [*calls, *([()] * (len(texts) - len(calls)))]
    steps = [
        Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text=text, calls=of_step)
        for text, of_step in zip(texts, made, strict=True)
    ]
    return Trajectory(row_id="r", trajectory_id="t", steps=steps, stop=StopReason.ANSWERED)


def score(reward: Any, *trajectories: Trajectory, timeout: float = 20.0) -> list[Trajectory]:
    group = Group(row=row(reward_model={"ground_truth": "yes"}), trajectories=list(trajectories))
    [scored] = asyncio.run(Scorer(reward=reward, timeout=timeout)([group]))
    return scored.trajectories


def exact(row: TaskRow, trajectory: Trajectory) -> float:
    return float(trajectory.final_text == row.ground_truth)


async def half(row: TaskRow, trajectory: Trajectory) -> float:
    await asyncio.sleep(0)
    return 0.5


def constant(value: Any) -> Any:
    return lambda row, trajectory: value


def test_the_total_is_weighted_and_the_parts_are_reported_as_they_are() -> None:
    reward = weighted(answer=(exact, 2.0), format=(clean_calls, 0.1))
    scored = score(reward, trajectory("yes"), trajectory("x", "no", calls=[(call("bad JSON"),)]))
    # 2 * 1 + 0.1 * 1, and 2 * 0 + 0.1 * 0
    assert scored[0].reward_components == {"reward": 2.1, "answer": 1.0, "format": 1.0}
    assert scored[1].reward_components == {"reward": 0.0, "answer": 0.0, "format": 0.0}


def test_sync_and_async_parts_mix_and_only_sync_parts_stay_sync() -> None:
    assert not is_async(weighted(answer=(exact, 1.0)))  # the scorer runs few of those at a time
    mixed = weighted(answer=(exact, 1.0), judged=(half, -0.5))
    assert is_async(mixed)
    [scored] = score(mixed, trajectory("yes"))
    assert scored.reward_components == {"reward": 0.75, "answer": 1.0, "judged": 0.5}  # 1 - 0.5 * 0.5


def test_parts_that_wait_wait_together() -> None:
    async def run() -> Any:
        here = [asyncio.Event(), asyncio.Event()]

        async def meets(mine: int) -> float:
            here[mine].set()
            await here[1 - mine].wait()
            return 1.0

        async def first(row: TaskRow, trajectory: Trajectory) -> float:
            return await meets(0)

        async def second(row: TaskRow, trajectory: Trajectory) -> float:
            return await meets(1)

        reward: Any = weighted(first=(first, 1.0), second=(second, 1.0))
        return await asyncio.wait_for(reward(row(), trajectory("a")), timeout=20)

    assert asyncio.run(run())["reward"] == 2.0


def test_sync_parts_beside_async_ones_run_a_few_at_a_time() -> None:
    lock, active, most = threading.Lock(), 0, 0
    full = threading.Barrier(SYNC_THREADS)  # nobody leaves before so many are there

    def busy(row: TaskRow, trajectory: Trajectory) -> float:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        full.wait(timeout=20)
        time.sleep(0.02)  # one too many has the time to be seen
        with lock:
            active -= 1
        return 1.0

    # Two such parts and the parts of a part: the bound is on all of them together. 3 * 8 is a multiple of 4.
    inner = weighted(busy=(busy, 1.0), judged=(half, 1.0))
    reward = weighted(inner=(inner, 1.0), one=(busy, 1.0), two=(busy, 1.0), judged=(half, 1.0))
    scored = score(reward, *(trajectory(str(number)) for number in range(8)))
    assert [t.outcome_reward for t in scored] == [4.0] * 8  # 1.5 + 1 + 1 + 0.5
    assert most == SYNC_THREADS


def test_a_part_with_parts_counts_with_its_reward_and_reports_the_rest_under_its_name() -> None:
    inner = weighted(em=(exact, 1.0), style=(half, 0.5))
    [scored] = score(weighted(answer=(inner, 2.0)), trajectory("yes"))
    # inner: 1 + 0.5 * 0.5 = 1.25, twice of it is trained on
    assert scored.reward_components == {"reward": 2.5, "answer": 1.25, "answer/em": 1.0, "answer/style": 0.5}


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1))
def test_the_total_is_the_dot_product_of_weights_and_parts(drawn: dict[str, tuple[float, float]]) -> None:
    reward: Any = weighted(**{name: (constant(value), weight) for name, (value, weight) in drawn.items()})
    result = reward(row(), trajectory("a"))
    assert result["reward"] == pytest.approx(sum(value * weight for value, weight in drawn.values()), abs=1e-9)
    assert {name: result[name] for name in drawn} == {name: value for name, (value, _) in drawn.items()}


@pytest.mark.parametrize(
    ("answer", "form", "total"),
    [
        (1.0, 1.0, 1.0),  # -1 + 1 + 1
        (0.0, 1.0, 0.0),  # -1 + 1 + 0
        (1.0, 0.5, 0.5),  # at the threshold the answer counts: -1 + 0.5 + 1
        (1.0, 0.49, -0.51),  # below it does not: -1 + 0.49
        (1.0, 0.0, -1.0),
        (1.0, 2.5, 1.0),  # format counts at most 1
    ],
)
def test_the_gate_follows_the_published_rule(answer: float, form: float, total: float) -> None:
    reward: Any = gated(constant(answer), constant(form), threshold=0.5)
    result = reward(row(), trajectory("a"))
    assert result == {"reward": pytest.approx(total), "answer": answer, "format": form}


def test_a_gate_can_be_a_part_and_start_from_zero() -> None:
    reward: Any = weighted(qa=(gated(constant(1.0), constant(0.2), offset=0.0), 1.0))
    assert reward(row(), trajectory("a")) == {"reward": 0.2, "qa": 0.2, "qa/answer": 1.0, "qa/format": 0.2}


def test_clean_calls_is_the_share_of_calling_steps_without_an_error() -> None:
    calls = [(call(), call()), (call(), call("no such tool")), (call(),), ()]
    assert clean_calls(row(), trajectory("a", "b", "c", "answer", calls=calls)) == pytest.approx(2 / 3)


def test_an_episode_without_calls_has_nothing_malformed() -> None:
    assert clean_calls(row(), trajectory("yes")) == 1.0
    assert clean_calls(row(), trajectory()) == 1.0


def test_matches_looks_where_it_is_told() -> None:
    episode = trajectory("<think>a</think>\ncall", "no thought", "<think>b\n</think> <answer>yes</answer>")
    thought = r"(?s)\A<think>.*</think>"
    assert matches(r"<answer>.+</answer>\Z")(row(), episode) == 1.0
    assert matches(r"<answer>no")(row(), episode) == 0.0
    assert matches(thought, where="earlier")(row(), episode) == 0.5
    assert matches(thought, where="every")(row(), episode) == pytest.approx(2 / 3)
    assert matches(thought, where="earlier")(row(), trajectory("only one")) == 1.0
    assert matches("x")(row(), trajectory()) == 0.0  # nothing was said


def raises(row: TaskRow, trajectory: Trajectory) -> float:
    raise KeyError("no such answer")


async def raises_later(row: TaskRow, trajectory: Trajectory) -> float:
    raise KeyError("no such answer")


@pytest.mark.parametrize("beside", [exact, half], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (constant(math.nan), "part 'bad': component 'reward' is nan"),
        (constant({"em": 1.0}), "part 'bad': a dict of components needs the key 'reward'"),
        (constant("1"), "part 'bad': component 'reward' is '1'"),
        (raises, "part 'bad' failed: KeyError: 'no such answer'"),
        (raises_later, "part 'bad' failed: KeyError: 'no such answer'"),
    ],
)
def test_a_bad_part_fails_its_episode_and_is_named(bad: Any, message: str, beside: Any) -> None:
    [scored] = score(weighted(good=(beside, 1.0), bad=(bad, 1.0)), trajectory("yes"))
    assert scored.stop is StopReason.ERROR
    assert message in (scored.error or "")


@pytest.mark.parametrize("beside", [exact, half], ids=["sync", "async"])
def test_a_part_that_is_async_without_looking_so_is_awaited(beside: Any) -> None:
    hidden: Any = lambda row, trajectory: half(row, trajectory)  # noqa: E731
    reward = weighted(hidden=(hidden, 1.0), beside=(beside, 1.0))
    [scored] = score(weighted(all=(reward, 1.0)), trajectory("yes"))
    assert scored.outcome_reward == 0.5 + {exact: 1.0, half: 0.5}[beside]
    assert scored.reward_components["all/hidden"] == 0.5
    [failed] = score(weighted(hidden=(hidden, 1.0), bad=(raises, 1.0)), trajectory("yes"))
    assert "part 'bad' failed: KeyError" in (failed.error or "")
    [failed] = score(weighted(bad=(lambda row, t: raises_later(row, t), 1.0)), trajectory("yes"))
    assert "part 'bad' failed: KeyError" in (failed.error or "")


def test_a_sync_part_that_waits_for_a_sync_part_does_not_block_it() -> None:
    mixed: Any = weighted(answer=(exact, 1.0), judged=(half, 1.0))
    reward = weighted(hidden=(lambda row, t: mixed(row, t), 1.0), judged=(half, 1.0))
    scored = score(reward, *(trajectory("yes") for _ in range(2 * SYNC_THREADS)))
    assert [t.outcome_reward for t in scored] == [2.0] * (2 * SYNC_THREADS)  # 1 + 0.5 + 0.5


def test_the_log_leads_to_the_line_of_the_part_that_raised(caplog: pytest.LogCaptureFixture) -> None:
    for beside in (exact, half):
        score(weighted(good=(beside, 1.0), bad=(raises, 1.0)), trajectory("yes"))
        assert 'raise KeyError("no such answer")' in caplog.text
        caplog.clear()


@pytest.mark.parametrize("beside", [exact, half], ids=["sync", "async"])
def test_a_part_that_would_end_the_program_ends_its_episode(beside: Any) -> None:
    [scored] = score(weighted(good=(beside, 1.0), bad=(lambda row, t: sys.exit(3), 1.0)), trajectory("yes"))
    assert scored.stop is StopReason.ERROR
    assert "SystemExit" in (scored.error or "")


def test_a_part_that_hangs_runs_out_the_time_of_its_episode() -> None:
    async def hangs(row: TaskRow, trajectory: Trajectory) -> float:
        await asyncio.Event().wait()
        return 1.0

    [scored] = score(weighted(good=(exact, 1.0), bad=(hangs, 1.0)), trajectory("yes"), timeout=0.2)
    assert scored.error == "reward 'weighted' did not return within 0.2 s"


@pytest.mark.parametrize(
    ("function", "arguments", "settings", "message"),
    [
        (weighted, [], {}, "no parts"),
        (weighted, [], {"reward": (exact, 1.0)}, "'reward'"),
        (weighted, [], {"answer": exact}, "'answer'"),
        (weighted, [], {"answer": (exact, math.nan)}, "'answer' .* nan"),
        (weighted, [], {"answer": (lambda row: 1.0, 1.0)}, r"'answer' must accept \(row, trajectory\)"),
        (gated, [exact, clean_calls], {"threshold": math.nan}, "threshold=nan"),
        (gated, [exact, clean_calls], {"threshold": "1"}, "threshold='1'"),
        (gated, [exact, clean_calls], {"threshold": 1.5}, "threshold=1.5"),
        (gated, [exact, clean_calls], {"offset": math.inf}, "offset=inf"),
        (matches, ["("], {}, "not a regular expression"),
        (matches, [5], {}, "not a regular expression"),
        (matches, [b"a"], {}, "not a regular expression"),
        (matches, ["a"], {"where": "last"}, "final, earlier, every"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_written_down(
    function: Any, arguments: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        function(*arguments, **settings)

"""LLM judges against a real HTTP server that is good, slow, broken, busy, rude or unreadable."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.errors import ConfigError
from agent_r1.rollout.rewards import attempts
from agent_r1.rollout.rewards.judge import LLMJudge
from agent_r1.rollout.rewards.shaping import weighted
from agent_r1.rollout.scoring import Scorer
from agent_r1.types import Group, Step, StopReason, TaskRow, Trajectory
from tests.chatml import row
from tests.rollout.judge_server import GOOD, Reply, Server, says

KEY = "sk-very-secret"


def trajectory(*texts: str) -> Trajectory:
    steps = [
        Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text=text, feedback=f"tool: {text}")
        for text in texts
    ]
    return Trajectory(row_id="r", trajectory_id="t", steps=steps, stop=StopReason.ANSWERED)


def score(reward: Any, count: int = 1, *, task: TaskRow | None = None) -> list[Trajectory]:
    group = Group(row=task or row(), trajectories=[trajectory(f"answer {i}") for i in range(count)])
    [scored] = asyncio.run(Scorer(reward=reward, timeout=30)([group]))
    return scored.trajectories


def judge(server: Server, **settings: Any) -> LLMJudge:
    quick = {"backoff_seconds": 0.001, "seconds_per_attempt": 20.0}
    return LLMJudge(server.url, model="m", **(quick | settings))


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", KEY)


def test_a_judge_is_asked_in_the_openai_way_and_its_score_is_the_reward() -> None:
    with Server(GOOD).running() as server:
        reward = judge(server, api_key_env="JUDGE_KEY", max_tokens=None, extra_body={"reasoning_effort": "low"})
        [scored] = score(reward, task=row(question="2 + 2?", reward_model={"ground_truth": "four"}))
    assert scored.outcome_reward == 0.7
    [(path, headers, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert set(body) == {"model", "messages", "temperature", "reasoning_effort"}
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    asked = body["messages"][0]["content"]
    assert all(text in asked for text in ("user: 2 + 2?", "four", "answer 0", "tool: answer 0", "Score: <number>"))


def test_a_judge_is_a_part_like_any_other_and_serves_one_event_loop_after_the_other() -> None:
    with Server(GOOD).running() as server:
        reward = weighted(judge=(judge(server), 0.5), length=(lambda row, t: float(len(t.steps)), 1.0))
        for _ in range(2):
            [scored] = score(reward)
            assert scored.reward_components == {"reward": 1.35, "judge": 0.7, "length": 1.0}  # 0.5 * 0.7 + 1


SERVER_ERROR: Reply = (500, "out of memory", {})
BUSY: Reply = (429, "slow down", {"Retry-After": "0"})


@pytest.mark.parametrize(
    "bad",
    [SERVER_ERROR, BUSY, None, (200, "<html>", {}), (200, '{"choices": []}', {}), says(None), says("fine, I think")],
    ids=["500", "429", "dropped", "no JSON", "no choices", "no text", "no verdict"],
)
def test_what_may_pass_is_asked_again_until_it_is_good_or_no_attempt_is_left(bad: Reply) -> None:
    with Server(bad, bad, GOOD).running() as server:
        assert score(judge(server, attempts=3))[0].outcome_reward == 0.7
        assert len(server.requests) == 3
    with Server(bad).running() as server:
        [failed] = score(judge(server, attempts=2))
        assert failed.stop is StopReason.ERROR
        assert "judge 'm' failed after 2 attempts; the last: TransientError: " in (failed.error or "")
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SERVER_ERROR, "the server answered 500: 'out of memory'"),
        ((200, "<html>", {}), "not a chat completion: '<html>'"),
        (says("fine, I think"), "cannot read the verdict 'fine, I think': ValueError: "),
        (says("Score: 7"), r"cannot read the verdict 'Score: 7': .*\[0, 1\]"),
        (says("First, let", finish_reason="length"), "it was cut off, so raise max_tokens"),
        (says(None), "has no text, but content=None"),
        (None, "no answer from http://127.0.0.1"),
        ((500, "x" * 9999, {}), r"x{500}\.\.\.'$"),
    ],
)
def test_an_error_says_what_came_back(bad: Reply, message: str) -> None:
    with Server(bad).running() as server:
        [failed] = score(judge(server, attempts=1))
    assert re.search(message, failed.error or "")


def test_a_server_that_nobody_started_is_named() -> None:
    with Server(GOOD).running() as server:
        url = server.url
    [failed] = score(LLMJudge(url, model="m", attempts=2, backoff_seconds=0.001))
    assert f"no answer from {url}: ConnectError" in (failed.error or "")


def test_a_slow_attempt_is_given_up_and_the_next_may_be_in_time() -> None:
    with Server((0, "", {}), GOOD).running() as server:
        assert score(judge(server, seconds_per_attempt=0.5))[0].outcome_reward == 0.7
        assert len(server.requests) >= 2


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_refusal_is_not_asked_again(status: int) -> None:
    with Server((status, "unknown model 'm'", {})).running() as server:
        [failed] = score(judge(server, attempts=5))
        assert len(server.requests) == 1
    assert f"the server answered {status}: \"unknown model 'm'\"" in (failed.error or "")


def test_the_wait_a_server_asks_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    # Only the module `attempts` sleeps with this; everything else with asyncio itself.
    recording = SimpleNamespace(sleep=sleep, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr(attempts, "asyncio", recording)
    with Server((429, "", {"Retry-After": "7.5"}), (503, "", {"Retry-After": "Fri, 31 Dec 1999"}), GOOD).running() as s:
        assert score(judge(s))[0].outcome_reward == 0.7
    assert waits[0] == pytest.approx(7.5, abs=0.01)  # and the backoff of a millisecond or so
    assert waits[1] == pytest.approx(0, abs=0.01)  # a date is not understood


@pytest.mark.parametrize("status", [429, 503])
def test_a_wait_that_is_too_long_fails_at_once_with_what_the_server_said(status: int) -> None:
    with Server((status, "quota spent", {"Retry-After": "11"})).running() as server:
        [failed] = score(judge(server))
        assert len(server.requests) == 1
    said = f"the server answered {status}: 'quota spent' (asked to wait 11 s, more than max_retry_after=10)"
    assert said in (failed.error or "")


def test_no_more_requests_than_allowed_are_open_at_once() -> None:
    # No request is answered before three are there: so three there are, and never a fourth.
    with Server(GOOD, meet=3).running() as server:
        scored = score(judge(server, max_concurrent=3), count=12)
    assert [t.outcome_reward for t in scored] == [0.7] * 12
    assert server.most_at_once == 3


@pytest.mark.parametrize("key", ["0", "Score", '"', "a"])
def test_a_key_that_occurs_in_the_verdict_does_not_change_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with Server(says("Passable.\nScore: 0.05")).running() as server:
        [scored] = score(judge(server, api_key_env="JUDGE_KEY", attempts=1))
    assert scored.outcome_reward == 0.05


def test_the_key_stands_in_no_message_even_if_the_parser_says_it(caplog: pytest.LogCaptureFixture) -> None:
    parsers: list[Callable[[str], Any]] = [int, dict[str, float]().__getitem__, lambda verdict: math.nan]
    for parse in parsers:
        with Server(says(KEY)).running() as server:
            [failed] = score(judge(server, api_key_env="JUDGE_KEY", attempts=1, parse=parse))
        assert "***" in (failed.error or "")
        assert KEY not in (failed.error or "") + caplog.text


@pytest.mark.parametrize(
    "bad",
    [(401, f"bad key {KEY}", {}), (200, f"{KEY}?", {}), says(KEY), says([KEY]), says(f"{KEY}\nScore: 3")],
    ids=str,
)
def test_the_key_stands_in_no_message_even_if_the_server_says_it(bad: Reply, caplog: pytest.LogCaptureFixture) -> None:
    with Server(bad).running() as server:
        reward = judge(server, api_key_env="JUDGE_KEY", attempts=1)
        [failed] = score(reward)
    assert failed.error is not None
    assert KEY not in failed.error + caplog.text + repr(reward)
    assert "***" in failed.error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
        ({"api_key_env": "BAD_KEY"}, "BAD_KEY"),
        ({"base_url": "localhost:8000/v1"}, "base_url .* got localhost:8000/v1"),
        ({"base_url": "http://me:secret@host/v1"}, "base_url .* got http://host/v1$"),
        ({"base_url": "http://host/v1?api-key=secret"}, "base_url .* got http://host/v1$"),
        ({"base_url": "http://host/v1?"}, "base_url"),
        ({"base_url": "http://host/v1#secret"}, "base_url"),
        ({"base_url": "http://host/v1/chat/completions"}, "base_url"),
        ({"base_url": "http://host:port/v1"}, "base_url"),
        ({"max_concurrent": 0}, "max_concurrent=0"),
        ({"max_retry_after": -1.0}, "max_retry_after=-1"),
        ({"prompt": "Is it right?"}, r"prompt .* got 'Is it right\?'"),
        ({"parse": "float"}, "parse .* got 'float'"),
        ({"seconds_per_attempt": 0.0}, "seconds_per_attempt=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD_KEY", "sk-\u2026")
    with pytest.raises(ConfigError, match=message) as caught:
        LLMJudge(**({"base_url": "http://host/v1", "model": "m"} | settings))
    assert "secret" not in str(caught.value)


def test_prompt_and_parser_can_be_your_own() -> None:
    with Server(says("7 of 10")).running() as server:
        reward = judge(
            server,
            prompt=lambda row, t: [{"role": "user", "content": t.final_text}],
            parse=lambda verdict: int(verdict.split()[0]) / 10,
        )
        assert score(reward)[0].outcome_reward == 0.7
    assert server.requests[0][2]["messages"] == [{"role": "user", "content": "answer 0"}]


def test_without_a_named_variable_no_key_is_sent_and_half_a_surrogate_pair_is_mended() -> None:
    with Server(GOOD).running() as server:
        assert asyncio.run(judge(server)(row(), trajectory("a\ud800b"))) == 0.7
    assert "Authorization" not in server.requests[0][1]
    assert "a?b" in server.requests[0][2]["messages"][0]["content"]

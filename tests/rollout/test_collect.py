"""Rollout semantics, locked: what ends an episode, what is kept of it, and that one episode cannot harm another."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent_r1 import guard
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.errors import ConfigError, RolloutError
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase, SingleStepFlow
from agent_r1.rollout.collect import Collector, RowQueue, check_failures
from agent_r1.types import Action, Group, Observation, StopReason, TaskRow, ToolCallRecord, Trajectory, Transition
from tests.chatml import collector, row, tokenizer


class Echo(AgentEnv):
    """Counts turns; ends when told "stop". `behave` replaces `step` for the rows it is given."""

    closed = 0

    def __init__(self, behave: Callable[[Action], Any] | None = None) -> None:
        self.behave = behave
        self.messages: list[dict[str, Any]] = []

    async def reset(self, row: TaskRow) -> Observation:
        self.row = row
        self.messages = [dict(message) for message in row.prompt]
        return Observation(messages=self.messages)

    async def step(self, action: Action) -> Transition:
        if self.behave is not None:
            result: Transition = await self.behave(action)
            return result
        if action.text == "stop":
            return Transition(terminated=True, reward=0.25)
        said = {"role": "assistant", "content": action.text}
        self.messages = [*self.messages, said, {"role": "tool", "content": f"echo {action.text}"}]
        call = ToolCallRecord(name="echo", arguments={}, result="", reward=1.0, text_span=(0, len(action.text)))
        return Transition(observation=Observation(messages=self.messages), reward=1.0, calls=(call,), feedback="echo")

    async def close(self) -> None:
        Echo.closed += 1


def play(played: Collector, *rows: TaskRow) -> list[Trajectory]:
    groups = asyncio.run(played(rows or [row()], seed=0))
    return [trajectory for group in groups for trajectory in group.trajectories]


def echo(_: TaskRow) -> AgentEnv:
    return Echo()


def test_an_episode_is_recorded_id_by_id() -> None:
    engine = ScriptedEngine(["ab", "stop"], tokenizer=tokenizer())
    [trajectory] = play(collector(engine, make_env=echo))
    first, second = trajectory.steps
    encode = tokenizer().encode
    assert first.prompt_ids == encode("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")
    assert first.response_ids == encode("ab<|im_end|>")
    # s_1 = s_0 + a_0 + what the env added, by appending ids
    added = encode("\n<|im_start|>tool\necho ab<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids == first.prompt_ids + first.response_ids + added
    assert [step.prompt_ids for step in trajectory.steps] == [call.prompt_ids for call in engine.calls]
    assert trajectory.stop is StopReason.ANSWERED
    assert [step.reward for step in trajectory.steps] == [1.0, 0.25]
    assert first.calls[0].token_span == (0, 2)  # "ab", without the stop token
    assert first.feedback == "echo"
    assert engine.released == [trajectory.trajectory_id]


async def raises(_: Action) -> Any:
    raise RuntimeError("env bug")


async def hangs(_: Action) -> Any:
    await asyncio.sleep(3600)


async def hangs_stubbornly(_: Action) -> Any:
    for _attempt in range(2):  # swallows the first cancellation
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def not_a_number(_: Action) -> Any:
    return Transition(terminated=True, reward=math.nan)


async def very_long(_: Action) -> Any:
    return Transition(observation=Observation(messages=[{"role": "user", "content": "x" * 10**7}]))


async def exits(_: Action) -> Any:
    raise SystemExit(3)


async def cancels(_: Action) -> Any:
    raise asyncio.CancelledError


async def panics(_: Action) -> Any:
    raise BaseException("panic")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


async def unprintable(_: Action) -> Any:
    raise Unprintable


async def gigabyte_in_parts(_: Action) -> Any:
    parts = [{"type": "text", "text": "x" * 10**8}] * 10
    return Transition(observation=Observation(messages=[{"role": "user", "content": parts}]))


async def not_json(_: Action) -> Any:
    return Transition(terminated=True, info={"lock": threading.Lock()})


async def deep(_: Action) -> Any:
    info: dict[str, Any] = {}
    for _level in range(600):
        info = {"in": info}
    return Transition(terminated=True, info=info)


async def bottomless(_: Action) -> Any:
    info: dict[str, Any] = {}
    for _level in range(100_000):
        info = {"in": info}
    return Transition(terminated=True, info=info)


@pytest.mark.parametrize(
    ("behave", "stop", "error"),
    [
        (deep, StopReason.ERROR, "returned info that is nested more than 80 levels deep"),
        (bottomless, StopReason.ERROR, "info and arguments must be JSON: maximum recursion depth"),
        (raises, StopReason.ERROR, "RuntimeError: env bug"),
        (hangs, StopReason.TIMEOUT, "not finished after 0.2 s"),
        (hangs_stubbornly, StopReason.TIMEOUT, "not finished after 0.2 s"),
        (not_a_number, StopReason.ERROR, "Transition.reward must be a finite number"),
        (very_long, StopReason.MAX_TOKENS, None),
        (exits, StopReason.ERROR, "SystemExit: 3"),
        (cancels, StopReason.ERROR, "CancelledError"),
        (panics, StopReason.ERROR, "panic"),
        (unprintable, StopReason.ERROR, "Unprintable: (its message cannot be printed)"),
        (gigabyte_in_parts, StopReason.MAX_TOKENS, None),
        (not_json, StopReason.ERROR, "info and arguments must be JSON"),
    ],
)
def test_a_bad_env_costs_its_own_episode_only(
    behave: Callable[[Action], Any], stop: StopReason, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CANCEL_SECONDS", 0.2)  # who is stubborn has had its chance
    closed = Echo.closed

    def make_env(row: TaskRow) -> AgentEnv:
        return Echo(behave if row.row_id == "bad" else None)

    engine = ScriptedEngine(lambda call: "stop", tokenizer=tokenizer())
    seconds = 0.2 if stop is StopReason.TIMEOUT else 60
    played = collector(engine, make_env=make_env, episode_seconds=seconds)
    good, bad, last = play(played, row("good"), row("bad"), row("last"))
    assert good.stop is last.stop is StopReason.ANSWERED
    assert bad.stop is stop
    assert bad.error is None if error is None else error in (bad.error or "")
    assert len(bad.steps) == 1  # what happened before is kept
    assert Echo.closed == closed + 3
    assert sorted(engine.released) == sorted(t.trajectory_id for t in (good, bad, last))


def test_too_many_failures_stop_the_run_with_the_commonest_cause() -> None:
    def make_env(row: TaskRow) -> AgentEnv:
        return Echo(raises if row.row_id != "ok" else None)

    engine = ScriptedEngine(lambda call: "stop", tokenizer=tokenizer())
    groups = asyncio.run(collector(engine, make_env=make_env)([row("ok"), row("a"), row("b")], seed=0))
    check_failures(groups, 0.7)
    with pytest.raises(RolloutError, match=r"2 of 3 .* failed .* 2 times: RuntimeError: env bug \(test_collect.py:"):
        check_failures(groups, 0.5)


def test_an_engine_that_fails_is_a_failed_episode_too() -> None:
    [trajectory] = play(collector([], make_env=echo))
    assert trajectory.stop is StopReason.ERROR
    assert "RolloutError" in (trajectory.error or "")
    assert trajectory.steps == []


def test_an_env_that_cannot_be_made_fails_its_own_episode() -> None:
    def make_env(row: TaskRow) -> AgentEnv:
        if row.row_id == "bad":
            raise ConfigError("tool 'look_up' takes no 'tabel' from the row")
        return Echo()

    engine = ScriptedEngine(lambda call: "stop", tokenizer=tokenizer())
    good, bad = play(collector(engine, make_env=make_env), row("good"), row("bad"))
    assert good.stop is StopReason.ANSWERED
    line = make_env.__code__.co_firstlineno + 2
    assert bad.error == f"ConfigError: tool 'look_up' takes no 'tabel' from the row (test_collect.py:{line})"


def test_an_env_left_behind_after_its_deadline_cannot_sample_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CANCEL_SECONDS", 0.2)
    late: list[BaseException] = []

    class Zombie(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            await episode.act(Observation(messages=row.prompt))
            for _ in range(3):  # swallows every cancellation it gets while the collector still waits
                try:
                    await asyncio.sleep(0.15)
                except asyncio.CancelledError:
                    continue
            try:
                await episode.act(Observation(messages=row.prompt))
            except RuntimeError as error:
                late.append(error)
            return StopReason.ANSWERED

    engine = ScriptedEngine(lambda call: "x", tokenizer=tokenizer())

    async def main() -> Trajectory:
        played = collector(engine, make_flow=lambda _: Zombie(lambda _: Echo()), episode_seconds=0.1)
        [group] = await played([row()], seed=0)
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=20)  # those who were left behind
        return group.trajectories[0]

    trajectory = asyncio.run(main())
    assert trajectory.stop is StopReason.TIMEOUT
    assert len(engine.calls) == len(trajectory.steps) == 1
    assert [str(error) for error in late] == ["the model was called after the episode had ended"]


def test_cancelling_a_batch_closes_every_env_and_releases_every_session() -> None:
    closed = Echo.closed
    engine = ScriptedEngine(lambda call: "go", tokenizer=tokenizer())

    async def main() -> None:
        task = asyncio.create_task(collector(engine, make_env=lambda _: Echo(hangs), group_size=4)([row()], seed=0))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1  # this one: nothing is left running

    asyncio.run(main())
    assert Echo.closed == closed + 4
    assert len(engine.released) == 4


def slow_and_fast(row: TaskRow) -> AgentEnv:
    async def wait(_: Action) -> Transition:
        await asyncio.sleep(0.2 if row.row_id == "slow" else 0)
        return Transition(terminated=True)

    return Echo(wait)


def test_a_stream_yields_groups_as_they_finish_and_collecting_sorts_them() -> None:
    async def main() -> None:
        engine = ScriptedEngine(lambda call: "x", tokenizer=tokenizer())
        played = collector(engine, make_env=slow_and_fast, group_size=2)
        rows = [row("slow"), row("fast"), row("fast")]
        finished = [(position, group) async for position, group in played.stream(RowQueue(rows), seed=0)]
        assert [position for position, _ in finished][2] == 0
        groups = await played(rows, seed=0)
        assert [group.row.row_id for group in groups] == ["slow", "fast", "fast"]
        streamed = [group for _, group in sorted(finished, key=lambda item: item[0])]
        assert [names(group) for group in groups] == [names(group) for group in streamed]

    def names(group: Group) -> list[str]:
        return [trajectory.trajectory_id for trajectory in group.trajectories]

    asyncio.run(main())


def test_closing_a_stream_early_ends_the_episodes_that_still_run() -> None:
    closed = Echo.closed
    engine = ScriptedEngine(lambda call: "x", tokenizer=tokenizer())

    def make_env(row: TaskRow) -> AgentEnv:
        return Echo(hangs) if row.row_id == "hangs" else slow_and_fast(row)

    async def main() -> None:
        queue = RowQueue([row("hangs"), row("fast")])
        async with aclosing(collector(engine, make_env=make_env).stream(queue, seed=0)) as groups:
            async for position, _ in groups:
                assert position == 1
                break
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1  # this one

    asyncio.run(main())
    assert Echo.closed == closed + 2
    assert len(engine.released) == 2


def test_numbers_and_texts_of_an_env_are_made_plain() -> None:
    async def odd(_: Action) -> Any:
        return Transition(terminated=True, reward=np.float32(0.5), feedback="half \ud800", info={1: (2, 3)})  # type: ignore[arg-type, dict-item]

    [trajectory] = play(collector(["x"], make_env=lambda _: Echo(odd)))
    [step] = trajectory.steps
    assert type(step.reward) is float
    assert (step.reward, step.feedback, step.info) == (0.5, "half ?", {"1": [2, 3]})


def test_no_episode_waits_for_the_turns_of_another() -> None:
    """A fast episode plays all its turns while the tool of a slow one is still out."""
    released = asyncio.Event()
    order: list[str] = []

    def make_env(row: TaskRow) -> AgentEnv:
        class Slow(Echo):
            async def step(self, action: Action) -> Transition:
                order.append(f"{row.row_id} {action.text}")
                if row.row_id == "slow":
                    await released.wait()  # only the end of the fast episode lets this go on
                elif action.text == "stop":
                    released.set()
                return await super().step(action)

        return Slow()

    engine = ScriptedEngine(lambda call: "stop" if call.turn == 2 else str(call.turn), tokenizer=tokenizer())
    slow, fast = play(collector(engine, make_env=make_env), row("slow"), row("fast"))
    assert slow.stop is fast.stop is StopReason.ANSWERED
    assert order == ["slow 0", "fast 0", "fast 1", "fast stop", "slow 1", "slow stop"]


def test_attempts_of_a_group_draw_different_noise_and_the_same_batch_draws_it_again() -> None:
    def seeds(batch_seed: int) -> list[int]:
        engine = ScriptedEngine(lambda call: "stop" if call.turn else "go", tokenizer=tokenizer())
        played = collector(engine, make_env=echo, group_size=3)
        asyncio.run(played([row("a"), row("b")], seed=batch_seed))
        return sorted(call.sampling.seed or 0 for call in engine.calls)

    assert len(set(seeds(1))) == 12  # 2 rows x 3 attempts x 2 steps
    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))


def test_the_number_of_episodes_under_way_is_bounded() -> None:
    under_way, most = 0, 0

    class Counting(Echo):
        async def step(self, action: Action) -> Transition:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.005)
            under_way -= 1
            return Transition(terminated=True)

    engine = ScriptedEngine(lambda call: "x", tokenizer=tokenizer())
    played = replace(collector(engine, make_env=lambda _: Counting(), group_size=10), max_concurrent=3)
    play(played)
    assert most == 3


def test_a_single_step_flow_needs_no_env() -> None:
    [trajectory] = play(collector(["hello"], make_flow=lambda _: SingleStepFlow(lambda _: Echo())))
    assert trajectory.final_text == "hello"
    assert trajectory.stop is StopReason.ANSWERED


def test_a_flow_that_samples_nothing_or_returns_nonsense_is_a_failed_episode() -> None:
    class Lazy(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            return StopReason.ANSWERED

    class Vague(SingleStepFlow):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            await super().run(row, episode)
            return "done"  # type: ignore[return-value]

    for flow, message in ((Lazy, "without a single model call"), (Vague, "returned str instead of a StopReason")):
        [trajectory] = play(collector(["x"], make_flow=lambda _, flow=flow: flow(lambda _: Echo())))  # type: ignore[misc]
        assert trajectory.stop is StopReason.ERROR
        assert message in (trajectory.error or "")

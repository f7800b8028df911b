"""Rollout semantics, locked: what ends an episode, what is kept of it, and that one episode cannot harm another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.agent.env import AgentEnv
from agent_r1.agent.flow import AgentFlowBase, Episode, SingleStepFlow
from agent_r1.agent.sampler import Completion, Sampling
from agent_r1.errors import ConfigError, RolloutError
from agent_r1.rollout.collect import Collector
from agent_r1.rollout.engines.scripted import ScriptedEngine
from agent_r1.types import Action, Observation, StopReason, TaskRow, ToolCallRecord, Trajectory, Transition
from tests.chatml import collector, renderer, row, tokenizer


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


def test_the_env_never_sees_the_ground_truth_unless_it_says_so() -> None:
    seen: list[Any] = []

    class Plain(Echo):
        async def reset(self, row: TaskRow) -> Observation:
            seen.append(row.ground_truth)
            return await super().reset(row)

    class Judge(Plain):
        sees_ground_truth = True

    task = row(reward_model={"ground_truth": 42})
    for env in (Plain, Judge):
        play(collector(["stop"], make_env=lambda _, env=env: env()), task)  # type: ignore[misc]
    assert seen == [None, 42]


def test_the_step_budget_ends_an_episode_after_its_last_tool_ran() -> None:
    [trajectory] = play(collector(["a", "b"], make_env=echo, max_steps=2))
    assert trajectory.stop is StopReason.MAX_STEPS
    assert [step.feedback for step in trajectory.steps] == ["echo", "echo"]
    assert trajectory.stop.is_truncated


def test_a_response_cut_in_half_is_kept_but_not_executed() -> None:
    [trajectory] = play(collector(["0123456789"], make_env=echo, max_response_tokens=4))
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert tokenizer().decode(trajectory.steps[0].response_ids) == "0123"
    assert trajectory.steps[0].feedback == ""


def test_a_prompt_that_outgrows_the_context_ends_the_episode_with_its_steps() -> None:
    prompt = len(renderer().render(Observation(messages=row().prompt)))
    [trajectory] = play(collector(["abc", "stop"], make_env=echo, max_context_tokens=prompt + 10))
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert len(trajectory.steps) == 1


def test_the_response_budget_shrinks_to_the_room_left_in_the_context() -> None:
    engine = ScriptedEngine(["stop"], tokenizer=tokenizer())
    prompt = len(renderer().render(Observation(messages=row().prompt)))
    play(collector(engine, make_env=echo, max_context_tokens=prompt + 7))
    assert engine.calls[0].sampling.max_tokens == 7


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


async def garbage(_: Action) -> Any:
    return {"reward": 1}


async def not_a_number(_: Action) -> Any:
    return Transition(terminated=True, reward=math.nan)


async def gigabyte(_: Action) -> Any:
    return Transition(observation=Observation(messages=[{"role": "user", "content": "x" * 2**30}]))


async def exits(_: Action) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("behave", "stop", "error"),
    [
        (raises, StopReason.ERROR, "RuntimeError: env bug"),
        (hangs, StopReason.TIMEOUT, "not finished after 0.2 s"),
        (hangs_stubbornly, StopReason.TIMEOUT, "not finished after 0.2 s"),
        (garbage, StopReason.ERROR, "returned dict {'reward': 1} instead of a Transition"),
        (not_a_number, StopReason.ERROR, "rewards must be finite"),
        (gigabyte, StopReason.MAX_TOKENS, None),
        (exits, StopReason.ERROR, "SystemExit: 3"),
    ],
)
def test_a_bad_env_costs_its_own_episode_only(
    behave: Callable[[Action], Any], stop: StopReason, error: str | None
) -> None:
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
    assert len(bad.steps) == 1  # what happened before is kept for the viewer
    assert Echo.closed == closed + 3
    assert sorted(engine.released) == sorted(t.trajectory_id for t in (good, bad, last))


def test_too_many_failures_stop_the_run_with_the_commonest_cause() -> None:
    def make_env(row: TaskRow) -> AgentEnv:
        return Echo(raises if row.row_id != "ok" else None)

    engine = ScriptedEngine(lambda call: "stop", tokenizer=tokenizer())
    with pytest.raises(RolloutError, match=r"2 of 3 episodes failed .* 2 times: RuntimeError: env bug"):
        play(collector(engine, make_env=make_env, max_error_fraction=0.5), row("ok"), row("a"), row("b"))


def test_an_engine_that_fails_is_a_failed_episode_too() -> None:
    [trajectory] = play(collector([], make_env=echo))
    assert trajectory.stop is StopReason.ERROR
    assert "asked for one more" in (trajectory.error or "")
    assert trajectory.steps == []


def test_a_wrong_recipe_stops_the_run_instead_of_failing_every_episode() -> None:
    def make_env(row: TaskRow) -> AgentEnv:
        raise ConfigError("unknown env 'tol'")

    with pytest.raises(ConfigError, match="unknown env 'tol'"):
        play(collector(["stop"], make_env=make_env))


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


def test_groups_come_back_in_row_order() -> None:
    class Jumbled(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, *, session: str) -> Completion:
            await asyncio.sleep(0.02 if session.startswith("a") else 0)
            return await super().generate(prompt_ids, sampling, session=session)

    engine = Jumbled(lambda call: "stop", tokenizer=tokenizer())
    groups = asyncio.run(collector(engine, make_env=echo, group_size=2)([row("a"), row("b")], seed=0))
    assert [(g.row.row_id, [t.row_id for t in g.trajectories]) for g in groups] == [("a", ["a"] * 2), ("b", ["b"] * 2)]


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


class DraftAndRevise(AgentFlowBase):
    """Two model calls in two unrelated contexts: a custom flow."""

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        draft = await episode.act(Observation(messages=row.prompt))
        review = [{"role": "user", "content": f"Improve: {draft.text}"}]
        await episode.act(Observation(messages=review))
        return StopReason.ANSWERED


def test_a_custom_flow_with_two_contexts_keeps_both_steps_exact() -> None:
    [trajectory] = play(collector(["drft", "draft"], make_flow=lambda _: DraftAndRevise(lambda _: Echo())))
    assert [step.action_text for step in trajectory.steps] == ["drft", "draft"]
    second = tokenizer().decode(trajectory.steps[1].prompt_ids)
    assert second == "<|im_start|>user\nImprove: drft<|im_end|>\n<|im_start|>assistant\n"


def test_a_flow_that_samples_nothing_or_returns_nonsense_is_a_failed_episode() -> None:
    class Lazy(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            return StopReason.ANSWERED

    class Vague(SingleStepFlow):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            await super().run(row, episode)
            return "done"  # type: ignore[return-value]

    for flow, message in ((Lazy, "without a single model call"), (Vague, "'done' instead of a StopReason")):
        [trajectory] = play(collector(["x"], make_flow=lambda _, flow=flow: flow(lambda _: Echo())))  # type: ignore[misc]
        assert trajectory.stop is StopReason.ERROR
        assert message in (trajectory.error or "")

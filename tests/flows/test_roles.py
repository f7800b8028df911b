"""Flows of several roles: labels, limits and temperatures of a role, its own rewards, exact ids, and what is stored."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.runs.metrics import role_advantages, rollout_metrics
from agent_r1.runs.trajectories import trajectory_from_json, trajectory_to_json, transcript
from agent_r1.types import CreditedTrajectory, Group, Message, Observation, StopReason, TaskRow, Transition
from tests.chatml import collector, renderer, row, tokenizer


def say(role: str, text: str) -> Message:
    return {"role": role, "content": text}


class Interview(AgentFlowBase):
    """Two roles in turn, each in its own conversation, which starts like the other's."""

    roles: ClassVar[tuple[str, ...]] = ("asker", "teller")

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        asker, teller = list(row.prompt), list(row.prompt)
        for _ in range(2):
            question = (await episode.act(Observation(messages=asker), role="asker")).text
            teller = [*teller, say("user", question)]
            answer = (await episode.act(Observation(messages=teller), role="teller")).text
            episode.observe(Transition(terminated=True, reward=0.25))
            teller = [*teller, say("assistant", answer)]
            asker = [*asker, say("assistant", question), say("user", answer)]
        return StopReason.ANSWERED


def play(flow: type[AgentFlowBase], script: Any, *, roles: dict[str, dict[str, Any]] | None = None) -> tuple[Any, Any]:
    engine = ScriptedEngine(script, tokenizer=tokenizer())
    made = collector(engine, make_flow=lambda _: flow(lambda _: NotImplemented))
    made = replace(made, role_sampling={name: replace(made.sampling, **own) for name, own in (roles or {}).items()})
    [group] = asyncio.run(made([row()], seed=0))
    return group.trajectories[0], engine


def broken(text: str) -> list[int]:
    """Ids that start with half a character, so that their text has other ids: encoding it again is noticed."""
    ids = [tokenizer().convert_tokens_to_ids("ÿ"), *tokenizer().encode(text, add_special_tokens=False)]
    assert tokenizer().encode(tokenizer().decode(ids), add_special_tokens=False) != ids
    return [*ids, renderer().stop_ids[0]]


def test_a_role_s_conversation_keeps_its_exact_ids_while_the_other_speaks() -> None:
    trajectory, _ = play(Interview, [broken(text) for text in ("why", "so", "really", "yes")])
    assert [step.role for step in trajectory.steps] == ["asker", "teller", "asker", "teller"]
    assert trajectory.roles == ["asker", "teller"]
    for first, later in ((0, 2), (1, 3)):
        before = trajectory.steps[first].prompt_ids + trajectory.steps[first].response_ids
        assert trajectory.steps[later].prompt_ids[: len(before)] == before
    assert [step.reward for step in trajectory.steps] == [0.0, 0.25, 0.0, 0.25]


def test_a_role_has_its_own_temperature_and_token_limit() -> None:
    roles = {"teller": {"temperature": 0.5, "max_tokens": 7}}
    trajectory, engine = play(Interview, ["why", "so", "really", "yes"], roles=roles)
    assert [call.sampling.max_tokens for call in engine.calls] == [64, 7, 64, 7]
    assert [step.temperature for step in trajectory.steps] == [1.0, 0.5, 1.0, 0.5]


def test_a_response_beyond_the_limit_of_its_role_ends_the_episode_and_names_the_role() -> None:
    class Caught(Interview):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            try:
                return await super().run(row, episode)
            finally:
                reasons.append(str(episode.limit))

    reasons: list[str] = []
    trajectory, _ = play(Caught, ["why", "a long story"], roles={"teller": {"max_tokens": 5}})
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert (len(trajectory.steps), trajectory.steps[1].is_cut) == (2, True)
    assert reasons == ["a response was cut at 5 tokens, max_response_tokens of 'teller' is 5"]


def test_a_role_that_the_flow_does_not_declare_is_refused() -> None:
    class Misspelt(AgentFlowBase):
        roles: ClassVar[tuple[str, ...]] = ("planner",)

        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            await episode.act(Observation(messages=row.prompt), role="plannr")
            return StopReason.ANSWERED

    trajectory, engine = play(Misspelt, ["on"])
    assert trajectory.stop is StopReason.ERROR
    assert "role 'plannr' is not one of the roles of this flow, ('planner',)" in (trajectory.error or "")
    assert engine.calls == []


class Drafts(AgentFlowBase):
    """Two drafts at once; the second one begun is ready first, and each is rewarded on its own."""

    roles: ClassVar[tuple[str, ...]] = ("drafter", "critic")

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        asked = Observation(messages=row.prompt)
        drafts = await asyncio.gather(*(episode.respond(asked, role="drafter") for _ in range(2)))
        for paid, draft in enumerate(drafts):
            episode.observe(Transition(terminated=True, reward=float(paid)), to=draft)
        await episode.act(asked, role="critic")
        return StopReason.ANSWERED


def test_roles_without_the_comma_of_a_tuple_are_refused() -> None:
    with pytest.raises(TypeError, match=r"roles = \('planner',\)"):
        type("Alone", (AgentFlowBase,), {"roles": "planner"})


def test_a_reward_goes_to_the_response_that_it_names() -> None:
    trajectory, _ = play(Drafts, lambda call: f"draft {call.turn}")
    assert [(step.role, step.action_text, step.reward) for step in trajectory.steps] == [
        ("drafter", "draft 0", 0.0),
        ("drafter", "draft 1", 1.0),
        ("critic", "draft 2", 0.0),
    ]


def test_steps_know_when_they_began_and_episodes_too() -> None:
    trajectory, _ = play(Interview, ["why", "so", "really", "yes"])
    starts = [step.start_seconds for step in trajectory.steps]
    assert starts == sorted(starts)
    assert all(0 <= start <= trajectory.seconds for start in starts)
    ends = [step.start_seconds + step.generate_seconds for step in trajectory.steps]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert trajectory.started is not None


def test_roles_and_starts_are_stored_and_older_records_are_read_without_them() -> None:
    trajectory, _ = play(Interview, ["why", "so", "really", "yes"])
    record = trajectory_to_json(trajectory)
    assert trajectory_from_json(record) == trajectory
    older = {**record, "format": 2, "steps": [dict(step) for step in record["steps"]]}
    del older["started"]
    for step in older["steps"]:
        del step["role"], step["start_seconds"]
    read = trajectory_from_json(older)
    assert (read.started, {step.role for step in read.steps}, {step.start_seconds for step in read.steps}) == (
        None,
        {""},
        {None},
    )
    plain = replace(trajectory, steps=[replace(step, role="") for step in trajectory.steps])
    assert "role" not in trajectory_to_json(plain)["steps"][0]
    assert [who for who, _ in transcript(trajectory)] == ["asker", "teller", "asker", "teller"]


def test_metrics_describe_each_role() -> None:
    trajectory, _ = play(Interview, ["why", "so", "really", "yes"])
    logprobs = [[-1.0, -2.0, -3.0, -0.5], [-0.5] * 3, [-1.0] * 7, [-0.25] * 4]
    steps = [
        replace(step, response_logprobs=own, temperature=1.0)
        for step, own in zip(trajectory.steps, logprobs, strict=True)
    ]
    attempts = [replace(trajectory, steps=steps), replace(trajectory, steps=[], stop=StopReason.ERROR)]
    metrics = rollout_metrics([Group(row=row(), trajectories=attempts)], success_reward=1)
    # asker: 2 steps, 4 + 7 tokens in one of two episodes; -log p 6.5 + 7 over 11 tokens
    assert metrics["role/asker/steps"] == 1.0
    assert metrics["role/asker/response_tokens"] == 5.5
    assert metrics["role/asker/entropy"] == pytest.approx(13.5 / 11)
    assert (metrics["role/asker/reward"], metrics["role/teller/reward"]) == (0.0, 0.25)
    assert metrics["role/teller/cut"] == 0.0
    credited = CreditedTrajectory(trajectory=trajectory, advantages=[[2.0] * 4, [1.0] * 3, [-1.0] * 7, [-1.0] * 4])
    # of the asker, 4 tokens at 2 and 7 at -1: sums 1 and 15; of the teller, 3 at 1 and 4 at -1
    assert role_advantages([credited]) == {
        "role/asker/advantage": pytest.approx(1 / 11),
        "role/asker/advantage_size": pytest.approx(15 / 11),
        "role/teller/advantage": pytest.approx(-1 / 7),
        "role/teller/advantage_size": 1.0,
    }


def test_rewards_of_a_role_in_a_failed_episode_count_as_0() -> None:
    trajectory, _ = play(Interview, ["why", "so", "really", "yes"])
    failed = replace(trajectory, stop=StopReason.ERROR)
    metrics = rollout_metrics([Group(row=row(), trajectories=[trajectory, failed])], success_reward=1)
    assert metrics["reward/mean"] == metrics["role/teller/reward"] == 0.25  # 0.5 in one of two episodes

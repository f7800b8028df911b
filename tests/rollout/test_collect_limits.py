"""When an episode is stopped from outside: by its steps, its response, its context."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.flows.episode import Episode
from agent_r1.flows.recording import attach_transition
from agent_r1.types import Action, Observation, Step, StopReason, TaskRow, Transition
from tests.chatml import collector, renderer, row, tokenizer
from tests.rollout.test_collect import Echo, echo, play


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


def test_a_message_that_is_too_long_for_any_vocabulary_is_not_tokenised() -> None:
    class Flood(Echo):
        """Answers with 1, 2, 1,000,000 characters."""

        async def step(self, action: Action) -> Transition:
            said = [{"role": "assistant", "content": action.text}, {"role": "user", "content": "x" * self.sizes.pop(0)}]
            self.messages = [*self.messages, *said]
            return Transition(observation=Observation(messages=self.messages))

        async def reset(self, row: TaskRow) -> Observation:
            self.messages, self.sizes = list(row.prompt), [1, 2, 1_000_000]
            return Observation(messages=self.messages)

    flow = collector(["ab"] * 4, make_env=lambda _: Flood(), max_context_tokens=200)
    episode = flow.episode(Episode, "flood", 0)
    trajectory = asyncio.run(flow.play(row(), episode))
    assert (trajectory.stop, len(trajectory.steps)) == (StopReason.MAX_TOKENS, 3)
    # Contents and roles: the prompt, three replies of 2 characters, three answers.
    told = sum(len(message["role"]) + len(message["content"]) for message in row().prompt)
    size = told + 3 * (len("assistant") + 2) + 3 * len("user") + 1 + 2 + 1_000_000
    assert str(episode.limit) == f"the observation has {size} characters, max_context_tokens is 200"


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers()),
        max_size=20,
    )
)
def test_info_is_recorded_as_json_reads_it_back(info: dict[str, Any]) -> None:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0])
    attach_transition(step, Transition(terminated=True, info=info), source="env")
    assert repr(step.info) == repr(json.loads(json.dumps(info)))  # repr: nan is not equal to itself


def test_long_info_is_refused_whatever_it_is_made_of() -> None:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0])
    infos: list[dict[str, Any]] = [{"a": "x" * 100_000}, {str(n): "\x00" * 500 for n in range(40)}, {"a": [0] * 50_000}]
    for info in infos:
        with pytest.raises(ValueError, match="at most 100000 can be recorded"):
            attach_transition(step, Transition(terminated=True, info=info), source="env")


def test_the_response_budget_shrinks_to_the_room_left_in_the_context() -> None:
    engine = ScriptedEngine(["stop"], tokenizer=tokenizer())
    prompt = len(renderer().render(Observation(messages=row().prompt)))
    play(collector(engine, make_env=echo, max_context_tokens=prompt + 7))
    assert engine.calls[0].sampling.max_tokens == 7


def test_an_episode_out_of_steps_remembers_the_prompt_it_leaves_unanswered() -> None:
    [longer] = play(collector(["a", "b", "stop"], make_env=echo))
    [cut] = play(collector(["a", "b"], make_env=echo, max_steps=2))
    assert cut.next_prompt_ids == longer.steps[2].prompt_ids
    assert longer.next_prompt_ids == []  # it terminated


def test_an_unanswered_observation_that_is_too_long_does_not_change_why_the_episode_ended() -> None:
    class Careless(Echo):
        async def step(self, action: Action) -> Transition:
            return Transition(observation=Observation(text="x" * 10**6))  # far beyond any context

    [trajectory] = play(collector(["a"], make_env=lambda _: Careless(), max_steps=1))
    assert (trajectory.stop, trajectory.error) == (StopReason.MAX_STEPS, None)
    assert trajectory.next_prompt_ids == []

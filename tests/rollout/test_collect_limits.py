"""When an episode is stopped from outside: by its steps, its response, its context."""

from __future__ import annotations

from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.types import Action, Observation, StopReason, Transition
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

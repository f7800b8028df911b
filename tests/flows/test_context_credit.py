"""Summaries in credit, rewards, metrics and transcripts: trained like actions, but not counted as such."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.cli.display import transcript_panel
from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.credit import Values, assign_credit
from agent_r1.learn.rewards import overlong_penalties
from agent_r1.rollout.rewards.judge import judge_prompt
from agent_r1.rollout.rewards.shaping import matches
from agent_r1.runs.metrics import rollout_metrics
from agent_r1.runs.trajectories import trajectory_from_json, trajectory_to_json, transcript
from agent_r1.types import Group, PerToken, Step, StopReason, SummaryQuality, Trajectory
from tests.chatml import row
from tests.flows.test_context_episode import POLICIES, play, summary


def summarised(name: str = "t", reward: float = 0.0) -> Trajectory:
    trajectory, _ = play(summary)
    return replace(trajectory, trajectory_id=name, outcome_reward=reward)


def test_summaries_get_the_advantage_of_their_trajectory() -> None:
    group = Group(row=row(), trajectories=[summarised("a", 1.0), summarised("b")])
    good, bad = assign_credit([group], get_algorithm("dr_grpo"))
    assert {value for step in good.advantages for value in step} == {0.5}
    assert {value for step in bad.advantages for value in step} == {-0.5}
    assert all(len(step) > 0 for step in good.advantages)


def test_a_summary_is_not_discounted() -> None:
    def step(reward: float) -> Step:
        return Step(prompt_ids=[1], response_ids=[2, 3], response_logprobs=[0.0, 0.0], reward=reward)

    steps = [step(0.0), replace(step(0.0), summary="whole"), step(1.0)]
    group = Group(
        row=row(),
        trajectories=[Trajectory(row_id="r", trajectory_id="t", steps=steps, stop=StopReason.ANSWERED)],
    )
    settings = {"gamma": 0.5, "whiten_batch": False}
    [credited] = assign_credit([group], get_algorithm("reinforce", **settings))
    # 1 at the last action, 1 at the summary before it, half of that at the action before
    assert credited.advantages == [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0]]


def step(*prompt: int, feedback: str = "", reward: float = 0.0, summary: SummaryQuality | None = None) -> Step:
    return Step(
        prompt_ids=list(prompt),
        response_ids=[9],
        response_logprobs=[0.0],
        feedback=feedback,
        reward=reward,
        summary=summary,
    )


def attempt(name: str, *steps: Step, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    return Trajectory(row_id="r", trajectory_id=name, steps=list(steps), stop=stop)


def gigpo(a: list[Step], b: list[Step], **settings: Any) -> list[PerToken]:
    """With returns of 1 and 0: +-0.5 for all, and what the comparison of states adds."""
    group = Group(row=row(), trajectories=[attempt("a", *a), attempt("b", *b)])
    made = get_algorithm("gigpo", **({"scale": "none", "gamma": 1.0, "step_weight": 1.0} | settings))
    return [credited.advantages for credited in assign_credit([group], made)]


def test_gigpo_anchors_an_action_after_a_summary_to_the_observation_before_it() -> None:
    wrote = step(5, summary="whole")
    a, b = gigpo(
        [step(1, feedback="a door"), wrote, step(6, reward=1.0)],
        [step(2, feedback="a door"), step(7)],
        anchor="observation",
    )
    # the actions after "a door" are compared: 1 against 0 gives +-0.5
    assert (a, b) == ([[0.5], [0.5], [1.0]], [[-0.5], [-1.0]])
    # nor where the prompt is the same
    assert gigpo([wrote, step(6, reward=1.0)], [step(5), step(7)], anchor="prompt") == [
        [[0.5], [0.5]],
        [[-0.5], [-0.5]],
    ]


def test_gigpo_never_compares_a_summary_with_a_similar_action() -> None:
    shown, asked = tuple(range(100, 180)), (1, 2, 3, 4)  # the prompt, and the instruction below it
    wrote, acted = step(*shown, *asked, summary="whole"), step(*shown)
    apart = [[[0.5], [0.5]], [[-0.5], [-0.5]]]
    assert gigpo([wrote, step(6, reward=1.0)], [acted, step(77)], anchor="prompt", similarity=0.9) == apart
    assert gigpo([wrote, step(6, reward=1.0)], [acted, step(77)], anchor="observation", similarity=0.9) == apart
    other = step(*shown, *asked, 5, summary="cut")  # with another summary it is
    both = gigpo([wrote, step(6, reward=1.0)], [other, step(77)], anchor="prompt", similarity=0.9)
    assert both == [[[1.0], [0.5]], [[-1.0], [-0.5]]]


def test_gigpo_does_not_discount_over_a_summary() -> None:
    # from the first step on: 0.5 * 1 with or without a summary on the way, as one action lies between it and the reward
    wrote = step(5, summary="whole")
    a, b = gigpo([step(1), wrote, step(6, reward=1.0)], [step(1), step(7)], anchor="prompt", gamma=0.5)
    # 0.5 against 0 gives +-0.25
    assert (a, b) == ([[0.75], [0.5], [0.5]], [[-0.75], [-0.5]])


@pytest.mark.parametrize("name", ["ppo", "steppo"])
@pytest.mark.parametrize("last", [None, "whole"])
def test_an_episode_that_outgrew_its_context_does_not_bootstrap(name: str, last: SummaryQuality | None) -> None:
    cut = attempt("t", step(1), step(2, summary=last), stop=StopReason.MAX_TOKENS)
    made = get_algorithm(name, gamma=0.5, lam=0.0, whiten_batch=False)
    values = Values(per_token=[[8.0], [8.0]])
    [credited] = assign_credit([Group(row=row(), trajectories=[cut])], made, values=[values])
    assert credited.advantages == [[-4.0], [-8.0]]  # 0.5 * 8 - 8, then 0 - 8


def test_overlong_penalties_apply_only_to_actions() -> None:
    trajectory = summarised()
    longest = max((step for step in trajectory.steps if not step.is_summary), key=lambda step: len(step.response_ids))
    limit = len(longest.response_ids)
    assert any(len(step.response_ids) > limit for step in trajectory.steps if step.is_summary)
    placed = overlong_penalties(trajectory, limit=limit, buffer=0.0, penalty=1.0)
    assert [k for k, rewards in enumerate(placed) if any(rewards)] == [trajectory.steps.index(longest)]


def test_rewards_on_formats_ignore_summaries_and_transcripts_mark_them() -> None:
    trajectory = summarised()
    assert matches(r"code is")(row(), trajectory) == 0
    assert matches(r"\A(on|7319)\Z", "every")(row(), trajectory) == 1
    speakers = [speaker for speaker, _ in transcript(trajectory) if speaker != "env"]
    assert speakers == ["memo" if step.is_summary else "agent" for step in trajectory.steps]
    [asked] = judge_prompt()(row(), trajectory)
    assert asked["content"].count("<assistant_notes-") == speakers.count("memo")


def test_metrics_count_hidden_messages_and_summaries() -> None:
    group = Group(row=row(), trajectories=[summarised("a"), summarised("b")])
    metrics = rollout_metrics([group], success_reward=1.0)
    steps = group.trajectories[0].steps
    assert metrics["episode/steps"] == 7
    assert metrics["episode/prompt_tokens"] == sum(len(step.prompt_ids) for step in steps)
    assert metrics["context/summaries"] == sum(step.is_summary for step in steps)
    assert metrics["context/bad_summaries"] == 0
    hidden = [step.hidden_messages or 0 for step in steps]  # of a summary none
    assert metrics["context/hidden_messages"] == sum(hidden) / 7 > 0
    plain, _ = play(POLICIES["append"])
    without = rollout_metrics([Group(row=row(), trajectories=[plain])], success_reward=1.0)
    assert not any(name.startswith("context/") for name in without)


def test_records_store_summaries_and_older_records_can_be_read() -> None:
    trajectory = summarised()
    record = json.loads(json.dumps(trajectory_to_json(trajectory)))
    assert trajectory_from_json(record).steps == trajectory.steps
    for saved in record["steps"]:
        del saved["summary"], saved["hidden_messages"]
    assert not any(step.is_summary for step in trajectory_from_json(record).steps)


def test_the_transcript_panel_counts_actions() -> None:
    trajectory = summarised()
    panel = transcript_panel(Group(row=row(), trajectories=[trajectory]), trajectory)
    assert str(panel.subtitle).endswith("answered, 7 steps")

"""Episodes of which a context policy hides something: merged and packed, the loss is that of one forward per step."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.envs.text_env import Reply, TextEnv
from agent_r1.flows.context import ContextPolicy, Notes, Window
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import Group, TaskRow, Trajectory
from tests.chatml import row
from tests.flows.test_context_episode import POLICIES, play, segments, summary
from tests.learn.builders import VOCABULARY, on_policy
from tests.numerics.test_batch_equivalence import (
    DEFINITION_BOUNDS,
    MODELS,
    assert_near,
    by_definition,
    credited_for,
    gradient,
    learner_of,
)


class Chatter(TextEnv):
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def begin(self, row: TaskRow) -> str:
        return "go"

    def reply(self, said: str) -> Reply:
        done, paid = self.chance.random() < 0.15, self.chance.choice([0.0, 0.5])
        return Reply(text=self.chance.choice("abc"), done=done, reward=paid)


def random_group(seed: int, policy: str) -> Group:
    chance = random.Random(seed)
    tight: dict[str, Callable[[], ContextPolicy | None]] = {
        **POLICIES,
        "window": lambda: Window(turns=1),
        "summary": lambda: summary(120, summary_tokens=6),
        "notes": lambda: Notes(turns=1, notes=1, note_chars=9),
    }

    words = ["<think>p</think>q", "<think>r", "xyz"] if policy == "strip" else ["p", "qr", "xyz"]

    def attempt(name: str) -> Trajectory:
        trajectory, _ = play(tight[policy], lambda _: chance.choice(words), env=lambda: Chatter(chance), max_steps=4)
        # A vocabulary of 32 is enough for the question, and what extends what stays as it is.
        steps = [
            replace(
                step,
                prompt_ids=[token % VOCABULARY for token in step.prompt_ids],
                response_ids=[token % VOCABULARY for token in step.response_ids],
            )
            for step in trajectory.steps
        ]
        rest = [token % VOCABULARY for token in trajectory.next_prompt_ids]
        paid = chance.choice([0.0, 1.0])
        return replace(trajectory, trajectory_id=name, steps=steps, next_prompt_ids=rest, outcome_reward=paid)

    return Group(row=row(), trajectories=[attempt("a"), attempt("b")])


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("name", ["grpo", "gigpo", "steppo"])
def test_merged_and_packed_training_equals_one_forward_per_step(policy: str, name: str) -> None:
    groups: list[Group] = []
    seed = 0
    while not groups or all(t.outcome_reward == 1 for t in groups[0].trajectories):
        groups, seed = [random_group(seed, policy)], seed + 1
    policy_model = PolicyModel(deepcopy(MODELS["llama-tied"]))
    groups = on_policy(groups, policy_model, random.Random(0), noise=0.2)
    credited = credited_for(name, False, groups)
    got = gradient(learner_of(name, False, max_tokens_per_pack=200), credited)
    assert_near(got, by_definition(name, False, credited, "llama-tied"), DEFINITION_BOUNDS)


@given(seed=st.integers(0, 10_000), policy=st.sampled_from(list(POLICIES)))
@settings(max_examples=25, deadline=None)
def test_every_sampled_token_is_trained_once_whatever_the_policy_hides(seed: int, policy: str) -> None:
    for trajectory in random_group(seed, policy).trajectories:
        assert 1 <= segments(trajectory) <= len(trajectory.steps)
